"""Distillation in training loops of other libraries."""
