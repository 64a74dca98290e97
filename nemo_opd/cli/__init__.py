"""The installed command, `nemo-opd`: a table of verbs, each a module with a `COMMAND`."""
