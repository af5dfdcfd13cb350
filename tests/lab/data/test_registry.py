"""Names and listings of the data sets."""

from __future__ import annotations

import pytest

from gossamer.lab import data, models


def test_all_sets_are_registered() -> None:
    assert set(data.names()) == {
        "digits",
        "mnist",
        "fashion_mnist",
        "cifar10",
        "cifar100",
        "imagefolder",
        "wikitext2",
        "ptb",
        "sst2",
    }
    assert [row[0] for row in data.table()] == list(data.names())


def test_every_network_names_its_data() -> None:
    assert {model.data for model in models.MODELS} <= {*data.names(), "random"}


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"got 'cifar': did you mean 'cifar10'"):
        data.load("cifar")
    with pytest.raises(ValueError, match="the data sets are digits, mnist"):
        data.load("zzzz")
