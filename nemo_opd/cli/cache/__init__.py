"""Verbs about caches of teachers."""
