"""Options and arguments of wrong types: an error of the project that quotes the value and says what is accepted."""

from __future__ import annotations

import pytest

import kernelcast as kc
from kernelcast.errors import InvalidProblemError, SettingsError, UnknownNameError
from kernelcast.kernels.detect import detect
from kernelcast.runtime import Selector

HERE = detect("cpu")
PROBLEM = kc.problem("softmax", rows=4, columns=8)


@pytest.fixture
def selector(tmp_path):
    folders = {name: tmp_path / name for name in ("models", "cache", "store")}
    return Selector(HERE, mode="predict", **folders)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"plan": 3}, "plan is 3; it must be a TimingPlan."),
        ({"plan": None}, "plan is None; it must be a TimingPlan."),
        ({"plans": 1}, "plans is 1; it must be a list of plans"),
        ({"plans": None}, "plans is None; it must be a list of plans"),
        ({"plans": "plan.json"}, "plans is 'plan.json'; it must be a list of plans"),
        ({"plans": [1]}, "One of plans is 1; it must be what kernelcast.plan gives"),
        ({"pack": 1}, "pack is 1; it must be a path."),
        ({"pack": True}, "pack is True; it must be a path."),
        ({"cache": 1}, "cache is 1; it must be a path, True or False."),
        ({"store": 0}, "store is 0; it must be a path, True or False."),
        ({"models": 1}, "models is 1; it must be a path."),
        ({"models": False}, "models is False; it must be a path."),
        ({"background": "no"}, "background is 'no'; it must be True or False."),
        ({"background": 1}, "background is 1; it must be True or False."),
        ({"workload": 3}, "workload is 3; it must be a name"),
        ({"mode": ""}, "The mode is ''; it must be one of off"),
        ({"mode": ["verify"]}, "The mode is ['verify']; it must be one of off"),
        ({"priors": [1]}, "priors is [1]; it must be a function"),
        ({"top_k": "3"}, "top_k is '3'; it must be an integer of at least 1."),
        ({"expected_calls": "x" * 200}, "it must be a positive number."),
    ],
)
def test_options_of_selectors(options, said):
    for refuse in (lambda **given: Selector(HERE, **given), kc.configure):
        with pytest.raises(SettingsError) as seen:
            refuse(**options)
        assert said in str(seen.value)


def test_a_device_by_name_is_no_device():
    with pytest.raises(
        SettingsError, match=r"device is 'a100'; it must be a Device, such as kernelcast\.device"
    ):
        Selector("a100")
    with pytest.raises(UnknownNameError, match=r"Unknown device 3\. .*Known: .*a100"):
        kc.device(3)


def test_a_plan_of_sizes_in_the_place_of_a_timing_plan_is_told_where_to_go(selector):
    table = kc.plan("softmax", columns="1..8", rows=4, mode="off", selector=selector)
    with pytest.raises(
        SettingsError, match=r"must be a TimingPlan\. Tables of kernelcast\.plan go into plans="
    ):
        Selector(HERE, plan=table)


def test_what_is_no_problem(selector):
    for given in (1, "softmax", None):
        with pytest.raises(
            InvalidProblemError, match=f"^{given!r} is no problem. Make one with kernelcast.problem"
        ):
            selector.select(given)
    with pytest.raises(InvalidProblemError, match=r"is one problem, and a list of problems is expected"):
        selector.warmup(PROBLEM)
    for given in (1, "softmax", None):
        with pytest.raises(InvalidProblemError, match=f"^{given!r} is no list of problems"):
            selector.warmup(given)
    with pytest.raises(InvalidProblemError, match=r"^1 is no problem"):
        selector.warmup([PROBLEM, 1])
    assert [each.problem for each in selector.warmup(each for each in [PROBLEM])] == [PROBLEM]
    assert selector.warmup([]) == []


def test_what_is_no_selection(selector):
    for given in (1, PROBLEM, None):
        with pytest.raises(SettingsError, match=r"selection is .*; it must be what kernelcast\.select gives"):
            selector.explain(given)
    selection = selector.select(PROBLEM)
    for rivals in ("x", -1, 1.0, True):
        with pytest.raises(SettingsError, match=f"rivals is {rivals!r}; it must be an integer of at least 0"):
            selector.explain(selection, rivals=rivals)
    assert selector.explain(selection, rivals=0).rivals == ()


def test_calls_are_checked_whatever_is_remembered(selector):
    assert selector.select(PROBLEM, expected_calls=5).problem == PROBLEM
    for _ in range(2):
        with pytest.raises(SettingsError, match="expected_calls is 'many'; it must be a positive number"):
            selector.select(PROBLEM, expected_calls="many")
        selector.select(PROBLEM)
