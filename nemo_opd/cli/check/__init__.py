"""Check of a GPU machine."""
