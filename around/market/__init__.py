"""A market of runs and machines: who has a run announces it, who has a machine offers it, and both are read by anybody."""
