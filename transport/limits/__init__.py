"""Limits of what callers may take."""
