"""Codec, error feedback and outer optimizer. Imports torch."""
