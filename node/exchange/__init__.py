"""Requests to the coordinator and to other peers."""
