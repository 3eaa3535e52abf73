"""0G's networks as stores of a run: storage for its archive, data availability for its commits. These are adapters:
downloads are hashed and verified like those of an unknown peer."""
