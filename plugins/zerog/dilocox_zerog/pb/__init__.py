"""Generated from proto/zerog: `make proto`."""
