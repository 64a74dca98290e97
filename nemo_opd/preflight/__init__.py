"""What happens before a run's first step: models and data are read, settings are checked, memory is estimated.

The result is a `Plan`, which `training` carries out. No worker has started yet.
"""
