"""The installed command, `nemo-opd`: a table of verbs in main.py, and modules with their commands."""
