"""The node's HTTP API: what `dilocox status` and its siblings read."""
