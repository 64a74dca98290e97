"""Sandboxes for untrusted programs, and tests whose verdict a program cannot forge (docs/sandbox.md)."""
