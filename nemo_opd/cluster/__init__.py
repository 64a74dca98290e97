"""A run's worker groups, with Ray or without: their devices, processes and calls."""
