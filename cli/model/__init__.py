"""Commands for data and models."""
