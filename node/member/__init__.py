"""Task that joins a run and takes part in its rounds."""
