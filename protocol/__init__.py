"""The protocol as a pure library: time, membership and bytes are arguments."""
