"""Triton kernels for losses of logit rows (methods.md §8.1) and for parts of decoder layers.

Only `row_sums`, `log_ratios`, `rows`, `rms_norm`, `swiglu`, `rotary` and their shared `arithmetic` import Triton; other
modules import them at the first launch.
"""
