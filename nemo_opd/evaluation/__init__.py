"""How good the models are."""
