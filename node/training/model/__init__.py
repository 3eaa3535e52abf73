"""Model, optimizer and pipeline of a worker."""
