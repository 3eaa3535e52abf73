"""Connections between the hosts of one cluster."""
