"""Segmentation in a U-shape: images, masks, the first layers and the last stay at the client.

    python segmentation.py

The network is a small U-Net whose skip connection crosses the cut beside the hidden state. The server sees neither
images nor masks. The images are noisy discs; the metric is the intersection over union of the whole test set.
"""

import torch
from torch import Tensor, nn

import cutlayer as cl


class UNet(nn.Module):
    """An encoder and a decoder, with a skip connection from the first block to the last."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.down = nn.MaxPool2d(2)
        self.middle = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU()
        )
        self.up = nn.Upsample(scale_factor=2)
        self.last = nn.Conv2d(2 * width, 2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.first(image)
        coarse = self.up(self.middle(self.down(fine)))
        return self.last(torch.cat([fine, coarse], dim=1))


def discs(num: int, seed: int) -> cl.Arrays:
    """Draw images of 24x24 pixels, each with a disc, and their masks."""
    random = torch.Generator().manual_seed(seed)
    row, column = torch.meshgrid(torch.arange(24), torch.arange(24), indexing="ij")
    place, radius = 6 + 12 * torch.rand(num, 2, 1, 1, generator=random), 3 + 4 * torch.rand(num, 1, 1, generator=random)
    mask = (row - place[:, 0]) ** 2 + (column - place[:, 1]) ** 2 < radius**2
    return cl.from_arrays((mask + torch.randn(num, 24, 24, generator=random))[:, None], mask.long())


def iou(out: Tensor, y: Tensor) -> Tensor:
    """Return the intersection over union of the discs: one number, so it is computed once for the whole set."""
    found = out.argmax(1) == 1
    return (found & (y == 1)).sum() / (found | (y == 1)).sum()


torch.manual_seed(0)
split = cl.Split(UNet(), cut="down", head="last")
for place, held in zip(("client", "server"), split.sides, strict=True):
    print(f"layers at the {place}: {', '.join(sorted({name.rpartition('.')[0] for name in held}))}")
train, test = discs(400, seed=0), discs(100, seed=1)
client, _ = split.initial()
crossing, _ = split.lower(client, test.x[:1], key=0)
print("crosses the cut:", ", ".join(f"{name} {tuple(value.shape[1:])}" for name, value in crossing.items()))
method = cl.sfl_v2(model=split, client_opt=cl.adam(0.005), server_opt=cl.adam(0.005))
result = cl.train(
    method, train, cl.iid(400, 5, key=0), rounds=8, test=test, batching=cl.Batching(size=16), metrics={"iou": iou}
)
for record in result.history[1::2]:
    print(f"round {record['round']}: loss {record['test_loss']:.3f}, IoU {record['test_iou']:.3f}")
sent = [kind for kind in result.history[-1]["bytes"] if kind.startswith("up_")]
print(f"sent by clients: {', '.join(sorted(sent))}")
