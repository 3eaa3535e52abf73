"""What takes part in a run: a node with its workers and boxes, a holder, an archive; what plans, checks and tries out a run."""
