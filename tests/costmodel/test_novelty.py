"""Which problems lie beyond training."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.costmodel.novelty import MOST_POINTS, Reach
from kernelcast.errors import ArtifactError, ModelError
from kernelcast.kernels import Problem


def toy(m, n=64, dtype="float32", layout="nn", lead=0, **more):
    return Problem("toy", (("m", m), ("n", n)), dtype, (("layout", layout), ("lead", lead)), **more)


GRID = [toy(2**a, 2**b, lead=lead) for a in range(4, 11) for b in range(4, 9) for lead in (0, 2**a + 1)]


@pytest.fixture(scope="module")
def reach():
    return Reach.of([*GRID, toy(64, dtype="float16")])


def test_what_was_in_training_is_not_novel(reach):
    assert not any(reach.novelty(problem) for problem in GRID)
    assert reach.novelty(toy(100, 100)) == ""
    assert reach.novelty(toy(2048)) == ""


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (toy(2049), "m = 2049 is more than twice the largest in training, 1024"),
        (toy(64, 7), "n = 7 is less than half the smallest in training, 16"),
        (toy(64, dtype="bfloat16"), "dtype bfloat16 was not in training"),
        (toy(64, layout="nt"), "layout nt was not in training"),
        (toy(64, allow_tf32=True), "allow_tf32 True was not in training"),
        (toy(64, threads=4), "threads 4 was not in training"),
        (Problem("toy", (("m", 64),), "float32"), "dimensions m were not in training"),
    ],
)
def test_what_is_beyond_is_named(reach, problem, sentence):
    assert reach.novelty(problem) == sentence


def test_few_values_of_an_option_are_a_choice_and_many_a_quantity():
    leads = [toy(64, lead=8 * step) for step in range(30)]
    assert Reach.of(leads).novelty(toy(64, lead=3)) == ""
    assert Reach.of(leads[:5]).novelty(toy(64, lead=3)) == "lead 3 was not in training"


def test_a_hole_within_the_ranges_is_far_from_everything():
    # A ridge: m and n grow together, so a large m with a small n is within both ranges and like nothing.
    ridge = [toy(2**a + shift, 2**a) for a in range(2, 14) for shift in (0, 1, 2)]
    known = Reach.of(ridge)
    assert known.novelty(toy(300, 300)) == ""
    assert known.novelty(toy(8192, 4)).startswith(
        "m = 8192, n = 4 is 7.6 doublings from the nearest shape in training, where 99% are within"
    )
    assert known.distance(toy(64, 64)) < 0.01


def test_too_few_shapes_tell_nothing_of_distances():
    assert Reach.of([toy(4), toy(4096)]).novelty(toy(128)) == ""


def test_many_shapes_are_represented_by_some_that_leave_none_far():
    rng = np.random.default_rng(0)
    problems = [toy(int(m), int(n)) for m, n in np.exp(rng.uniform(0, 9, (1500, 2)))]
    known = Reach.of(problems)
    assert len(known.points) == MOST_POINTS
    assert sum(bool(known.novelty(problem)) for problem in problems) <= 0.01 * len(problems)
    assert max(known.distance(problem) for problem in problems) < 1.5
    assert len(json.dumps(known.to_dict())) < 8000


@given(st.lists(st.tuples(st.integers(0, 2**39), st.integers(0, 2**39)), min_size=1, max_size=40))
def test_it_comes_back_as_it_was(sizes):
    known = Reach.of([toy(m, n) for m, n in sizes])
    back = Reach.from_dict(json.loads(json.dumps(known.to_dict(), allow_nan=False)))
    assert back.to_dict() == known.to_dict()
    np.testing.assert_array_equal(back.points, known.points)
    assert [back.novelty(toy(m, n)) for m, n in sizes] == [""] * len(sizes)


def test_what_is_broken_is_refused(reach):
    data = reach.to_dict()
    for change in (
        {"dims": ["m"]}, {"least": [1]}, {"points": ""}, {"points": "####"}, {"points": 3}, {"limit": -1.0},
        {"limit": "far"}, {"facts": [["a"]]}, {"largest": ["x", "y"]},
    ):  # fmt: skip
        with pytest.raises(ArtifactError):
            Reach.from_dict({**data, **change})
    with pytest.raises(ArtifactError):
        Reach.from_dict({})
    with pytest.raises(ModelError, match="no problem"):
        Reach.of([])
    with pytest.raises(ModelError, match="different dimensions"):
        Reach.of([toy(1), Problem("toy", (("k", 1),), "float32")])
