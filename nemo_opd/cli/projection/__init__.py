"""Verbs for projections: all passes at once, single passes, and inspection of the result."""
