"""The engine `ray`: virtual clients in the workers of a Ray cluster.

Imports: core, data, engines, errors, plugins, remote/device, remote/monitor, remote/protocol, remote/server,
remote/tensors, runs.
"""
