"""Worker processes of this host, and the devices they use."""
