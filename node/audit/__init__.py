"""Replay of another cluster's inner steps."""
