"""Triton kernels for losses of logit rows (methods.md §8.1) and for parts of decoder layers.

Only `rows`, `layers` and `arithmetic` import Triton; other modules import them at the first launch.
"""
