"""Evaluation of models: held-out loss, and questions with checked answers."""
