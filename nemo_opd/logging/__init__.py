"""Destinations of metrics: metrics.jsonl, the console, TensorBoard, wandb, and the report."""
