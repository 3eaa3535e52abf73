"""Signed statements, as bytes on the wire."""
