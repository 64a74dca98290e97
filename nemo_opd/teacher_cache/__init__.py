"""Teacher answers on disk: written once, read by every run (methods.md §9.1)."""
