"""Files of a node that outlive its process."""
