"""Running untrusted programs, and tests of them whose verdict the program cannot forge (docs/sandbox.md)."""
