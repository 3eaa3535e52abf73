"""Erasure shards of what a run's commits name: made, served, probed, and restored from."""
