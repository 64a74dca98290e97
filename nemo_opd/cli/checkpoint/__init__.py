"""Verbs that convert between checkpoints and Hugging Face folders."""
