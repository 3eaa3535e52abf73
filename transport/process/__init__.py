"""Processes, tasks and memory of a daemon."""
