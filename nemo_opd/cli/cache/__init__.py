"""Verbs for teacher caches."""
