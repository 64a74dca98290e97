"""Sequences sampled from the student: engines, turns and records (METHODS §10)."""
