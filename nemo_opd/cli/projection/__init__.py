"""Verbs about projections: all passes at once, each by itself, and a look at the result."""
