"""Served teachers: the requests, and rows of the answers (methods.md §13.3)."""
