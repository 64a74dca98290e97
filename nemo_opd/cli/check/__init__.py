"""The check of a GPU machine."""
