"""The server side: clients' sessions, their queues of commands, the answers, and the other server.

Imports: core, data, engines, errors, meters, pieces, registry, remote/device, remote/identity, remote/monitor,
remote/protocol, remote/tensors, runs, version.
"""
