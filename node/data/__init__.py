"""Text into corpora, and a run's corpus onto this machine. Free of torch."""
