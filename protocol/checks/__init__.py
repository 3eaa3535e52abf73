"""Optional checks of a run, one module each, and the rules that only a check needs."""
