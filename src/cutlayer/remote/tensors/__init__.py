"""How values travel as bytes: trees taken apart, tensors packed, messages framed.

Imports: core, errors, registry, remote/protocol.
"""
