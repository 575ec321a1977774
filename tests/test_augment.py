"""Augmentation: what is drawn is what is done, evenly, and for each client as if it were alone."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from cutlayer.data.augment import Augment, rotated
from cutlayer.errors import ConfigError, DataError

KEYS = (11, 12, 13)
ALL = Augment(crop=2, flip=True, vertical_flip=True, rotate=30.0)


def images(clients=3, samples=8, channels=3, height=6, width=5):
    shape = (clients, samples, channels, height, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def found(out, candidates):
    """Which of the candidates, by name, each image is."""
    names = [[name for name, image in candidates.items() if torch.equal(image, one)] for one in out]
    assert all(len(matches) == 1 for matches in names)
    return [matches[0] for matches in names]


def crops(image, by):
    """Every image of the old size in the padded image, by its place."""
    height, width = image.shape[1:]
    padded = pad(image, (by,) * 4)
    return {(i, j): padded[:, i : i + height, j : j + width] for i in range(2 * by + 1) for j in range(2 * by + 1)}


def test_off_returns_the_images_themselves():
    x = images()
    assert Augment()(x, KEYS) is x


def test_a_crop_is_a_slice_of_the_padded_image_and_every_place_is_as_likely():
    num = 8100
    image = images(1, 1)[0, 0]
    out = Augment(crop=4)(image.expand(1, num, *image.shape), [5])
    assert out.shape == (1, num, 3, 6, 5)
    places = found(out[0], crops(image, 4))
    counts = np.array([places.count(place) for place in crops(image, 4)])
    assert len(counts) == 81
    assert np.abs(counts - 100).max() < 4.5 * math.sqrt(100)
    rows, columns = np.array(places).T
    assert abs(np.corrcoef(rows, columns)[0, 1]) < 4 / math.sqrt(num)


@pytest.mark.parametrize(("option", "dim"), [("flip", 2), ("vertical_flip", 1)])
def test_half_of_the_images_are_flipped(option, dim):
    num = 2000
    image = images(1, 1)[0, 0]
    out = Augment(**{option: True})(image.expand(1, num, *image.shape), [5])
    kinds = found(out[0], {"as it was": image, "flipped": image.flip(dim)})
    assert abs(kinds.count("flipped") - num / 2) < 4 * math.sqrt(num / 4)


def test_options_do_not_change_what_the_others_draw():
    """Crop and both flips together are the crop alone, flipped where the flips alone flip."""
    x = images(samples=50)
    crop, flip, vertical = (
        Augment(**{k: v})(x, KEYS) for k, v in (("crop", 2), ("flip", True), ("vertical_flip", True))
    )
    expected = crop.clone()
    for where, flipped, dim in ((flip, x.flip(-1), -1), (vertical, x.flip(-2), -2)):
        is_flipped = (where == flipped).flatten(2).all(-1)
        assert 0 < is_flipped.sum() < is_flipped.numel()
        expected[is_flipped] = expected[is_flipped].flip(dim)
    assert torch.equal(Augment(crop=2, flip=True, vertical_flip=True)(x, KEYS), expected)


def by_degrees(x: torch.Tensor, degrees: float) -> torch.Tensor:
    angles = torch.full((len(x),), math.radians(degrees), dtype=torch.float64)
    return rotated(x, angles.cos().float(), angles.sin().float())


def test_a_rotation_by_nothing_is_exact_and_by_a_right_angle_is_rot90():
    for size in (7, 8):
        x = images(1, 4, height=size, width=size)[0]
        assert torch.equal(by_degrees(x, 0.0), x)
        for quarter in (-1, 1, 2):
            turned = by_degrees(x, 90.0 * quarter)
            assert (turned - torch.rot90(x, quarter, (2, 3))).abs().max() < 1e-5


def test_a_rotation_is_bilinear_and_0_outside():
    """By 45 degrees, the top edge's middle comes from near the top right corner, and a corner from over an edge."""
    x = torch.arange(9.0).reshape(1, 1, 3, 3) + 1
    turned = by_degrees(x, 45.0)[0, 0]
    far = 1 - math.sqrt(0.5)
    assert turned[1, 1] == pytest.approx(5, abs=1e-6)
    assert turned[0, 1] == pytest.approx(3 - far + 3 * far, abs=1e-5)  # the values fall by 1 a column, rise by 3 a row
    beyond = math.sqrt(2) - 1  # the corner comes from so far over the edge's middle
    assert turned[0, 0] == pytest.approx(2 * (1 - beyond), abs=1e-5)


def test_angles_are_even_up_to_the_limit_either_way():
    """One bright pixel at (0, 3) from the centre; where it goes tells the angle."""
    num = 1500
    x = torch.zeros(1, num, 1, 9, 9)
    x[..., 4, 7] = 1
    out = Augment(rotate=40.0)(x, [3])[0, :, 0]
    rows, columns = (torch.arange(9.0)[:, None] - 4, torch.arange(9.0) - 4)
    mass = out.sum((1, 2))
    angles = torch.atan2(-(out * rows).sum((1, 2)) / mass, (out * columns).sum((1, 2)) / mass).rad2deg()
    assert 38 < angles.max() < 42
    assert -42 < angles.min() < -38
    assert abs(angles.mean()) < 4 * 40 / math.sqrt(3 * num)
    assert angles.std().item() == pytest.approx(40 / math.sqrt(3), rel=0.06)


@pytest.mark.parametrize("options", [ALL, Augment(rotate=10), Augment(crop=4, flip=True)])
def test_a_client_gets_the_same_images_in_any_company(options):
    x = images()
    together = options(x, KEYS)
    for j, key in enumerate(KEYS):
        assert torch.equal(together[j : j + 1], options(x[j : j + 1], [key]))
    assert torch.equal(together[[2, 0]], options(x[[2, 0]], [13, 11]))
    assert torch.equal(together, options(x, KEYS))
    assert not torch.equal(together[:1], options(x[:1], [14]))


def test_type_layout_and_input_are_kept():
    x = images()
    before = x.clone()
    assert ALL(x.half(), KEYS).dtype == torch.float16
    assert torch.equal(ALL(x.transpose(3, 4).contiguous().transpose(3, 4), KEYS), ALL(x, KEYS))
    assert torch.equal(x, before)
    assert ALL(x[:, :0], KEYS).shape == (3, 0, 3, 6, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": -1}, "crop is -1, but it must be a whole number from 0 up."),
        ({"crop": 1.5}, "crop is 1.5, but it must be a whole number from 0 up."),
        ({"crop": True}, "crop is True, but it must be a whole number from 0 up."),
        ({"flip": 1}, "flip is 1, but it must be true or false."),
        ({"vertical_flip": "yes"}, "vertical_flip is 'yes', but it must be true or false."),
        ({"rotate": -10}, "rotate is -10, but it must be a number of degrees from 0 to 180."),
        ({"rotate": math.nan}, "rotate is nan, but it must be a number of degrees from 0 to 180."),
        ({"rotate": 181.0}, "rotate is 181.0, but it must be a number of degrees from 0 to 180."),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ConfigError) as caught:
        Augment(**options)
    assert str(caught.value) == message


def test_inputs_that_are_no_images():
    with pytest.raises(DataError) as caught:
        ALL(torch.zeros(3, 8, 80), KEYS)
    assert str(caught.value) == (
        "cannot augment inputs of shape (3, 8, 80) with 3 keys; "
        "give images (clients, samples, channels, height, width) and one key a client"
    )
    with pytest.raises(DataError, match=r"^cannot augment inputs of shape \(3, 8, 3, 6, 5\) with 2 keys; "):
        ALL(images(), [1, 2])
