"""Mistakes that the tests must catch, and a tool that makes each mistake and runs its tests."""
