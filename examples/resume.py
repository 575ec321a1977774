"""Stop a run and resume it: the same bits as a run that was never stopped.

    python resume.py

The model has dropout and the optimiser a momentum: masks, batches and moments continue where they were.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import cutlayer as cl

ROUNDS = 6
digits = cl.load("digits")
parts = cl.dirichlet(digits.train.y, num_clients=10, alpha=0.3, min_size=8, key=0)


def train(folder: str, **options: Any) -> cl.Result:
    """Train in this folder."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    opt = cl.sgd(0.02, momentum=0.9)
    return cl.train(
        cl.sfl_v2(model=cl.Split(net, cut=4), client_opt=opt, server_opt=opt),
        digits.train,
        parts,
        rounds=ROUNDS,
        per_round=5,
        test=digits.test,
        batching=cl.Batching(size=8),
        out=folder,
        **options,
    )


def stop_after_two(record: dict) -> None:
    if record["round"] == 2:
        raise cl.StopTraining("enough for today")


whole = train("runs/whole", overwrite=True)
print(f"never stopped: round {len(whole.history)}, accuracy {whole.history[-1]['test_accuracy']:.4f}")
stopped = train("runs/parts", overwrite=True, on_round=stop_after_two)
print(f"stopped: round {len(stopped.history)}, {stopped.ended}")
resumed = train("runs/parts", resume=True)
print(f"resumed: round {len(resumed.history)}, accuracy {resumed.history[-1]['test_accuracy']:.4f}")

assert all(torch.equal(resumed.state_dict[name], value) for name, value in whole.state_dict.items())
assert Path("runs/parts/metrics.jsonl").read_bytes() == Path("runs/whole/metrics.jsonl").read_bytes()
print(f"the same bits: {len(whole.state_dict)} tensors and {ROUNDS} records")
