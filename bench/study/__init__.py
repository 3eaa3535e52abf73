"""Registered comparison of algorithms; `design.py` defines its arms, their tuning, and the clock."""
