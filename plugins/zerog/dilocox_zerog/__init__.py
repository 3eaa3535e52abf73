"""0G's networks as places for what a run keeps: storage for its archive, data availability for its commits. Adapters: what comes
back from there is hashed and verified as if a stranger sent it."""
