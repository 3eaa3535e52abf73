"""State machine of the coordinator's open round."""
