"""Clients that are somewhere else: the queue, the wire, real devices over gRPC, and a cluster of Ray."""

import os

# What gRPC has to say of a failed connection is told in a user's words where it matters.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
