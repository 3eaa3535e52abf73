"""A cluster of several boxes: the lead commands, the others obey; each holds a stretch of the pipeline."""
