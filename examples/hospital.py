"""Regression on a table whose rows belong to hospitals: each hospital is a client and keeps its patients.

    python hospital.py                                                   # writes stays.csv itself
    python hospital.py --csv mine.csv --target days --group hospital     # your own table

Every hospital keeps a fifth of its rows and tests the model on them.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
import torch
from torch import nn

import cutlayer as cl


def write_stays(path: Path) -> None:
    """Write made-up stays: older and sicker patients stay longer, in some hospitals more than in others."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["hospital", "age", "severity", "surgery", "days"])
        for name, habit in (("Aachen", 0.0), ("Bergen", 1.0), ("Cork", -1.0), ("Delft", 0.5), ("Essen", -0.5)):
            for _ in range(rng.integers(100, 300)):
                age, severity, surgery = rng.uniform(20, 90), rng.normal(), rng.integers(0, 2)
                days = 4 + habit + age / 15 + 2 * max(severity, 0) + surgery * age / 30 + rng.normal()
                table.writerow([name, round(age), f"{severity:.2f}", surgery, f"{days:.1f}"])


parser = argparse.ArgumentParser()
parser.add_argument("--csv", type=Path, default=Path("stays.csv"))
parser.add_argument("--target", default="days")
parser.add_argument("--group", default="hospital")
parser.add_argument("--rounds", type=int, default=30)
given = parser.parse_args()
if not given.csv.exists():
    write_stays(given.csv)

data = cl.load(str(given.csv), target=given.target, group=given.group, task="regression", standardise=True)
names = np.array(data.train.group_names)[data.train.groups]
print(f"{len(data.train)} rows to train with, {len(data.test)} to test, {data.train.x.shape[1]} features")

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(data.train.x.shape[1], 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
split = cl.Split(net, cut=2, loss=lambda out, y: nn.functional.mse_loss(out.squeeze(1), y))
method = cl.sfl_v1(model=split, client_opt=cl.adam(0.01), server_opt=cl.adam(0.01))
result = cl.train(
    method,
    data.train,
    cl.natural(names),
    rounds=given.rounds,
    test=data.test,
    hold_out=0.2,
    batching=cl.Batching(size=16),
    metrics=["mae", "r2"],
)
last = result.history[-1]
print(f"test: {last['test_mae']:.2f} days off on average, R2 {last['test_r2']:.2f}")
for name, found in last["client_tests"].items():
    print(f"  {name}: {found['mae']:.2f} days off, R2 {found['r2']:.2f}, {found['samples']} patients of its own")
