"""Generated from proto/ by `make proto`; `tests/unit/test_architecture.py` regenerates and compares."""
