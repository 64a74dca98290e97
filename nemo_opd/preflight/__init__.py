"""Before a run's first step: models and data are read, settings are checked against them, memory is estimated."""
