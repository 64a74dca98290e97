"""Hugging Face models: loading, sharding, exporting."""
