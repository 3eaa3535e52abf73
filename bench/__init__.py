"""Benches, one script per claim. Each prints a table and writes JSON into bench/results/."""
