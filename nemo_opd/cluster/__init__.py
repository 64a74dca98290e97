"""Devices, processes and calls: a run's worker groups, on Ray or without it."""
