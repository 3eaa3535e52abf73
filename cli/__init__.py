"""`dilocox …`: one file per verb. The only package that may import both node and coordinator."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
"""gRPC reads it on import: without it every peer that sends invalid TLS adds a line to the log, as often as it likes."""
