"""One participant: a daemon, its stage workers and its command line."""
