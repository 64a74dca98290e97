"""What runs on a rank. Workers know torch.distributed and not Ray, so they run under torchrun and in tests too."""
