"""A run from its first step to its last: batches, optimizer steps, evaluation, checkpoints and exports.

The driver calls the workers, as the `Plan` of `preflight` says. Two other tasks that need workers are here as well:
teacher caches are built and finished models are evaluated.
"""
