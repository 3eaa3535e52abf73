"""Commands of a run's owner."""
