"""Partitions: every sample once, sizes, minimum size, determinism, the Dirichlet law, and divergence from balance."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlayer.data import Arrays, from_arrays
from cutlayer.data.partition import PARTITIONS, Dirichlet, Natural, Partition, Shards, dirichlet, iid, natural, shards
from cutlayer.errors import PartitionError

repeatable = settings(derandomize=True, deadline=None, max_examples=60)
seeds = st.integers(0, 2**31)


def assert_every_index_once(partition, num_samples):
    assert sorted(np.concatenate(partition.clients).tolist()) == list(range(num_samples))
    for indices in partition.clients:
        assert indices.dtype == np.int64
        assert (np.diff(indices) > 0).all()


def samples(labels, groups=None):
    return from_arrays(np.zeros((len(labels), 1)), labels, groups=groups)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a.clients, b.clients, strict=True))


@st.composite
def samples_and_clients(draw, max_samples=200):
    num_samples = draw(st.integers(1, max_samples))
    return num_samples, draw(st.integers(1, num_samples))


@repeatable
@given(samples_and_clients(), seeds)
def test_iid_deals_every_sample_once_and_evenly(counts, key):
    num_samples, num_clients = counts
    partition = iid(num_samples, num_clients, key=key)
    assert_every_index_once(partition, num_samples)
    assert len(partition) == num_clients
    assert partition.sizes.max() - partition.sizes.min() <= 1


@repeatable
@given(st.lists(st.integers(0, 9), min_size=1, max_size=150), st.data(), seeds)
def test_shards_deal_every_sample_once_and_nearly_evenly(labels, data, key):
    num_clients = data.draw(st.integers(1, len(labels)))
    per_client = data.draw(st.integers(1, len(labels) // num_clients))
    partition = shards(np.array(labels), num_clients, shards_per_client=per_client, key=key)
    assert_every_index_once(partition, len(labels))
    assert partition.sizes.max() - partition.sizes.min() <= per_client


@repeatable
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=150),
    st.floats(0.01, 100),
    st.integers(0, 3),
    st.booleans(),
    st.data(),
    seeds,
)
def test_dirichlet_is_a_partition_or_a_reasoned_refusal(labels, alpha, min_size, cap, data, key):
    num_clients = data.draw(st.integers(1, len(labels)))
    try:
        partition = dirichlet(
            np.array(labels), num_clients, alpha=alpha, key=key, min_size=min_size, balance_cap=cap, max_tries=20
        )
    except PartitionError as error:
        assert "in 20 draws; at best the smallest client had" in str(error) or "or a smaller min_size" in str(error)
        assert min_size > 0
        return
    assert_every_index_once(partition, len(labels))
    assert len(partition) == num_clients
    assert partition.sizes.min() >= min_size


def test_dirichlet_draws_again_until_no_client_is_too_small():
    labels = np.arange(500) % 5
    first = [dirichlet(labels, 10, alpha=0.3, key=key, min_size=0).sizes.min() for key in range(20)]
    again = [dirichlet(labels, 10, alpha=0.3, key=key, min_size=15).sizes.min() for key in range(20)]
    assert min(first) < 15 <= min(again)


@pytest.mark.parametrize("scheme", PARTITIONS.values(), ids=PARTITIONS.keys())
def test_the_key_alone_decides(scheme):
    data = samples(np.arange(120) % 6, groups=np.arange(120) % 10)
    drawn = scheme().draw(data, 5, 7)
    assert same(drawn, scheme().draw(data, 5, 7))
    assert not same(drawn, scheme().draw(data, 5, 8))
    assert sum(drawn.sizes) == (60 if scheme is Natural else 120)


def test_labels_may_be_a_list_an_array_or_a_tensor():
    labels = np.arange(120) % 6
    for draw in (lambda y: dirichlet(y, 5, alpha=0.5, key=7), lambda y: shards(y, 5, key=7)):
        assert same(draw(labels), draw(labels.tolist()))
        assert same(draw(labels), draw(torch.tensor(labels)))


def test_settings_reach_the_draw():
    labels = np.arange(200) % 4
    direct = dirichlet(labels, 6, alpha=0.7, key=3, min_size=9, balance_cap=True)
    data = samples(labels)
    assert same(Dirichlet(alpha=0.7, min_size=9, balance_cap=True).draw(data, 6, 3), direct)
    assert not same(Dirichlet(alpha=0.7, min_size=9).draw(data, 6, 3), direct)
    assert same(Shards(per_client=4).draw(data, 5, 3), shards(labels, 5, shards_per_client=4, key=3))
    assert (Dirichlet().alpha, Dirichlet().min_size, Dirichlet().balance_cap, Shards().per_client) == (0.3, 2, False, 2)


def test_shards_give_a_client_few_labels():
    labels = np.arange(400) % 10
    partition = shards(labels, 20, shards_per_client=2, key=0)  # 40 shards of 10 samples, 4 for each of 10 labels
    histograms = partition.histograms(labels, 10)
    assert (partition.sizes == 20).all()
    assert ((histograms > 0).sum(axis=1) <= 2).all()
    assert set(histograms.reshape(-1).tolist()) <= {0, 10, 20}


def test_dirichlet_shares_have_the_mean_and_variance_of_the_law_in_each_class():
    """Dir(a, .., a) over J clients: mean 1/J, variance (1/J)(1 - 1/J)/(J a + 1); classes are independent."""
    num_clients, alpha, per_class = 4, 0.5, 2000
    labels = np.repeat([0, 1], per_class)
    draws = [dirichlet(labels, num_clients, alpha=alpha, key=k, min_size=0) for k in range(600)]
    shares = np.array([p.histograms(labels, 2) for p in draws]) / per_class  # draw, client, class
    assert shares.mean(axis=0) == pytest.approx(0.25, abs=0.04)  # standard error 0.25 / sqrt(600) = 0.01
    variance = 0.25 * 0.75 / (num_clients * alpha + 1)  # 0.0625
    assert shares.var(axis=0) == pytest.approx(variance, rel=0.2)
    for client in range(num_clients):
        assert abs(np.corrcoef(shares[:, client].T)[0, 1]) < 0.15


def test_a_large_alpha_is_nearly_even():
    labels = np.arange(10_000) % 10
    histograms = dirichlet(labels, 10, alpha=1e6, key=0).histograms(labels, 10)
    assert np.abs(histograms - 100).max() <= 2


def gained_above_cap(partition, labels, num_classes):
    histograms = partition.histograms(labels, num_classes)
    held_before = np.cumsum(histograms, axis=1) - histograms
    return int(((histograms > 0) & (held_before >= len(labels) / len(partition))).sum())


def test_the_balance_cap_closes_clients_that_hold_their_even_share():
    labels = np.arange(2000) % 10
    assert gained_above_cap(dirichlet(labels, 20, alpha=0.5, key=1, balance_cap=True), labels, 10) == 0
    assert gained_above_cap(dirichlet(labels, 20, alpha=0.5, key=1), labels, 10) > 0


def test_ten_thousand_clients():
    labels = np.arange(50_000) % 10
    partition = dirichlet(labels, 10_000, alpha=0.5, key=0, min_size=0)
    assert partition.sizes.sum() == 50_000
    assert len(partition) == 10_000


def test_natural_clients_are_the_distinct_keys_in_order():
    partition = natural(["mia", "ben", "mia", "zoe", "ben"])
    assert partition.names == ("ben", "mia", "zoe")
    assert [c.tolist() for c in partition.clients] == [[1, 4], [0, 2], [3]]
    assert natural([10, 9, 10]).names == ("9", "10")
    assert iid(4, 2, key=0).names == ("0", "1")


NAMES = ("ben", "mia", "none", "zoe", "al")
GROUPS = Arrays(  # ben has 3 samples, mia 2, zoe 1, al 4
    x=torch.zeros(10, 1), y=torch.zeros(10), groups=torch.tensor([4, 0, 1, 3, 0, 4, 4, 1, 0, 4]), group_names=NAMES
)


def test_each_group_is_a_client_under_its_name():
    everyone = Natural(min_size=1).draw(GROUPS, 4, key=0)
    assert everyone.names == ("ben", "mia", "zoe", "al")
    assert [c.tolist() for c in everyone.clients] == [[1, 4, 8], [2, 7], [3], [0, 5, 6, 9]]
    assert Natural().draw(GROUPS, 3, key=0).names == ("ben", "mia", "al")
    assert Natural(min_size=4).draw(GROUPS, 1, key=0).names == ("al",)


def test_fewer_clients_than_groups_are_a_random_choice():
    drawn = [Natural().draw(GROUPS, 2, key) for key in range(300)]
    chosen = {names: sum(p.names == names for p in drawn) for names in {p.names for p in drawn}}
    assert chosen.keys() == {("ben", "mia"), ("ben", "al"), ("mia", "al")}
    assert min(chosen.values()) > 100 - 4 * math.sqrt(300 * 2 / 9)  # a third each, within four standard deviations
    held = {"ben": [1, 4, 8], "mia": [2, 7], "al": [0, 5, 6, 9]}
    for partition in drawn:
        assert [c.tolist() for c in partition.clients] == [held[name] for name in partition.names]


def test_histograms_count_each_clients_labels():
    partition = Partition((np.array([0, 1, 2]), np.array([3])))
    assert partition.histograms([0, 0, 2, 1], 3).tolist() == [[2, 0, 1], [0, 1, 0]]


def test_js_divergence_from_balance():
    """One of two classes: P = (1, 0), Q = (1/2, 1/2), M = (3/4, 1/4).

    KL(P|M) = log2(4/3) = 0.4150375, KL(Q|M) = (log2(2/3) + log2(2)) / 2 = 0.2075187; half their sum is 0.3112781.
    """
    partition = Partition((np.array([0, 1]), np.array([0, 2]), np.array([], dtype=np.int64)))
    single, balanced, empty = partition.js_divergence([0, 0, 1], 2)
    assert single == pytest.approx((math.log2(4 / 3) + (math.log2(2 / 3) + math.log2(2)) / 2) / 2, abs=1e-15)
    assert single == pytest.approx(0.3112781245, abs=1e-10)
    assert balanced == 0
    assert math.isnan(empty)


@repeatable
@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_js_divergence_equals_its_definition_by_kl(labels):
    def kl(p, q):
        return sum(a * math.log2(a / b) for a, b in zip(p, q, strict=True) if a > 0)

    partition = Partition((np.arange(len(labels)),))
    p, q = [labels.count(k) / len(labels) for k in range(5)], [0.2] * 5
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    assert partition.js_divergence(labels, 5)[0] == pytest.approx((kl(p, m) + kl(q, m)) / 2, abs=1e-12)


LABELS = np.array([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: iid(5, 0, key=0), "cannot deal samples to 0 clients; give at least 1"),
        (lambda: iid(5, 6, key=0), "cannot deal 5 samples to 6 clients; use at most 5 clients"),
        (lambda: shards(LABELS, 5, key=0), "cannot deal 4 samples to 5 clients; use at most 4 clients"),
        (
            lambda: shards(LABELS, 2, shards_per_client=3, key=0),
            "cannot cut 4 samples into 3 shards for each of 2 clients; give 1 to 2 shards per client",
        ),
        (
            lambda: dirichlet(LABELS, 2, alpha=0, key=0),
            "the Dirichlet alpha is 0; give a positive number (small: uneven, large: even)",
        ),
        (
            lambda: dirichlet(LABELS, 2, alpha=math.nan, key=0),
            "the Dirichlet alpha is nan; give a positive number (small: uneven, large: even)",
        ),
        (
            lambda: dirichlet(LABELS, 2, alpha=1, key=0, max_tries=0),
            "cannot draw a partition in 0 tries; give at least 1",
        ),
        (
            lambda: dirichlet(LABELS, 2, alpha=1, key=0, min_size=3),
            "2 clients with at least 3 samples each need 6 samples, there are 4; "
            "use fewer clients or a smaller min_size",
        ),
        (
            lambda: dirichlet(np.zeros(10, int), 5, alpha=0.01, key=0, min_size=2, max_tries=30),
            "no Dirichlet partition (alpha 0.01) of 10 samples gave each of 5 clients at least 2 in 30 draws; "
            "at best the smallest client had 0. Use fewer clients, a larger alpha or a smaller min_size.",
        ),
        (
            lambda: dirichlet(np.array([0.5, 1.5]), 2, alpha=1, key=0),
            "labels of type float64 and shape (2,) are no classes; "
            "give one integer a sample, or use the iid or a natural partition",
        ),
        (
            lambda: Natural().draw(GROUPS, 4, key=0),
            "cannot make 4 clients of 4 groups, 3 of them with at least 2 samples; "
            "use at most 3 clients, or a smaller min_size",
        ),
        (lambda: Natural().draw(GROUPS, 0, key=0), "cannot deal samples to 0 clients; give at least 1"),
        (
            lambda: Natural().draw(samples(LABELS), 2, key=0),
            "the data have no groups (speakers, writers, roles) to make clients of; "
            "use another partition, or data that have groups",
        ),
        (lambda: natural([]), "a natural partition needs samples; got none"),
        (
            lambda: Partition((np.array([0]),), ("a", "b")),
            "1 clients have 2 names; give one each, or none",
        ),
        (
            lambda: iid(4, 2, key=0).histograms(LABELS, 2),
            "labels go from 0 to 2, but 2 classes have the labels 0 to 1; "
            "give the number of classes of the whole data set",
        ),
    ],
)
def test_refusals_say_what_and_what_to_do(draw, message):
    with pytest.raises(PartitionError) as caught:
        draw()
    assert str(caught.value) == message
