"""Connections to other peers."""
