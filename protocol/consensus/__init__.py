"""Rules by which every peer computes the same chain from the same statements."""
