"""Between rounds: the codec, error feedback and the outer optimizer. Imports torch."""
