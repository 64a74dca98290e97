"""The driver: it steers workers and holds no tensors of its own."""
