"""Meters observe the verbs and count bytes, seconds and memory; methods never mention them.

Imports: core, planning, registry.
"""

from collections.abc import Callable

from cutlayer import registry
from cutlayer.core.meter import Meter
from cutlayer.meters.ledger import Ledger

METERS: registry.Table[Callable[..., Meter]] = registry.table("METERS", {"ledger": Ledger})
