"""The registered comparison of algorithms: what is compared, how each is tuned, and on which clock, stands in `design.py`."""
