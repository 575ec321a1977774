"""Values as bytes: trees are taken apart, tensors packed, and messages framed.

Imports: core, errors, registry, remote/protocol.
"""
