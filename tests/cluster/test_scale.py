"""How many replicas, and what of a machine each takes."""

import pytest

from draftree.cluster.scale import Scale, choose_scale
from draftree.errors import CapacityError

LAPTOP, RACK = {"CPU": 8.0}, {"CPU": 64.0, "GPU": 8.0}


@pytest.mark.parametrize(
    ("asked", "has", "scale"),
    [
        (("2", None, None), LAPTOP, Scale(2, 2, 4)),
        (("3", 1, None), LAPTOP, Scale(3, 3, 1)),
        (("99", None, None), LAPTOP, Scale(99, 99, 1)),
        (("auto", None, None), LAPTOP, Scale(1, 2, 4)),
        (("auto", 2, None), LAPTOP, Scale(1, 4, 2)),
        (("auto", None, None), {"CPU": 2.0}, Scale(1, 1, 2)),
        (("auto", None, None), RACK, Scale(1, 8, 4, 1.0)),
        (("4", None, None), RACK, Scale(4, 4, 16, 1.0)),
        (("auto", None, 0.5), RACK, Scale(1, 16, 4, 0.5)),
        (("auto", 8, 0), RACK, Scale(1, 8, 8, 0)),
        (("1", None, None), {}, Scale(1, 1, 1)),
    ],
)
def test_choice(asked, has, scale):
    assert choose_scale(*asked, has) == scale


def test_words_for_ray():
    assert Scale(1, 1, 4).resources == {"num_cpus": 4}
    assert Scale(1, 1, 4, 1.0).resources == {"num_cpus": 1, "num_gpus": 1.0}


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", ""])
def test_other_numbers_are_refused(text):
    with pytest.raises(CapacityError, match="--replicas"):
        choose_scale(text, None, None, LAPTOP)
