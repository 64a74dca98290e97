"""Distillation in other libraries' training loops."""
