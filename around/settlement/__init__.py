"""Settling a run's work on an EVM chain (docs/around.md). The extra `settlement` is what it needs."""
