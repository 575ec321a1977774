"""The client side: joins a server, runs its commands on local data, and stores what it keeps.

Imports: core, data, engines, errors, registry, remote/identity, remote/protocol, remote/tensors, runs, version.
"""
