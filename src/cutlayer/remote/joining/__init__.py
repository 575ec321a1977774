"""Prepares a device for a run: its data, its copy of the method, and what servers may ask of it.

What they may ask is found by playing rounds in advance, on tensors without content.

Imports: core, data, errors, meters, registry, remote/device, remote/protocol, remote/server, runs.
"""
