"""Signed definition of a run, and everything that follows from it alone."""
