"""The client side: a device joins a server, runs its commands on local data, and stores the values that it keeps.

Imports: core, data, engines, errors, registry, remote/identity, remote/protocol, remote/tensors, runs, version.
"""
