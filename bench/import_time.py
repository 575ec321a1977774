"""How long `import cutlayer` takes, against `import torch`, which is most of it.

Each import runs in a fresh interpreter; the two sides take turns, after one turn that warms the file cache.
"""

import subprocess
import sys
from statistics import median

from tables import options, show

TURNS = 9
BAR = 1.5  # of the ratio
TIMED = "import time; begin = time.perf_counter(); import {}; print(time.perf_counter() - begin)"


def main() -> None:
    args = options(__doc__.splitlines()[0])
    turns = 1 if args.quick else TURNS
    times = [(seconds("torch"), seconds("cutlayer")) for _ in range(1 + turns)][1:]
    torch, cutlayer = (median(side) for side in zip(*times, strict=True))
    ratio = median(ours / theirs for theirs, ours in times)
    row = {
        "import torch, s": torch,
        "import cutlayer, s": cutlayer,
        "ratio": ratio,
        "bar": BAR,
        "met": ratio <= BAR,
    }
    show([row], args.json)


def seconds(module: str) -> float:
    """The seconds that an import takes in a new interpreter."""
    command = [sys.executable, "-c", TIMED.format(module)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


if __name__ == "__main__":
    main()
