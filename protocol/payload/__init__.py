"""Bytes of a pseudo-gradient, and the trees that name them."""
