"""Distil any set of teacher language models into a student, whatever their tokenizers."""
