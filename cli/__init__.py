"""`dilocox …`: one file per verb. The only package that may import both node and coordinator."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
"""Before gRPC is loaded: else everybody who sends us junk instead of TLS writes a line of our log, as often as they like."""
