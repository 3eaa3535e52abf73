"""Commands that start or change a daemon."""
