"""Plans on an operation whose latencies and forecasts the tests set."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest

from kernelcast.datasets.store import Store
from kernelcast.errors import InvalidProblemError, SettingsError, UnknownNameError
from kernelcast.kernels import Candidate, problem, require_legal
from kernelcast.kernels.devices import device as known_device
from kernelcast.runtime.plan import plan


def load_lab():
    name = "kernelcast_plan_lab"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("plan_lab.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


lab = load_lab()
STATE = lab.STATE
VENDOR = Candidate.of("vendor")


@pytest.fixture(autouse=True)
def _installed():
    with lab.installed():
        yield


@pytest.fixture
def make(tmp_path):
    """Makes plans with a selector of the lab."""

    def build(mode="predict", selector=None, **values):
        chosen = selector or lab.oracle(tmp_path)
        return plan(lab.NAME, mode=mode, selector=chosen, **{"threads": 1, **values})

    return build


def chosen(found, **sizes):
    return found.candidate(**sizes).variant


def spans(found):
    return [(each.first[0], each.last[0], each.candidate.variant) for each in found.intervals]


def crossing(at=300):
    """Below ``at`` low is the fastest, from there on high."""
    STATE.takes_us["low"] = lambda n, m: 50.0 if n < at else 90.0
    STATE.takes_us["high"] = lambda n, m: 90.0 if n < at else 50.0


# --- intervals ---


def test_the_border_is_where_the_forecast_changes(make):
    crossing(300)
    found = make(n=range(1, 4097))
    assert [variant for _, _, variant in spans(found)] == ["low", "high"]
    (first, border, _), (after, last, _) = spans(found)
    assert (first, last, after) == (1, 4096, border + 1)
    assert 300 <= after <= 300 * (1 + 1 / 32)
    assert STATE.measured == []


def test_small_sizes_have_exact_borders(make):
    crossing(7)
    assert spans(make(n="1..64")) == [(1, 6, "low"), (7, 64, "high")]


def test_a_single_size_may_be_an_interval(make):
    STATE.takes_us["low"] = lambda n, m: 50.0 if n == 1 else 200.0
    assert spans(make(n="1..1024")) == [(1, 1, "low"), (2, 1024, "vendor")]


def test_near_ties_do_not_split(make):
    # Each octave another of the two leads by 1.5%.
    STATE.takes_us["low"] = lambda n, m: 50.0 if n.bit_length() % 2 else 50.7
    STATE.takes_us["high"] = lambda n, m: 50.7 if n.bit_length() % 2 else 50.0
    assert len(make(n="1..511").intervals) == 1
    assert len(make(n="1..511", least_gain=0.01).intervals) == 9


def test_a_gain_below_what_the_ranker_is_unsure_of_does_not_split(make):
    STATE.takes_us["low"] = lambda n, m: 50.0 if n < 100 else 54.0
    STATE.takes_us["high"] = lambda n, m: 54.0 if n < 100 else 50.0
    assert len(make(n="1..512").intervals) == 2
    STATE.error_log = 0.7
    assert len(make(n="1..512").intervals) == 1


def test_the_default_stands_where_nothing_is_clearly_faster(make):
    STATE.takes_us["low"] = lambda n, m: 98.5
    assert spans(make(n="1..512")) == [(1, 512, "vendor")]
    STATE.takes_us["low"] = lambda n, m: 97.0
    assert spans(make(n="1..512")) == [(1, 512, "low")]


def test_a_default_that_the_ranker_does_not_know_loses(make, tmp_path):
    selector = lab.oracle(tmp_path)
    selector.covered = frozenset({"low", "high"})
    STATE.takes_us["low"] = lambda n, m: 150.0
    assert spans(make(selector=selector, n="1..64")) == [(1, 64, "low")]


# --- rules ---


def legal_everywhere(found, selector_device=lab.HERE):
    for n in dict(found.dynamic)["n"]:
        require_legal(found.problem(n=n), selector_device, found.candidate(n=n))


def test_multiples_count_apart_where_a_rule_asks_for_them(make):
    STATE.takes_us["even"] = lambda n, m: 50.0
    STATE.legal["even"] = lambda n, m: n % 16 == 0
    STATE.takes_us["low"] = lambda n, m: 80.0 if n > 200 else 120.0
    found = make(n="1..512")
    legal_everywhere(found)
    assert all(chosen(found, n=n) == "even" for n in range(16, 513, 16))
    assert [chosen(found, n=n) for n in (1, 101, 221, 511)] == ["vendor", "vendor", "low", "low"]
    assert len(found.intervals) == 3
    assert "multiples of 16" in str(found)


def test_multiples_count_apart_where_the_forecast_does(make):
    STATE.takes_us["low"] = lambda n, m: 60.0 if n % 4 else 120.0
    found = make(n="1..512")
    assert all(chosen(found, n=n) == ("low" if n % 4 else "vendor") for n in range(1, 513))
    assert sorted(each.alignment for each in found.intervals) == [((1, 4),), ((4, 0),)]


def test_a_candidate_that_is_illegal_from_some_size_on_ends_there(make):
    STATE.takes_us["low"] = lambda n, m: 50.0
    STATE.legal["low"] = lambda n, m: n <= 277
    found = make(n="1..512")
    legal_everywhere(found)
    assert chosen(found, n=270) == "low"
    assert len(found.intervals) == 2


def test_a_rule_that_no_interval_can_tell_bars_the_candidate(make):
    STATE.takes_us["low"] = lambda n, m: 50.0
    STATE.legal["low"] = lambda n, m: n % 3 != 2
    found = make(n="1..400")
    legal_everywhere(found)
    assert found.proven


def test_beyond_what_can_be_proven_the_rules_are_asked_again(make):
    STATE.takes_us["low"] = lambda n, m: 50.0
    STATE.legal["low"] = lambda n, m: n != 54_321
    found = make(n="1..100000")
    assert not found.proven
    assert found.select(n=54_320).candidate == Candidate.of("low")
    selection = found.select(n=54_321)
    assert (selection.candidate, selection.source) == (VENDOR, "default")
    assert "forbids" in selection.reason


# --- verification ---


def test_each_proposed_interval_is_measured_once_and_later_calls_measure_nothing(make, tmp_path):
    crossing(60)
    found = make("verify", n="1..512")
    assert found.verifications == len(STATE.measured) <= found.proposed
    assert found.verified == len(found.intervals) == 2
    # Of 9 octaves one of the two intervals has more than 4.
    assert found.verifications == found.verified + found.probes <= 3
    lengths = random.Random(0)
    for _ in range(1000):
        found.select(n=lengths.randint(1, 512))
    assert len(STATE.measured) == found.verifications
    records = list(Store(tmp_path / "store").measurements())
    assert {record.problem for record in records} == set(STATE.measured)
    assert {"vendor", "low", "high"} <= {record.candidate.variant for record in records}


def bands(winners, span=2):
    """The first octaves belong to the first of some variants, and so on: it takes 50 us there and 120 elsewhere."""
    for name in set(winners) - {"vendor"}:
        STATE.takes_us[name] = lambda n, m, name=name: 50.0 if winners[min((n.bit_length() - 1) // span, len(winners) - 1)] == name else 120.0  # fmt: skip


@pytest.mark.parametrize("winners", [("low", "high"), ("low", "vendor", "high", "low"), ("odd", "low", "high", "odd", "low", "vendor")])  # fmt: skip
def test_a_right_forecast_is_measured_once_an_interval(make, winners):
    bands(winners)
    found = make("verify", n=range(1, 4 ** len(winners)))
    assert [each.candidate.variant for each in found.intervals] == list(winners)
    assert found.verifications == found.verified == len(found.intervals)
    assert found.probes == 0


def test_an_interval_that_a_measurement_makes_one_with_its_neighbour_is_not_measured(make):
    # The forecast sees four of them where one is the fastest throughout.
    bands(("low", "high", "odd", "even"))
    STATE.forecast_us = dict(STATE.takes_us)
    assert len(make(n="1..255").intervals) == 4
    STATE.takes_us.update(dict.fromkeys(("low", "odd", "even"), lambda n, m: 120.0), high=lambda n, m: 20.0)
    found = make("verify", n="1..255")
    assert spans(found) == [(1, 255, "high")]
    assert found.verifications == len(STATE.measured) < 4
    assert found.probes == found.verifications - 1


@pytest.mark.parametrize("seed", range(6))
def test_measurements_are_bounded_whatever_the_forecast(make, seed):
    source = random.Random(seed)
    names = [name for name in lab.VARIANTS if name != "vendor"]
    bands([source.choice([*names, "vendor"]) for _ in range(6)])
    STATE.forecast_us = dict(STATE.takes_us)
    for name in names:
        off = source.uniform(0.4, 2.5)
        STATE.forecast_us[name] = lambda n, m, own=STATE.takes_us[name], off=off: own(n, m) * off
    found = make("verify", n="1..4095")
    assert len(STATE.measured) == found.verifications == found.verified + found.probes <= 32
    assert found.verified <= len(found.intervals)
    for each in range(1000):
        found.select(n=1 + each * 4)
    assert len(STATE.measured) == found.verifications
    # None was measured twice, and what is chosen was faster than the default where it was.
    assert len({each["n"] for each in STATE.measured}) == found.verifications
    assert all(each.measured_us < each.default_us or each.candidate == VENDOR for each in found.intervals)


def test_a_plan_that_is_measured_on_a_busy_machine_says_so(make, monkeypatch):
    crossing(60)
    noise = random.Random(0)
    before = lab.Clock.sample_us
    monkeypatch.setattr(lab.Clock, "sample_us", lambda self, call, repeats: before(self, call, repeats) * noise.choice((1.0, 3.0)))  # fmt: skip
    monkeypatch.setattr("kernelcast.runtime.verify._warned", set())
    with pytest.warns(UserWarning, match="busy"):
        found = make("verify", n="1..512")
    assert "the machine was busy while" in found.reason


def test_a_candidate_that_is_slower_than_forecast_is_replaced(make):
    crossing(60)
    STATE.forecast_us = dict(STATE.takes_us)
    STATE.takes_us["high"] = lambda n, m: 130.0
    assert chosen(make(n="1..512"), n=400) == "high"
    found = make("verify", n="1..512")
    assert {variant for _, _, variant in spans(found)} == {"low"}
    assert all(each.measured_us < each.default_us for each in found.intervals)


@pytest.mark.parametrize("fault", ["failing", "illegal there"])
def test_a_candidate_that_fails_is_replaced(make, fault):
    crossing(60)
    if fault == "failing":
        STATE.failing.add("low")
    else:
        STATE.legal["low"] = lambda n, m: n > 60
    found = make("verify", n="1..512")
    assert {variant for _, _, variant in spans(found)} == {"high"}


def test_what_beats_the_default_only_within_noise_is_not_chosen(make):
    STATE.forecast_us = {**STATE.takes_us, "low": lambda n, m: 70.0}
    STATE.takes_us["low"] = lambda n, m: 99.995
    assert spans(make("verify", n="1..512")) == [(1, 512, "vendor")]


def test_what_was_measured_moves_the_border(make):
    # Both are forecast to lead equally often; measured, high is 25% slower, and leads from a larger size on.
    STATE.forecast_us = {
        **STATE.takes_us,
        "low": lambda n, m: 20.0 * n**0.3, "high": lambda n, m: 160.0 * n ** (-0.05), "vendor": lambda n, m: 60.0 * n**0.3,
    }  # fmt: skip
    STATE.takes_us = {**STATE.forecast_us, "high": lambda n, m: 200.0 * n ** (-0.05)}
    forecast = make(n="1..16384").intervals[0].last[0]
    measured = make("verify", n="1..16384").intervals[0].last[0]
    right = (200 / 20) ** (1 / 0.35)
    assert forecast == pytest.approx((160 / 20) ** (1 / 0.35), rel=0.05)
    assert measured == pytest.approx(right, rel=0.2)


def test_the_roofline_is_measured_in_more_places(make, tmp_path):
    selector = lab.oracle(tmp_path)
    STATE.forecast_us = dict.fromkeys(lab.VARIANTS, lambda n, m: 100.0)
    crossing(60)
    selector.source = "analytic"
    found = make("verify", selector=selector, n="1..512")
    assert found.verifications == found.proposed == 5
    assert [variant for _, _, variant in spans(found)] == ["low", "high"]
    assert 30 < spans(found)[1][0] < 120


def test_a_device_that_is_not_here_is_forecast(make, tmp_path):
    selector = lab.Oracle(known_device("a100-sxm4-80gb"), cache=False, store=False, models=tmp_path)
    crossing(60)
    found = plan(lab.NAME, mode="verify", selector=selector, n="1..512")
    assert (found.verifications, found.verified, STATE.measured) == (0, 0, [])
    assert "not here to measure on" in found.reason
    assert found.select(n=3).source == "predicted"


def test_a_problem_that_cannot_be_measured_keeps_its_forecast(make, monkeypatch):
    crossing(60)

    def broken(self, problem, *, seed, device):
        raise RuntimeError("no inputs today")

    monkeypatch.setattr(lab.Doubling, "make_inputs", broken)
    found = make("verify", n="1..512")
    assert spans(found) == spans(make(n="1..512"))
    assert (found.verified, found.verifications) == (0, 0)
    assert found.reason.endswith("0 of 2 proposed intervals verified.")


# --- several dimensions ---


@pytest.mark.slow
def test_two_dimensions_are_cut_into_boxes(make):
    STATE.takes_us["low"] = lambda n, m: 50.0 if n < 64 else 150.0
    STATE.takes_us["high"] = lambda n, m: 50.0 if n >= 64 and m >= 512 else 150.0
    found = make(n="1..1024", m="1..4096")
    assert len(found.intervals) == 3
    for n, m in [(1, 1), (40, 4096), (90, 100), (1024, 470), (100, 600), (1024, 4096)]:
        wanted = "low" if n < 64 else "high" if m >= 512 else "vendor"
        assert chosen(found, n=n, m=m) == wanted
    verified = make("verify", n="1..1024", m="1..4096")
    assert verified.verifications <= verified.proposed <= 32
    assert verified.candidate(n=90, m=4000) == Candidate.of("high")


def test_a_tied_dimension_follows(make):
    STATE.takes_us["low"] = lambda n, m: 50.0 if n * m < 10_000 else 150.0
    found = make(n="1..1024", m="n")
    assert found.problem(n=7) == problem(lab.NAME, n=7, m=7, threads=1)
    assert [chosen(found, n=n) for n in (1, 95, 110)] == ["low", "low", "vendor"]
    assert found.covers(problem(lab.NAME, n=7, m=7, threads=1))
    assert not found.covers(problem(lab.NAME, n=7, m=8, threads=1))
    selection = found.select(problem(lab.NAME, n=7, m=8, threads=1))
    assert selection.source == "default"


@pytest.mark.slow
def test_three_dimensions(make):
    STATE.takes_us["low"] = lambda n, m: 50.0 if n < 64 else 150.0
    found = make(n="1..1024", m="1..64", k="1..64")
    assert [chosen(found, n=n, m=9, k=9) for n in (1, 50, 90)] == ["low", "low", "vendor"]


# --- modes and values ---


def test_off_is_the_default_everywhere(make):
    STATE.takes_us["low"] = lambda n, m: 50.0
    found = make("off", n="1..64", m="1..4")
    assert [each.candidate for each in found.intervals] == [VENDOR]
    assert found.select(n=3, m=3).source == "default"
    assert STATE.measured == []


def test_the_mode_is_the_selectors_where_none_is_named(tmp_path):
    STATE.takes_us["low"] = lambda n, m: 50.0
    for mode, measured in (("predict", False), ("cached", False), ("verify", True), ("tune", True)):
        STATE.measured.clear()
        found = plan(lab.NAME, selector=lab.oracle(tmp_path, mode=mode), n="1..64", threads=1)
        assert bool(found.verifications) == bool(STATE.measured) == measured


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"n": 4}, InvalidProblemError, "0 dimensions are dynamic"),
        ({"n": "0..4"}, InvalidProblemError, "begins at 1 or more"),
        ({"n": "1..4", "colour": 3}, InvalidProblemError, "colour"),
        ({"n": 4, "colour": "1..4"}, InvalidProblemError, "colour"),
        ({"n": "1..4", "layout": "1..4"}, InvalidProblemError, "no dimension 'layout' that could be dynamic"),
        (
            {"n": "1..4", "threads": "1..2"},
            InvalidProblemError,
            "no dimension 'threads' that could be dynamic",
        ),
        ({"n": "1..4", "dtype": "1..2"}, InvalidProblemError, "no dimension 'dtype' that could be dynamic"),
        (
            {"n": "4..1"},
            InvalidProblemError,
            "The sizes of n are '4..1': its first size, 4, is above its last",
        ),
        (
            {"n": "1..4", "m": "k"},
            InvalidProblemError,
            r"m is 'k'; it must be .* name of a dynamic dimension \(n\)",
        ),
        ({"n": "1..4", "selector": 3}, SettingsError, "selector is 3; it must be a Selector"),
        ({"m": "1..4"}, InvalidProblemError, "'n'"),
        ({"n": "1..4", "mode": "guess"}, SettingsError, "one of off"),
        ({"n": "1..4", "least_gain": -1}, SettingsError, "least_gain"),
        ({"n": "1..4", "least_gain": True}, SettingsError, "least_gain"),
    ],
)
def test_values_that_cannot_be_planned_are_refused(make, values, error, said):
    with pytest.raises(error, match=said):
        make(**values)


def test_an_unknown_operation_is_refused(tmp_path):
    with pytest.raises(UnknownNameError):
        plan("no_such", selector=lab.oracle(tmp_path), n="1..4")
