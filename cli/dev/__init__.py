"""Commands for trying and verifying."""
