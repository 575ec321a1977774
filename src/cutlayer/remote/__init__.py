"""Clients in other processes: devices over gRPC, and the actors of a Ray cluster.

Imports: nothing; its packages say what they import.
"""

import os

# Silence gRPC's own log: failed connections are reported in our own words.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
