"""Preparation of a run, before its first step: models and data are read, settings checked and memory estimated.

The result is a `Plan`, which `training` carries out. No worker has started yet.
"""
