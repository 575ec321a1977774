"""A model cut into a client's part and a server's part: units, how they are found, and pure functions of them.

Imports: core, data, errors.
"""

from cutlayer.split.split import Split

__all__ = ["Split"]
