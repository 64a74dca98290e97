"""Sequences sampled from the student: engines, turns and records (methods.md §10)."""
