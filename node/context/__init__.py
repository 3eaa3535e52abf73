"""Parts that everything in a node uses: peer, run, settings."""
