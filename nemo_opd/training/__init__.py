"""The driver of a run, which calls the workers and holds no tensors."""
