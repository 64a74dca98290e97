"""Batches of token ids for the student and every teacher, from files of text."""
