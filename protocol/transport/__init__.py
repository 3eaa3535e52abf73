"""I/O adapters that node and coordinator share. Nothing else in `protocol` imports this package."""
