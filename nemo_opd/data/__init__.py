"""Batches of token ids for the student and every teacher, read from text files."""
