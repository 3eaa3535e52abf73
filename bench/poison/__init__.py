"""Effect of hostile clusters on a model, by attack and defence."""
