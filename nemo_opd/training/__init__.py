"""What happens from a run's first step on: batches, optimizer steps, evaluation, checkpoints and exports.

The driver calls the workers as the `Plan` of `preflight` says, and holds no model. Builds of teacher caches and
evaluations of finished models, which also start workers, are here as well.
"""
