"""What plans are built of: axes of sizes cut into cells, and the cheapest cut of a grid into boxes."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
from cases import for_each
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.datasets.rounds import Disturbance
from kernelcast.errors import InvalidProblemError
from kernelcast.kernels import Candidate, CandidateTable
from kernelcast.runtime.plan_axes import MODULI, Axis, Grid, sizes_of, split_values
from kernelcast.runtime.plan_partition import Box, partition
from kernelcast.runtime.plan_scores import costs, rows_of
from kernelcast.runtime.plan_verify import corrected, founded, point_of, to_measure, touching

# --- cutting ---


def total(cost, boxes, penalty):
    return sum(
        cost[tuple(slice(*span) for span in box.cells)][..., box.choice].sum() + penalty for box in boxes
    )


def cheapest(cost, penalty):
    """By trying every cut of one axis."""
    count = len(cost)
    best = np.inf
    for number in range(count):
        for cuts in combinations(range(1, count), number):
            runs = pairwise((0, *cuts, count))
            best = min(best, sum(cost[first:end].sum(axis=0).min() + penalty for first, end in runs))
    return best


costs_of = st.integers(0, 20).map(lambda value: np.inf if value == 20 else value / 10)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_cut_of_one_axis_is_the_cheapest(data):
    count, kinds = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    cost = np.array([[data.draw(costs_of) for _ in range(kinds)] for _ in range(count)])
    cost[:, 0] = np.where(np.isfinite(cost[:, 0]), cost[:, 0], 3.0)
    penalty = data.draw(st.sampled_from([0.01, 0.3, 2.0]))
    boxes = partition(cost, penalty)
    assert total(cost, boxes, penalty) == pytest.approx(cheapest(cost, penalty))
    for one, other in pairwise(boxes):
        assert one.cells[0][1] == other.cells[0][0]
        assert one.choice != other.choice


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(3, 4), (2, 3, 3), (1, 5), (2, 1, 2, 3)]))
def test_every_cell_is_in_one_box_and_no_infinite_one_is_chosen(seed, shape):
    random = np.random.default_rng(seed)
    cost = random.random((*shape, 3))
    cost[random.random(cost.shape) < 0.3] = np.inf
    cost[..., 0] = np.where(np.isfinite(cost[..., 0]), cost[..., 0], 1.0)
    boxes = partition(cost, 0.05)
    seen = np.zeros(shape, int)
    for box in boxes:
        seen[tuple(slice(*span) for span in box.cells)] += 1
    assert (seen == 1).all()
    found = total(cost, boxes, 0.05)
    assert np.isfinite(found)
    # Never dearer than one box for all, or a box a cell.
    whole = cost.reshape(-1, 3).sum(axis=0).min() + 0.05
    each = cost.min(axis=-1).sum() + 0.05 * np.prod(shape)
    assert found <= min(whole, each) + 1e-9


def test_the_first_of_equals_is_chosen_whatever_the_rounding():
    cost = np.array([[0.1, 0.3], [0.2, 0.0], [0.3, 0.3]])
    cost[:, 1] = [0.3, 0.2, 0.1]  # the same sum in another order
    assert partition(cost, 1.0) == [Box(((0, 3),), 0)]


# --- sizes ---


@for_each(
    ("value", "sizes"),
    [
        ("1..4096", range(1, 4097)),
        (" 64..256..64 ", range(64, 257, 64)),
        ((2, 5), range(2, 6)),
        ([np.int64(2), 5], range(2, 6)),
        (range(3, 9, 2), range(3, 9, 2)),
        (64, None),
        ("nn", None),
        ("4096", None),
        (True, None),
        (3.5, None),
        ("7..7", range(7, 8)),
        (range(1, 4097, 1000), range(1, 4002, 1000)),
    ],
)
def test_what_names_sizes(value, sizes):
    assert sizes_of(value) == sizes


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (range(0), "it is empty, as it ends before 0 and begins at 0"),
        (range(5, 1), "it is empty, as it ends before 1 and begins at 5"),
        (range(5, 1, -1), "its sizes descend"),
        (range(0, 5), "it begins at 0"),
        (range(-3, 5), "it begins at -3"),
        ("8..4", "its first size, 8, is above its last, 4"),
        ("0..4", "it begins at 0"),
        ("-2..4", "it begins at -2"),
        ("1..8..0", "its step is 0"),
        ("8..1..-1", "its step is -1"),
        ("1..4.5", "must be FIRST..LAST or FIRST..LAST..STEP in whole numbers"),
        ("a..b", "must be FIRST..LAST or FIRST..LAST..STEP in whole numbers"),
        ("1..", "must be FIRST..LAST or FIRST..LAST..STEP in whole numbers"),
        ("1:64", "must be FIRST..LAST or FIRST..LAST..STEP in whole numbers"),
        ("1.." + "9" * 5000, "must be FIRST..LAST or FIRST..LAST..STEP in whole numbers"),
        ((4, 1), "its first size, 4, is above its last, 1"),
        ((1, 2, 3), "a pair of whole numbers"),
        ((1.5, 2), "a pair of whole numbers"),
        ((True, 2), "a pair of whole numbers"),
        (["1", "4"], "a pair of whole numbers"),
        (slice(1, 4), "it is no range, text or pair"),
        ({1, 2}, "it is no range, text or pair"),
    ],
)
def test_what_is_meant_as_sizes_and_cannot_be_says_why(value, why):
    with pytest.raises(InvalidProblemError) as seen:
        sizes_of(value, "m")
    text = str(seen.value)
    assert text.startswith(f"The sizes of m are {repr(value)[:40]}")
    assert why in text
    assert text.endswith("such as '1..4096' (both ends included) or range(1, 4097).")
    assert len(text) < 400


@pytest.mark.parametrize("sizes", [range(0, 5), range(5, 1), range(5, 1, -1), range(-3, 5)])
def test_sizes_that_no_plan_can_have_are_refused(sizes):
    with pytest.raises(InvalidProblemError, match="ascending range"):
        Axis("n", sizes)


def test_values_are_split_into_dynamic_tied_and_fixed():
    values = {"q_len": "1..8", "kv_len": "q_len", "layout": "nn", "heads": 4}
    assert split_values(values) == (
        {"q_len": range(1, 9)}, {"kv_len": "q_len"}, {"layout": "nn", "heads": 4},
    )  # fmt: skip
    with pytest.raises(InvalidProblemError, match=r"0 dimensions are dynamic \(m=4, n=3\.5\)"):
        split_values({"m": 4, "n": 3.5})
    with pytest.raises(InvalidProblemError, match="5 dimensions are dynamic"):
        split_values(dict.fromkeys("abcde", "1..2"))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 200), st.sampled_from([1, 2, 3, 16, 24]),
    st.lists(st.integers(1, 4000), max_size=8), st.sampled_from([1, 2, 3]),
)  # fmt: skip
def test_every_size_is_in_one_cell_of_one_class(first, count, step, cuts, dimensions):
    sizes = range(first, first + count * step, step)
    axis = Axis("n", sizes)
    axis.spread(dimensions)
    for cut in cuts:
        axis.cut(cut)
    assert axis.edges == sorted(set(axis.edges))
    assert set(axis.edges) <= set(sizes)
    found = []
    for cell, of_class in product(range(axis.cells), range(axis.classes)):
        members = axis.members(cell, of_class)
        assert axis.least(cell, of_class) == (members[0] if members else None)
        assert all(axis.cell_of(size) == cell and axis.class_of(size) == of_class for size in members)
        few = axis.samples(cell, of_class)
        assert len(few) == min(len(members), len(few)) <= 3
        assert set(few) <= set(members)
        assert members[:1] == few[:1]
        assert members[-1:] == few[-1:]
        found += members
    assert sorted(found) == list(sizes)
    for cell in range(axis.cells):
        assert axis.last(cell + 1) == max(s for c in range(axis.classes) for s in axis.members(cell, c))
    weights = axis.weights()
    assert weights.sum() == pytest.approx(1.0)
    assert (
        (weights > 0) == [[bool(axis.members(n, c)) for n in range(axis.cells)] for c in range(axis.classes)]
    ).all()


def test_classes_without_sizes_are_not_there():
    assert Axis("n", range(1, 100)).moduli == MODULI
    assert Axis("n", range(8, 100, 8)).moduli == (8, 16)
    assert Axis("n", range(64, 640, 64)).moduli == (16,)
    assert Axis("n", range(1, 100), (1,)).classes == 1


def test_a_cell_is_halved_until_it_is_short():
    axis = Axis("n", range(1, 4097))
    axis.cut(4000)
    while axis.gap_cut(axis.cell_of(4000), 1 / 64):
        pass
    low, high = axis.edges[axis.cell_of(4000) - 1], 4000
    assert 0 < high - low <= 4000 / 64
    assert len(axis.edges) < 16


def test_weights_of_a_grid_are_products():
    axes = [Axis("n", range(1, 65)), Axis("m", range(4, 9))]
    for axis in axes:
        axis.spread(2)
    grid = Grid(axes)
    weights = grid.weights()
    assert weights.shape == grid.shape
    assert weights.sum() == pytest.approx(1.0)
    one, other = axes[0].weights(), axes[1].weights()
    assert weights[2, 1, 3, 0] == pytest.approx(one[2, 3] * other[1, 0])
    assert grid.least(grid.cell_of((48, 6))) <= (48, 6)


# --- scores ---


def test_candidates_are_found_in_a_table():
    table = CandidateTable.of(
        [
            Candidate.of("vendor"),
            *(Candidate.of("tiled", {"block": b, "flat": f}) for b in (16, 32) for f in (False, True)),
        ]
    )
    wanted = [
        table[3],
        Candidate.of("tiled", {"block": 64, "flat": True}),
        table[0],
        Candidate.of("tiled"),
        table[4],
    ]
    assert rows_of(table, wanted).tolist() == [3, -1, 0, -1, 4]


def test_a_regret_within_the_threshold_costs_next_to_nothing_and_the_default_nothing():
    logs = np.log([[101.0, 101.0, 100.0], [110.0, np.nan, 100.0]])
    cost = costs(logs, np.full((2, 3), 0.01), np.array([0.5, 0.5]), 0.02)
    assert cost[0, 0] == 0.0
    assert 0 < cost[0, 1] < 1e-4
    assert cost[1, 0] == pytest.approx(0.5 * np.log(1.1))
    assert np.isinf(cost[1, 1])
    # What is in doubt is no reason either.
    assert costs(logs, np.full((2, 3), 0.1), np.array([0.5, 0.5]), 0.02)[1, 0] == 0.0


def test_boxes_that_share_a_side_touch():
    boxes = [
        Box(((0, 2), (0, 2)), 0),
        Box(((0, 2), (2, 3)), 1),
        Box(((2, 4), (0, 3)), 0),
        Box(((4, 5), (2, 3)), 2),
    ]
    assert touching(boxes) == [[1, 2], [0, 2], [0, 1, 3], [2]]


# --- measurements ---


def measured(gain_log, error_log, samples=None, *, sizes=(8,), disturbances=()):
    """The point of a verification of the default and others, by their gains."""
    levels = [100.0 * np.exp(each) for each in gain_log]
    samples = samples or [[level] * 10 for level in levels]
    trial = SimpleNamespace(
        paired_log=np.array(gain_log),
        error_log=np.array(error_log),
        disturbances=disturbances,
        measurements=[
            SimpleNamespace(latency_us=level, samples_us=tuple(own))
            for level, own in zip(levels, samples, strict=True)
        ],
    )
    return point_of(
        sizes,
        ((0, 1),),
        list(range(len(gain_log))),
        len(gain_log),
        SimpleNamespace(trial=trial, confidence=0.9),
    )


def test_only_what_is_beyond_three_errors_is_faster_or_slower():
    point = measured([0.0, -0.04, -0.04, 0.04, 0.04, np.nan], [0.0, 0.01, 0.02, 0.01, 0.02, np.nan])
    assert point.faster.tolist() == [False, True, False, False, False, False]
    assert point.worked.tolist() == [True, True, True, False, True, False]
    assert point.failed.tolist() == [False] * 5 + [True]
    assert point.sure_log[:5] == pytest.approx([0.0, -0.04, 0.0, 0.04, 0.04])
    assert point.winner == 1
    # A single round has no error of its own, and decides little.
    assert not measured([0.0, -0.1], [0.0, np.nan]).faster[1]
    assert measured([np.nan, -0.1], [np.nan, 0.01]) is None


def test_interruptions_of_most_samples_of_one_candidate_make_no_gain():
    quiet, busy = [100.0] * 10, [100.0] * 3 + [900.0] * 7
    assert measured([0.0, -2.2], [0.0, 0.01], [busy, quiet]).sure_log[1] == 0.0
    assert measured([0.0, 2.2], [0.0, 0.01], [quiet, busy]).worked[1]
    assert measured([0.0, -2.2], [0.0, 0.01], [[900.0] * 10, quiet]).sure_log[1] == pytest.approx(
        -2.2, abs=0.01
    )


def test_a_default_that_waited_or_slept_makes_no_gain():
    waited = [Disturbance(starved=True)] * 10
    point = measured([0.0, -6.0, 0.7], [0.0, 0.01, 0.01], disturbances=waited)
    assert (point.sure_log[1], point.winner) == (0.0, 0)
    # What is slower than a default that waited is slower than one that does not.
    assert point.gain_log[2] == 0.7
    # Of 100 us two sleeps may have taken all, half a sleep a quarter: 60 us are less than 75.
    for sleeps, sure in ((2.0, 0.0), (0.5, np.log(60.0 / 75.0))):
        slept = [Disturbance(sleeps=sleeps)] * 10
        point = measured([0.0, np.log(0.6)], [0.0, 0.01], disturbances=slept)
        assert point.sure_log[1] == pytest.approx(sure)


def test_what_is_measured_is_the_default_its_own_the_neighbours_and_the_next():
    logs = np.array([5.0, 3.0, 1.0, np.nan, 2.0, 4.0])
    assert to_measure(1, [5, 4], logs, 6) == [0, 1, 4, 5, 2]
    assert to_measure(1, [5, 4], logs, 3) == [0, 1, 4]
    assert to_measure(0, [], logs, 3) == [0, 2, 4]
    assert to_measure(1, [3], logs, 2) == [0, 1]
    kinds = ["vendor", "a", "b", "b", "b", "c"]
    assert to_measure(0, [], logs, 6, kinds) == [0, 2, 1, 5, 4]


def test_measurements_correct_the_forecast_nearby_and_leave_it_far_away():
    axis = Axis("n", range(1, 2**20), (1,))
    axis.spread(1)
    grid = Grid([axis])
    logs = np.log(np.broadcast_to([100.0, 90.0, 80.0, 70.0], (*grid.shape, 4)))
    # The second is 20% slower than forecast, the third fails, the fourth is not measured.
    point = measured([0.0, np.log(1.08), np.nan, 0.0], [0.0, 0.001, np.nan, 0.001], sizes=(64,))
    point.gain_log[3] = np.nan
    found, _ = corrected(logs, grid, [point], lambda sizes: logs[0, 0])
    at = grid.cell_of((64,))
    assert np.isnan(found[at][1])  # slower than the default, where it was measured
    beside = (0, at[1] + 2)
    assert found[beside][1] - found[beside][0] == pytest.approx(np.log(1.08), abs=0.01)
    far = (0, grid.shape[1] - 1)
    assert found[far][1] - found[far][0] == pytest.approx(np.log(0.9), abs=0.02)
    assert np.isnan(found[..., 2:]).all()
    assert not np.isnan(found[..., 0]).any()


def test_a_box_is_founded_by_a_point_in_it_where_its_candidate_was_faster():
    axis = Axis("n", range(1, 65), (1,))
    axis.cut(16)
    grid = Grid([axis])
    low, high = ((0, 1), (0, 1)), ((0, 1), (1, 2))
    won, tied = measured([0.0, -0.3], [0.0, 0.01]), measured([0.0, -0.01], [0.0, 0.01])
    assert founded(Box(low, 1), grid, [won])
    assert not founded(Box(high, 1), grid, [won])
    assert not founded(Box(low, 1), grid, [tied])
    assert founded(Box(high, 0), grid, [])
