"""Served teachers: requests to their servers, and rows from the answers (methods.md §13.3)."""
