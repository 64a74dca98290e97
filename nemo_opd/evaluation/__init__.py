"""Evaluation of models by held-out loss, and by questions with checked answers."""
