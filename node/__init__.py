"""Node, relay and archive daemons: members of a run, and the code that plans, checks and tries out a run."""
