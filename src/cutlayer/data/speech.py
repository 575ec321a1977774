"""Speech Commands: one-second recordings of single words as 32x32 images of their log-mel energies.

The published validation set is part of the training set, as in published experiments of federated learning: version
0.02 has 94,824 recordings of 35 words to train and 11,005 to test. A sample's group is its speaker.
The energies are cached beside the recordings, as log_mel.npz; the rest comes from file names and testing_list.txt.
"""

import json
import logging
import math
import wave
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from cutlayer.core.checks import reason
from cutlayer.data.arrays import Arrays
from cutlayer.data.files import FileForm, bad_file, files_of, incomplete, made_once, read_bytes

log = logging.getLogger("cutlayer")

RATE = 16_000
SAMPLES = 16_000  # one second
FRONT_END = {"rate": RATE, "bands": 32, "frames": 32, "window": 1024}
EDITION = 1  # increase it when the same settings give other energies, to invalidate caches
FLOOR = 1e-4  # energy of silence: 88 dB below the loudest tone, (1024 / 4) ** 2
AT_ONCE = 512  # recordings in memory at a time
FOLDERS = ("speech_commands", "speech_commands_v0.02", "SpeechCommands/speech_commands_v0.02")


def _read(folder: Path) -> tuple[Arrays, Arrays] | None:
    lists = files_of(folder, [["testing_list.txt"], ["validation_list.txt"]])
    if lists is None:
        return None
    # Folders whose names begin with "_" are not words: _background_noise_.
    clips = sorted(path for path in folder.glob("*/*.wav") if not path.parent.name.startswith("_"))
    names = [f"{path.parent.name}/{path.name}" for path in clips]
    held_out = set(read_bytes(lists[0]).decode("utf-8", errors="replace").split())
    if absent := held_out.difference(names):
        raise incomplete(folder, min(absent))
    is_test = np.array([name in held_out for name in names], dtype=bool)
    if not is_test.any() or is_test.all():
        raise incomplete(folder, "a recording to train or one to test")
    x = made_once(
        "speech_commands", "the log-mel energies", folder / "log_mel.npz", _mark(names), lambda: _energies(clips)
    )
    return _standardised(_everything(clips, torch.from_numpy(x)), is_test)


def _mark(names: list[str]) -> str:
    # Names and settings, not contents: the cache exists to avoid reading every recording. So a recording that changes
    # under its old name is not noticed, and log_mel.npz must then be removed by hand.
    digest = sha256("\n".join(names).encode()).hexdigest()
    settings = {**FRONT_END, "samples": SAMPLES, "floor": FLOOR, "edition": EDITION}
    return json.dumps({**settings, "recordings": len(names), "names": digest})


def _energies(clips: list[Path]) -> NDArray[np.float32]:
    log.info("speech_commands: reading %s recordings, once", f"{len(clips):,}")
    parts = []
    for start in range(0, len(clips), AT_ONCE):
        sounds = np.stack([sound(path) for path in clips[start : start + AT_ONCE]])
        parts.append(log_mel(torch.from_numpy(sounds), **FRONT_END).numpy())
    return np.concatenate(parts)


def _everything(clips: list[Path], x: Tensor) -> Arrays:
    words, labels = np.unique([path.parent.name for path in clips], return_inverse=True)
    speakers, groups = np.unique([path.name.split("_")[0] for path in clips], return_inverse=True)
    return Arrays(
        x=x,
        y=torch.from_numpy(labels.astype(np.int64)),
        num_classes=len(words),
        groups=torch.from_numpy(groups.astype(np.int64)),
        group_names=tuple(str(speaker) for speaker in speakers),
    )


def sound(path: Path) -> NDArray[np.float32]:
    """Return one second of a recording in [-1, 1]; a shorter one is padded with silence, a longer one is cut."""
    try:
        with wave.open(str(path), "rb") as file:
            kind = (file.getframerate(), file.getnchannels(), 8 * file.getsampwidth())
            num, data = min(file.getnframes(), SAMPLES), file.readframes(SAMPLES)
    except (OSError, EOFError, wave.Error) as error:
        raise bad_file(path, reason(error)) from error
    if kind != (RATE, 1, 16):
        raise bad_file(path, f"it has {kind[0]} Hz, {kind[1]} channels and {kind[2]} bits, expected {RATE}, 1 and 16")
    if len(data) != 2 * num:
        raise bad_file(path, f"its header says {num} samples, but {len(data)} bytes follow")
    clip = np.zeros(SAMPLES, dtype=np.float32)
    clip[:num] = np.frombuffer(data, "<i2") / np.float32(32768)
    return clip


def _standardised(everything: Arrays, is_test: NDArray[np.bool_]) -> tuple[Arrays, Arrays]:
    """Return both sets, standardised with the mean and the standard deviation of the training set."""
    train, test = everything.take(~is_test), everything.take(is_test)
    assert isinstance(train.x, Tensor) and isinstance(test.x, Tensor)
    std, mean = torch.std_mean(train.x, correction=0)
    for x in (train.x, test.x):
        x.sub_(mean).div_(std)
    return train, test


def log_mel(sound: Tensor, *, rate: int = 16_000, bands: int = 32, frames: int = 32, window: int = 1024) -> Tensor:
    """Return the log energies in mel bands over time: (clips, samples) in [-1, 1] to (clips, 1, bands, frames).

    The centres of the frames are evenly spaced; windows that reach beyond the clip are padded with silence.
    """
    hop = sound.shape[1] // frames
    reach = window - hop
    framed = pad(sound, (reach // 2, reach - reach // 2)).unfold(1, window, hop)[:, :frames]
    spectrum = torch.fft.rfft(framed * torch.hann_window(window, dtype=sound.dtype, device=sound.device))
    energy: Tensor = (spectrum.real.square() + spectrum.imag.square()) @ mel_filters(bands, window, rate).to(sound).T
    return (energy + FLOOR).log().transpose(1, 2).unsqueeze(1)


def mel_filters(bands: int, window: int, rate: int) -> Tensor:
    """Return (bands, frequencies): triangles of height 1, evenly spaced in mel, from the last centre to the next."""
    highest = 2595 * math.log10(1 + rate / 2 / 700)  # the mel of half the rate
    edges = 700 * (10 ** (torch.linspace(0, highest, bands + 2, dtype=torch.float64)[:, None] / 2595) - 1)
    frequencies = torch.linspace(0, rate / 2, window // 2 + 1, dtype=torch.float64)
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
    return torch.minimum(rising, falling).clamp(min=0)


SPEECH_COMMANDS = FileForm("testing_list.txt, validation_list.txt and a folder of .wav files for each word", _read)
