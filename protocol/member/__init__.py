"""State machine of a node in a run."""
