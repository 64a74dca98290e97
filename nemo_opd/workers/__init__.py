"""Student and teacher on one rank. Workers use torch.distributed but not Ray, so they also run under torchrun."""
