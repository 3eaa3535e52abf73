"""Files of a daemon: blobs, chain, corpora, events."""
