"""Networks at rest: which move, and when."""

from types import SimpleNamespace

import pytest
import torch

from mlrl.models.parking import Parking


class Network:
    """Says where it was moved to."""

    def __init__(self):
        self.places = []

    def to(self, device):
        self.places.append(str(device))


def base(shard=None):
    return SimpleNamespace(model=Network(), shard=shard)


def test_they_are_on_their_device_inside_only():
    network = base()
    parking = Parking([network, None, network], [], torch.device("cuda"))  # two agents may share one
    assert network.model.places == ["cpu"]
    with parking.use():
        assert network.model.places == ["cpu", "cuda"]
    assert network.model.places == ["cpu", "cuda", "cpu"]
    with pytest.raises(KeyError), parking.use():
        raise KeyError
    assert network.model.places[3:] == ["cuda", "cpu"]


def test_what_others_use_and_what_is_sharded_stays():
    used, sharded, other = base(), base(shard=object()), base()
    parking = Parking([used, sharded, other], [used], torch.device("cuda"))
    with parking.use():
        pass
    assert (used.model.places, sharded.model.places) == ([], [])
    assert other.model.places == ["cpu", "cuda", "cpu"]
