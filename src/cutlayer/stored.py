"""The classes whose values checkpoints and messages may hold, beside plain dicts and tuples."""

from cutlayer.checkpoint import register
from cutlayer.pieces.alignment import Buffer
from cutlayer.pieces.hybrid import History
from cutlayer.pieces.observe import Estimates, Seen
from cutlayer.pieces.report import Report
from cutlayer.pieces.zeroth import Pair
from cutlayer.values import Held

for _cls in (Held, Report, Estimates, Seen, History, Buffer, Pair):
    register(_cls)
