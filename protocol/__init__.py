"""How peers talk: a pure library. Time, membership and bytes are arguments."""
