"""Drives the round machine of one run: gRPC service, SQLite log, HTTP API. Sees no tensors."""
