"""Copies of a run in an archive."""
