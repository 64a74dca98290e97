"""Triton kernels over rows of logits, with their inputs (methods.md §8.1), and of parts of layers.

Triton is imported where a kernel is first launched: by `row_sums`, `log_ratios`, `rows`, `rms_norm`, `swiglu` and
`rotary`, and by no other module but the `arithmetic` that they share.
"""
