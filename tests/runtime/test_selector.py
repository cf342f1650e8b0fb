"""The selector on an operation whose latencies the tests set, in every mode and under every fault."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from kernelcast import settings
from kernelcast.cli.select import select as select_command
from kernelcast.costmodel import Prediction, ProblemData, RankingModel
from kernelcast.datasets.store import Store
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import ModelError, SettingsError
from kernelcast.kernels import Problem, Work, candidates, variants
from kernelcast.kernels.detect import detect
from kernelcast.kernels.devices import device as known_device
from kernelcast.runtime import CacheKey, CacheWarning, ModelWarning, Selection, Selector
from kernelcast.runtime.verify import BusyWarning

HERE = detect("cpu")
VERSION = "0001-3f2a9c1b"


@pytest.fixture
def make(lab, tmp_path):
    """Builds selectors whose folders are below ``tmp_path``; a second one is as another process's."""

    def build(device=HERE, **options):
        folders = {name: tmp_path / name for name in ("models", "cache", "store")}
        return Selector(device, **{**folders, **options})

    return build


def measured(tmp_path):
    """The variants in the store, with how often each was measured."""
    if not (tmp_path / "store").exists():
        return Counter()
    return Counter(m.candidate.variant for m in Store(tmp_path / "store").measurements())


def quietly(function):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function()


def same(one: Selection, other: Selection):
    return one.to_dict() == other.to_dict()


# --- Modes ---


def test_off_is_the_default_and_nothing_runs(make, lab, tmp_path):
    make().select(lab.a_problem(), mode="verify")  # remembered, and to be left alone
    lab.STATE.reset()
    selection = make(mode="off").select(lab.a_problem())
    assert (selection.candidate, selection.source) == (lab.candidate("vendor"), "default")
    assert (selection.measured, selection.candidates) == (0, 0)
    assert math.isnan(selection.predicted_us)
    assert lab.STATE.runs == {}


def test_cached_without_an_entry_is_the_default(make, lab, tmp_path):
    selection = make(mode="cached").select(lab.a_problem())
    assert (selection.candidate, selection.source) == (lab.candidate("vendor"), "default")
    assert "nothing is remembered" in selection.reason
    assert lab.STATE.runs == {}
    assert measured(tmp_path) == {}


def test_predict_measures_nothing_and_says_by_what(make, lab, tmp_path):
    selection = quietly(lambda: make(mode="predict").select(lab.a_problem()))
    # The roofline's order, which the tests' latencies do not follow.
    assert (selection.candidate, selection.source) == (lab.candidate("quick"), "analytic")
    assert "No model of test_runtime" in selection.reason
    assert selection.reason[0].isupper()
    assert selection.reason.endswith(".")
    assert selection.predicted_us > 0
    assert selection.default_us > selection.predicted_us
    assert math.isnan(selection.measured_us)
    assert (selection.measured, selection.candidates, selection.model_version) == (0, 5, "")
    assert lab.STATE.runs == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 9])
def test_verify_measures_exactly_the_first_few_and_always_the_default(make, lab, tmp_path, top_k):
    selection = make(top_k=top_k).select(lab.a_problem())
    expected = ["vendor", "quick", "slow", "twin", "last"][:top_k]
    assert measured(tmp_path) == Counter(expected)
    assert selection.source == "verified"
    assert selection.measured == len(expected)
    assert selection.candidates == 5
    fastest = min(expected, key=lab.STATE.latency_us.get)
    assert selection.candidate == lab.candidate(fastest)
    assert selection.measured_us == pytest.approx(lab.STATE.latency_us[fastest])
    assert selection.default_us == pytest.approx(100.0)
    assert selection.speedup == pytest.approx(100.0 / lab.STATE.latency_us[fastest])
    assert f"{len(expected)} measured" in selection.reason


def test_records_of_a_verification_are_the_stores(make, lab, tmp_path):
    make(workload="serving").select(lab.a_problem())
    records = list(Store(tmp_path / "store").measurements())
    assert {(r.problem, r.workload, r.device_fingerprint) for r in records} == {
        (lab.a_problem(), "serving", HERE.fingerprint)
    }
    assert Store(tmp_path / "store").devices() == {HERE.fingerprint: HERE}


def test_the_plan_is_followed(make, lab):
    make(top_k=1, plan=TimingPlan(rounds=2, repeats=1)).select(lab.a_problem())
    assert lab.STATE.runs == {"vendor": 6}


def test_tune_measures_the_whole_space(make, lab, tmp_path):
    selection = make().select(lab.a_problem(), mode="tune")
    assert measured(tmp_path) == Counter(lab.VARIANTS)
    assert (selection.candidate, selection.source) == (lab.candidate("last"), "verified")
    assert (selection.measured, selection.candidates) == (5, 5)
    assert "Incomplete" not in selection.reason


def test_tune_finds_the_fastest_wherever_it_is_ranked(make, lab, tmp_path):
    lab.STATE.latency_us["last"] = 500.0  # so that "quick" is the fastest
    selection = make().select(lab.a_problem(), mode="tune")
    assert set(measured(tmp_path)) == set(lab.VARIANTS)
    assert selection.candidate == lab.candidate("quick")
    assert selection.measured == 5
    assert "fastest of 5 measured" in selection.reason


def test_tune_out_of_time_says_that_it_is_incomplete(make, lab, tmp_path):
    selection = make(budget_seconds=1e-9).select(lab.a_problem(), mode="tune")
    assert measured(tmp_path) == Counter(["vendor"])  # one is always measured: the default
    assert selection.measured == 1
    assert selection.reason.endswith("Incomplete: the budget of 1e-09 s ended with 4 not tried.")
    assert selection.candidate == lab.candidate("vendor")


def test_the_mode_comes_from_the_call_the_selector_and_the_environment(make, lab, monkeypatch):
    monkeypatch.setenv("KERNELCAST_MODE", "predict")
    assert make().select(lab.a_problem()).source == "analytic"
    assert make(mode="off").select(lab.a_problem()).source == "default"
    assert make(mode="off").select(lab.a_problem(), mode="verify").source == "verified"
    monkeypatch.setenv("KERNELCAST_MODE", "guess")
    with pytest.raises(SettingsError, match="KERNELCAST_MODE"):
        make().select(lab.a_problem())


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "guess"},
        {"top_k": 0},
        {"top_k": True},
        {"top_k": 2.0},
        {"budget_seconds": 0},
        {"budget_seconds": math.nan},
        {"budget_seconds": "long"},
    ],
)
def test_options_that_cannot_be_used_are_refused(make, options):
    with pytest.raises(SettingsError):
        make(**options)


def test_an_unknown_mode_of_a_call_is_refused(make, lab):
    with pytest.raises(SettingsError, match="one of off, cached, predict, verify, tune"):
        make().select(lab.a_problem(), mode="guess")


def test_folders_are_the_homes_where_none_are_given(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    Selector(HERE, mode="verify").select(lab.a_problem())
    assert sorted(p.name for p in (tmp_path / "home").iterdir()) == ["cache", "store"]
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "other"))
    Selector(HERE, mode="verify", cache=False, store=False).select(lab.a_problem())
    assert not (tmp_path / "other").exists()


# --- Remembering ---


@pytest.mark.parametrize("mode", ["verify", "tune"])
def test_a_second_call_measures_nothing(make, lab, tmp_path, mode):
    selector = make()
    first = selector.select(lab.a_problem(), mode=mode)
    before = measured(tmp_path)
    lab.STATE.runs.clear()
    for again in (selector, make()):
        second = quietly(lambda again=again: again.select(lab.a_problem(), mode=mode))
        assert second.source == "cached"
        assert same(replace(second, source="verified"), first)
    assert lab.STATE.runs == {}
    assert measured(tmp_path) == before


def test_what_was_verified_serves_every_mode_but_off_and_tune(make, lab):
    make().select(lab.a_problem(), mode="verify")
    lab.STATE.runs.clear()
    for mode in ("cached", "predict", "verify"):
        selection = make().select(lab.a_problem(), mode=mode)
        assert (selection.source, selection.candidate) == ("cached", lab.candidate("quick"))
    assert lab.STATE.runs == {}
    assert make().select(lab.a_problem(), mode="tune").candidate == lab.candidate("last")


def test_what_was_tuned_serves_the_other_modes(make, lab):
    make().select(lab.a_problem(), mode="verify")
    make().select(lab.a_problem(), mode="tune")
    lab.STATE.runs.clear()
    for mode in ("cached", "predict", "verify"):
        assert make().select(lab.a_problem(), mode=mode).candidate == lab.candidate("last")
    assert lab.STATE.runs == {}


def test_other_facts_are_other_entries(make, lab):
    selector = make()
    selector.select(lab.a_problem())
    for other in (lab.a_problem(n=17), lab.a_problem(dtype="float16"), lab.a_problem(layout="b"), lab.a_problem(threads=1)):  # fmt: skip
        lab.STATE.runs.clear()
        assert selector.select(other).source == "verified"
        assert lab.STATE.runs
    lab.STATE.runs.clear()
    assert make(top_k=2).select(lab.a_problem()).source == "verified"
    assert lab.STATE.runs


def test_what_is_forgotten_is_measured_again(make, lab):
    selector = make()
    selector.select(lab.a_problem())
    selector.select(lab.a_problem(), mode="tune")
    selector.forget(lab.a_problem())
    assert make().select(lab.a_problem(), mode="cached").source == "default"
    assert selector.select(lab.a_problem()).source == "verified"


def test_warmup_leaves_nothing_to_measure(make, lab):
    problems = [lab.a_problem(n=n) for n in (4, 5, 6)]
    selector = make()
    assert [s.problem for s in selector.warmup(problems)] == problems
    lab.STATE.runs.clear()
    assert {s.source for s in selector.select_many(problems)} == {"cached"}
    assert lab.STATE.runs == {}


def test_the_order_of_calls_never_changes_a_choice(make, lab):
    problems = [lab.a_problem(n=n) for n in (4, 5, 6)]
    forward = {s.problem: s.candidate for s in make(cache=False).select_many(problems)}
    backward = {s.problem: s.candidate for s in make(cache=False).select_many(problems[::-1])}
    assert forward == backward


# --- Failures of candidates ---


def test_a_tie_goes_to_the_default(make, lab):
    lab.STATE.latency_us["quick"] = 100.0
    selection = make(top_k=2).select(lab.a_problem())
    assert selection.candidate == lab.candidate("vendor")
    assert "beats the default beyond noise" in selection.reason
    assert selection.speedup == pytest.approx(1.0)


def test_a_wrong_candidate_is_not_selected_however_fast(make, lab, tmp_path):
    lab.STATE.wrong.add("quick")
    selection = make().select(lab.a_problem())
    assert selection.candidate == lab.candidate("vendor")
    assert "1 failed (wrong_result)" in selection.reason
    outcomes = {m.candidate.variant: m.outcome for m in Store(tmp_path / "store").measurements()}
    assert outcomes == {"vendor": "ok", "quick": "wrong_result", "slow": "ok"}


def test_the_default_fails(make, lab):
    lab.STATE.raising.add("vendor")
    selection = make().select(lab.a_problem())
    assert (selection.candidate, selection.source) == (lab.candidate("quick"), "verified")
    assert math.isnan(selection.default_us)
    assert math.isnan(selection.speedup)


@pytest.mark.parametrize("mode", ["verify", "tune"])
def test_everything_fails(make, lab, tmp_path, mode):
    lab.STATE.raising.update(lab.VARIANTS)
    selector = make()
    selection = selector.select(lab.a_problem(), mode=mode)
    assert (selection.candidate, selection.source) == (lab.candidate("vendor"), "default")
    assert "worked" in selection.reason
    assert "cannot be run" in selection.reason
    # This process does not try again; the next one does, for what failed may have been the process.
    lab.STATE.reset()
    assert selector.select(lab.a_problem(), mode=mode).source == "default"
    assert lab.STATE.runs == {}
    assert make().select(lab.a_problem(), mode=mode).source == "verified"


@pytest.mark.parametrize("mode", ["predict", "verify", "tune"])
def test_no_candidate_is_legal(make, lab, mode):
    lab.STATE.illegal.update(lab.VARIANTS)
    selection = make().select(lab.a_problem(), mode=mode)
    assert (selection.candidate, selection.source) == (lab.candidate("vendor"), "default")
    assert "legal" in selection.reason


def test_the_default_is_not_legal(make, lab, tmp_path):
    lab.STATE.illegal.add("vendor")
    selection = make(top_k=2).select(lab.a_problem())
    assert measured(tmp_path) == Counter(["quick", "slow"])
    assert selection.candidate == lab.candidate("quick")
    assert math.isnan(selection.default_us)
    assert math.isnan(make(mode="predict").select(lab.a_problem(n=5)).default_us)


@pytest.mark.parametrize("mode", ["verify", "tune"])
def test_what_cannot_be_measured_is_predicted_with_the_reason(make, lab, mode):
    lab.STATE.inputs_fail = True
    selector = make()
    selection = selector.select(lab.a_problem(), mode=mode)
    assert (selection.candidate, selection.source) == (lab.candidate("quick"), "analytic")
    assert "no inputs today" in selection.reason
    lab.STATE.inputs_fail = False
    assert selector.select(lab.a_problem(), mode=mode).source == "analytic"
    assert make().select(lab.a_problem(), mode=mode).source == "verified"


def test_what_does_not_fit_in_memory_is_predicted(make, lab):
    selection = make().select(lab.a_problem(n=2**38))
    assert selection.source == "analytic"
    assert "GiB" in selection.reason
    assert lab.STATE.runs == {}


# --- Devices ---


@pytest.mark.parametrize("mode", ["verify", "tune"])
def test_another_device_is_predicted_only(make, lab, tmp_path, mode):
    elsewhere = [replace(HERE, cores=HERE.cores + 1, name="bigger"), known_device("mi300x")]
    for device in elsewhere:
        selection = make(device).select(lab.a_problem(), mode=mode)
        assert selection.source == "analytic"
        assert selection.device == device.name
        assert "is not here to measure on" in selection.reason
    assert lab.STATE.runs == {}
    assert list(tmp_path.iterdir()) == []


def test_this_device_under_another_name_is_this_device(make, lab):
    assert make(replace(HERE, name="my-machine")).select(lab.a_problem()).source == "verified"
    assert make().select(lab.a_problem()).source == "cached"


# --- A busy machine ---


@pytest.fixture
def busy(lab):
    """Latencies of a busy machine; what warns of it once a process is passed over."""
    lab.STATE.latency_us = lab.Busy(
        {name: 10 * us for name, us in lab.STATE.latency_us.items()}, probability=0.45, times=40.0, seed=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BusyWarning)
        yield


@pytest.mark.parametrize("mode", ["verify", "tune"])
def test_what_was_decided_on_a_busy_machine_is_remembered_as_such(make, lab, busy, mode):
    first = make().select(lab.a_problem(), mode=mode)
    assert (first.source, first.busy, "the machine was busy" in first.reason) == ("verified", True, True)
    again = make().select(lab.a_problem(), mode=mode)
    assert (again.source, again.busy) == ("cached", True)
    lab.STATE.reset()
    assert make().select(lab.a_problem(n=17), mode=mode).busy is False


def test_a_mark_goes_when_a_quiet_machine_says_the_same(make, lab, busy):
    selector = make()
    first = selector.select(lab.a_problem())
    lab.STATE.reset()
    lab.STATE.latency_us = dict.fromkeys(lab.VARIANTS, 500.0) | {first.candidate.variant: 50.0}
    found = selector.recheck(lab.a_problem())
    assert (found.candidate, found.measured_us, found.busy) == (first.candidate, 50.0, False)
    assert "no longer wins" not in found.reason
    again = make().select(lab.a_problem())
    assert (again.source, again.measured_us, again.busy) == ("cached", 50.0, False)


def test_a_shorter_search_replaces_one_of_a_busy_machine_but_no_other(make, lab):
    selector = make()
    key = CacheKey.of(lab.a_problem(), HERE, 0)
    for was_busy in (False, True):
        standing = replace(selector.tune(lab.a_problem()), measured=1000, busy=was_busy)
        selector.cache.put(key, standing)
        selector.tune(lab.a_problem())
        assert make().select(lab.a_problem()).measured == (5 if was_busy else 1000)


# --- Models ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where the one model of this file lies once it is fitted."""
    return tmp_path_factory.mktemp("model") / VERSION


@pytest.fixture
def model(lab, saved, tmp_path):
    """A model of this device in the registry's layout, which has learnt that ``last`` is the fastest: its folder."""
    pytest.importorskip("xgboost")
    from kernelcast.costmodel import CostModel

    if not saved.exists():
        data = []
        for n in range(1, 9):
            problem = lab.a_problem(n=n)
            table = candidates(problem, HERE)
            log_latency = np.array([0.0 if c.variant == "last" else 2.0 for c in table])
            data.append(ProblemData(problem, HERE, table, log_latency, np.full(len(table), np.nan)))
        small = CostModel(n_estimators=30, max_depth=3, learning_rate=0.3, error_folds=0, n_jobs=1)
        fitted = RankingModel.fit(data, small)
        fitted.facts["device"] = HERE.to_dict()
        fitted.save(saved)
    device = tmp_path / "models" / HERE.name
    folder = device / lab.NAME
    folder.mkdir(parents=True)
    (device / "device.json").write_text(json.dumps(HERE.to_dict()))
    (folder / "champion.json").write_text(json.dumps({"version": VERSION, "previous": []}))
    shutil.copytree(saved, folder / VERSION)
    return folder


def test_a_model_ranks_and_the_choice_says_which(make, lab, tmp_path, model):
    selection = quietly(lambda: make(mode="predict").select(lab.a_problem()))
    assert (selection.candidate, selection.source) == (lab.candidate("last"), "predicted")
    assert selection.model_version == VERSION
    assert VERSION in selection.reason
    assert selection.speedup > 3.0
    assert selection.confidence > 0.9
    # And it decides what is measured.
    verified = make(top_k=2).select(lab.a_problem())
    assert measured(tmp_path) == Counter(["vendor", "last"])
    assert (verified.candidate, verified.model_version) == (lab.candidate("last"), VERSION)


@pytest.mark.parametrize("registered", [True, False])
def test_where_no_model_stands_it_is_said_how_one_comes_to(make, lab, tmp_path, monkeypatch, registered):
    """The latest of those that are registered is named; where there is none, the command that trains one."""
    device = tmp_path / "models" / HERE.name
    for version in ("0002-3f2a9c1b", "0010-3f2a9c1b", "0009-3f2a9c1b"):
        (device / lab.NAME / version).mkdir(parents=True)
    (device / "device.json").write_text(json.dumps(HERE.to_dict()))
    promote = f"kernelcast models promote 0010-3f2a9c1b --op {lab.NAME} --device {HERE.name}"
    if not registered:
        shutil.rmtree(device / lab.NAME)
    selection = quietly(lambda: make(mode="predict").select(lab.a_problem()))
    assert selection.source == "analytic"
    assert (promote in selection.reason) == registered
    # And where the roofline cannot stand in for it.
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path))
    for each in variants(lab.NAME).values():
        monkeypatch.setattr(
            type(each), "work", lambda self, problem, columns, device: Work(math.nan, math.nan)
        )
    with pytest.raises(ModelError) as caught:
        select_command(lab.NAME, ["n=16"], mode="predict")
    train = f"kernelcast train --op {lab.NAME} --device {HERE.name}"
    assert str(caught.value).count(promote) == registered
    assert str(caught.value).count(train) == (not registered)


@pytest.mark.parametrize("how", ["array", "manifest", "missing", "alias", "alias to nothing", "empty"])
def test_a_broken_model_is_the_roofline_and_a_warning(make, lab, model, how):
    if how == "array":
        path = model / VERSION / "difference.npz"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    elif how == "manifest":
        (model / VERSION / "manifest.json").write_text("{")
    elif how == "missing":
        (model / VERSION / "difference.npz").unlink()
    elif how == "alias":
        (model / "champion.json").write_text("[]")
    elif how == "alias to nothing":
        (model / "champion.json").write_text(json.dumps({"version": "0002-3f2a9c1b", "previous": []}))
    else:
        for path in (model / VERSION).iterdir():
            path.write_bytes(b"")
    selector = make()
    with pytest.warns(ModelWarning, match="roofline"):
        selection = selector.select(lab.a_problem(), mode="predict")
    assert (selection.candidate, selection.source) == (lab.candidate("quick"), "analytic")
    assert "cannot be used" in selection.reason
    # One warning, not one a call; and verifying works all the same.
    assert quietly(lambda: selector.select(lab.a_problem(n=3))).source == "verified"


class OneUnknown:
    """A model that knows every candidate but the default."""

    facts: ClassVar = {"version": VERSION}

    def predict(self, problem, table, device):
        known = np.array([c.variant != "vendor" for c in table])
        log_latency = np.array([0.0 if c.variant == "quick" else 1.0 for c in table])
        return Prediction(log_latency, np.full(len(table), 0.1), known)

    def spaces(self):
        return {name: found.space() for name, found in variants("test_runtime").items()}


def test_a_default_that_the_model_never_saw_is_measured_but_has_no_predicted_latency(make, lab, tmp_path):
    selector = make(top_k=2)
    selector.rankers._models[lab.NAME] = (OneUnknown(), "ranked by a fake")
    selection = selector.select(lab.a_problem(), mode="predict")
    assert (selection.candidate, selection.source) == (lab.candidate("quick"), "predicted")
    assert math.isnan(selection.default_us)
    selector.select(lab.a_problem())
    assert measured(tmp_path) == Counter(["vendor", "quick"])


def test_a_models_folder_that_is_a_file_is_no_model(make, lab, tmp_path):
    (tmp_path / "models").write_text("")
    assert make(mode="predict").select(lab.a_problem()).source == "analytic"


# --- Folders that cannot be written ---


def test_folders_that_cannot_be_written_cost_warnings_only(make, lab, tmp_path, recwarn):
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "below"
    selector = make(cache=below / "cache", store=below / "store", models=below / "models")
    selection = selector.select(lab.a_problem())
    assert (selection.source, selection.candidate) == ("verified", lab.candidate("quick"))
    assert {w.category for w in recwarn} == {CacheWarning, UserWarning}
    assert any("not kept" in str(w.message) for w in recwarn)
    lab.STATE.runs.clear()
    assert quietly(lambda: selector.select(lab.a_problem())).source == "cached"
    assert lab.STATE.runs == {}


def test_a_broken_entry_is_verified_again_and_replaced(make, lab, tmp_path):
    make().select(lab.a_problem())
    (path,) = (tmp_path / "cache").glob("*/*.json")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(CacheWarning, match="ignored"):
        assert make().select(lab.a_problem()).source == "verified"
    assert quietly(lambda: make().select(lab.a_problem())).source == "cached"


# --- Many at once ---


@pytest.mark.parametrize("shared", [True, False], ids=["one selector", "a selector each"])
def test_threads_on_one_cold_key_measure_once(make, lab, tmp_path, shared):
    one = make()
    start, found = threading.Barrier(6), []

    def select():
        selector = one if shared else make()
        start.wait()
        found.append(selector.select(lab.a_problem()))

    threads = [threading.Thread(target=select) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(s.source for s in found) == ["cached"] * 5 + ["verified"]
    assert {s.candidate for s in found} == {lab.candidate("quick")}
    assert set(measured(tmp_path).values()) == {1}
    lines = sum(p.read_bytes().count(b"\n") for p in (tmp_path / "store" / "journal").glob("*.jsonl"))
    assert lines == 3


PROCESS = """
import sys
from pathlib import Path
import lab
from kernelcast.kernels.detect import detect
from kernelcast.runtime import Selector

lab.install()
root = Path(sys.argv[1])
selector = Selector(detect("cpu"), models=root / "models", cache=root / "cache", store=root / "store", mode="verify")
print("ready", flush=True)
sys.stdin.readline()
selection = selector.select(lab.a_problem())
print(selection.source, selection.candidate, sum(lab.STATE.runs.values()), flush=True)
"""


@pytest.mark.slow
def test_processes_on_one_cold_key_measure_once(lab, lab_folder, tmp_path):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(lab_folder)},
        )
        for _ in range(2)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    answers = sorted(child.communicate()[0].split() for child in children)
    assert [child.returncode for child in children] == [0, 0]
    assert answers[0] == ["cached", "quick", "0"]
    assert answers[1][:2] == ["verified", "quick"]
    assert int(answers[1][2]) > 0
    assert measured(tmp_path) == Counter(["vendor", "quick", "slow"])
    lines = sum(p.read_bytes().count(b"\n") for p in (tmp_path / "store" / "journal").glob("*.jsonl"))
    assert lines == 3
    # And this process finds what they left.
    found = Selector(HERE, cache=tmp_path / "cache", store=False, mode="cached").select(lab.a_problem())
    assert (found.source, found.candidate.variant) == ("cached", "quick")


def test_a_problem_of_no_operation_is_a_clear_error(make):
    from kernelcast.errors import UnknownNameError

    problem = Problem("nothing", (("n", 1),), "float32")
    for mode in settings.MODES:
        with pytest.raises(UnknownNameError, match="nothing"):
            make().select(problem, mode=mode)
