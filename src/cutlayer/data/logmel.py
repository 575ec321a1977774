"""Sound to images: the energy in mel bands over time, as batched tensor operations."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

FLOOR = 1e-4  # energy below which all is silence: 88 dB below the loudest tone, (1024 / 4) ** 2


def log_mel(sound: Tensor, *, rate: int = 16_000, bands: int = 32, frames: int = 32, window: int = 1024) -> Tensor:
    """(clips, samples) in [-1, 1] to (clips, 1, bands, frames).

    The frames' centres divide the clip evenly; the windows reach over its ends into silence.
    """
    hop = sound.shape[1] // frames
    reach = window - hop
    framed = pad(sound, (reach // 2, reach - reach // 2)).unfold(1, window, hop)[:, :frames]
    spectrum = torch.fft.rfft(framed * torch.hann_window(window, dtype=sound.dtype, device=sound.device))
    energy: Tensor = (spectrum.real.square() + spectrum.imag.square()) @ mel_filters(bands, window, rate).to(sound).T
    return (energy + FLOOR).log().transpose(1, 2).unsqueeze(1)


def mel_filters(bands: int, window: int, rate: int) -> Tensor:
    """(bands, frequencies): triangles of height 1, evenly spaced in mel, each from the last centre to the next."""
    edges = _hertz(torch.linspace(0, _mel(rate / 2), bands + 2, dtype=torch.float64))[:, None]
    frequencies = torch.linspace(0, rate / 2, window // 2 + 1, dtype=torch.float64)
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
    return torch.minimum(rising, falling).clamp(min=0)


def _mel(hertz: float) -> float:
    return 2595 * math.log10(1 + hertz / 700)


def _hertz(mel: Tensor) -> Tensor:
    return 700 * (10 ** (mel / 2595) - 1)
