"""Student and teacher on one rank. Workers know torch.distributed and not Ray, so they also run under torchrun."""
