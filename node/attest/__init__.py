"""Attestation evidence: attesters make it, verifiers check it offline, one module per kind."""
