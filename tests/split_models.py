"""Models for the tests of cutting: the zoo and foreign ones."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutlayer.models import cnn, mlp, resnet18, resnet_tiny


class Residual(nn.Module):
    """A foreign model: a residual connection inside, in-place work, a parameter of its own, functions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 5)
        self.block = nn.ModuleDict({"inner": nn.Linear(5, 5), "norm": nn.BatchNorm1d(5)})
        self.act = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.full((5,), 1.5))
        self.fc2 = nn.Linear(5, 3)

    def forward(self, x: Tensor, flip: bool = False) -> Tensor:
        x = self.act(self.fc1(x))
        y = self.block["norm"](self.block["inner"](x))
        y += x
        x = self.act(y)
        x = torch.tanh(x) * self.scale
        x.mul_(0.5)
        x = -x if flip else x
        return self.fc2(x.view(x.size(0), -1))


class TwoInputs(nn.Module):
    """A foreign model with two inputs that meet after a layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(6, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        return self.out(torch.relu(self.left(image) + self.right(context)))


class Functional(nn.Module):
    """A foreign model whose dropout is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), 0.5, self.training))


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.BatchNorm1d(5), nn.Linear(5, 3))


def with_dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (64,)),
    "cnn": (lambda: cnn(width=4), (1, 8, 8)),
    "cnn batch": (lambda: cnn(width=4, norm="batch"), (1, 8, 8)),
    "cnn group": (lambda: cnn(width=4, norm="group"), (1, 8, 8)),
    "resnet_tiny": (resnet_tiny, (1, 8, 8)),
    "resnet18 3x3 batch": (lambda: resnet18(width=2), (3, 8, 8)),
    "resnet18 3x3 group": (lambda: resnet18(width=2, norm="group"), (3, 8, 8)),
    "resnet18 imagenet batch": (lambda: resnet18(width=2, stem="imagenet"), (3, 32, 32)),
    "resnet18 imagenet group": (lambda: resnet18(width=2, stem="imagenet", norm="group"), (3, 32, 32)),
    "sequential": (sequence, (6,)),
    "traced": (Residual, (6,)),
    "functional": (lambda: Functional().eval(), (6,)),
}


def make(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    model, shape = MODELS[name][0]().double(), MODELS[name][1]
    return model, torch.randn(3, *shape, dtype=torch.float64), torch.tensor([0, 1, 2])
