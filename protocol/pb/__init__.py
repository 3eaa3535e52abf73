"""Generated from proto/ by `make proto`; `tests/unit/test_generated.py` regenerates and compares."""
