"""Arithmetic models of time, memory and disk. Nothing here does I/O."""
