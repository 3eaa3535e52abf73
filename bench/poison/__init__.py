"""What hostile clusters do to a model, by attack and defence."""
