"""Triton kernels over rows of logits, and their inputs (methods.md §8.1).

Triton is imported where a kernel is first launched: by `row_sums`, `log_ratios` and `rows`, and by no other module.
"""
