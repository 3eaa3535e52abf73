"""Checks before a run costs time."""
