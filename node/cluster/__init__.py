"""Cluster of several hosts: the lead host commands, the follower hosts obey; each runs a part of the pipeline."""
