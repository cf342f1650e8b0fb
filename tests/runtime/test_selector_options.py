"""The selector's options: in the background, only where it pays, watched for drift, with candidates from elsewhere."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
import torch

import kernelcast as kc
from kernelcast.costmodel import Prediction
from kernelcast.datasets.store import Store
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import ImportFileError, SettingsError
from kernelcast.kernels import Variant, Work, candidates, register_variant, registry
from kernelcast.kernels.detect import detect
from kernelcast.runtime import Selector, dispatch
from kernelcast.runtime.background import Background
from kernelcast.runtime.break_even import break_even
from kernelcast.runtime.cache_key import forget_keys
from kernelcast.runtime.ranking import Ranking

HERE = detect("cpu")


@pytest.fixture
def make(lab, tmp_path):
    def build(**options):
        folders = {name: tmp_path / name for name in ("models", "cache", "store")}
        return Selector(HERE, **{**folders, **options})

    return build


def measured(tmp_path):
    """The variants in the store, with how often each was measured."""
    if not (tmp_path / "store").exists():
        return Counter()
    return Counter(m.candidate.variant for m in Store(tmp_path / "store").measurements())


# --- Ready answers ---


def test_an_answer_that_is_ready_is_the_same_object_until_something_changes(make, lab, monkeypatch):
    monkeypatch.setenv("KERNELCAST_MODE", "verify")
    selector, problem = make(), lab.a_problem()
    assert selector.select(problem).source == "verified"
    ready = selector.select(problem)
    assert (ready.source, ready.candidate) == ("cached", lab.candidate("quick"))
    assert selector.select(lab.a_problem()) is ready
    monkeypatch.setenv("KERNELCAST_MODE", "off")
    assert selector.select(problem).candidate == lab.candidate("vendor")
    monkeypatch.setenv("KERNELCAST_MODE", "verify")
    assert selector.select(problem) == ready
    assert selector.select(problem, mode="off").source == "default"
    selector.forget(problem)
    assert selector.select(problem).source == "verified"


def test_a_new_variant_is_asked_for_at_once(make, lab):
    selector, problem = make(top_k=9), lab.a_problem()
    first = selector.select(problem)
    assert selector.select(problem).source == "cached"

    class Newer(Variant):
        name, backend, doc = "newer", "torch", "new"

        def work(self, problem, columns, device):
            return Work(flops=1.0, traffic_bytes=1.0)

        def build(self, problem, config):
            def run(x):
                lab.STATE.now_us += 5.0
                return x * 2

            return run

    register_variant(lab.NAME)(Newer)
    second = selector.select(problem)
    assert (first.candidate.variant, second.candidate.variant) == ("last", "newer")
    assert second.source == "verified"


# --- In the background ---


def test_in_the_background_the_default_answers_until_the_verification_is_done(make, lab, tmp_path):
    selector, problem = make(background=True), lab.a_problem()
    changed = []
    selector.listen(changed.append)
    first = selector.select(problem)
    assert (first.candidate, first.source) == (lab.candidate("vendor"), "default")
    assert "in the background" in first.reason
    assert selector.wait(30.0)
    assert not selector.pending(problem)
    assert changed == [problem]
    later = selector.select(problem)
    assert (later.candidate, later.source) == (lab.candidate("quick"), "cached")
    assert measured(tmp_path) == {"vendor": 1, "quick": 1, "slow": 1}


def test_many_threads_start_one_verification(make, lab, tmp_path):
    selector, problem = make(background=True), lab.a_problem()
    threads = [threading.Thread(target=selector.select, args=(problem,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert selector.wait(30.0)
    assert measured(tmp_path) == {"vendor": 1, "quick": 1, "slow": 1}


def test_a_warmup_in_the_background_returns_when_all_is_done(make, lab):
    selector = make(background=True)
    found = selector.warmup([lab.a_problem(8), lab.a_problem(16)])
    assert [(each.candidate, each.source) for each in found] == [(lab.candidate("quick"), "cached")] * 2


def test_a_verification_that_fails_in_the_background_leaves_the_default(make, lab):
    selector, problem = make(background=True), lab.a_problem()
    lab.STATE.inputs_fail = True
    selector.select(problem)
    assert selector.wait(30.0)
    assert selector.select(problem).source in ("default", "analytic")


def test_background_tasks_run_in_turn_and_those_that_wait_are_dropped_at_the_end():
    work, order, hold = Background(), [], threading.Event()
    work.submit(lambda: (hold.wait(10.0), order.append(1)))
    work.submit(lambda: order.append(2))
    assert not work.wait(0.01)
    hold.set()
    assert work.wait(10.0)
    assert order == [1, 2]
    hold.clear()
    work.submit(lambda: hold.wait(0.2))
    work.submit(lambda: order.append(3))
    work.close()
    work.submit(lambda: order.append(4))
    time.sleep(0.05)
    assert order == [1, 2]


def test_coroutines_share_one_verification(make, lab, tmp_path):
    selector, problem = make(), lab.a_problem()

    async def ask():
        return await asyncio.gather(*(asyncio.to_thread(selector.select, problem) for _ in range(8)))

    found = asyncio.run(ask())
    assert {each.candidate.variant for each in found} == {"quick"}
    assert [each.source for each in found].count("verified") == 1
    assert measured(tmp_path) == {"vendor": 1, "quick": 1, "slow": 1}


# --- Break-even ---


def ranking_of(lab, gaps, error=0.01):
    problem = lab.a_problem()
    table = candidates(problem, HERE)
    prediction = Prediction(log_latency=gaps, error_log=gaps * 0 + error, covered=gaps < 99.0)
    return problem, Ranking(table, prediction, "predicted", "1", "by a fake", default=0)


def test_what_a_verification_costs_and_may_save(lab):
    # The default takes 100 us, another 50 us, both sure to 0.01: at most 100 - 50 exp(-0.02) us a call.
    problem, ranking = ranking_of(lab, np.log(np.array([100.0, 50.0, 200.0, 300.0, 400.0])))
    plan = TimingPlan(rounds=10, sample_us=1000.0, repeats=20, seconds=10.0, candidate_seconds=3.0)
    found = break_even(ranking, [0, 1], problem, HERE, plan, expected_calls=1000)
    assert found.saving_s == pytest.approx(1000 * (100 - 50 * np.exp(-0.02)) * 1e-6)
    # Ten samples of 1,000 us for each of the two, three calls before, and the checks.
    assert found.cost_s == pytest.approx(2 * 10 * 1e-3 + 3 * 150e-6 + 0.005)
    assert found.pays
    assert not break_even(ranking, [0, 1], problem, HERE, plan, expected_calls=400).pays


def test_without_a_predicted_default_nothing_is_compared(lab):
    problem, ranking = ranking_of(lab, np.array([99.0, 1.0, 2.0, 3.0, 4.0]))
    assert break_even(ranking, [0, 1], problem, HERE, TimingPlan(), expected_calls=1) is None


def test_a_verification_that_cannot_pay_back_is_not_started_and_says_so(make, lab, tmp_path):
    selector, problem = make(), lab.a_problem()
    found = selector.select(problem, expected_calls=1)
    assert (found.candidate, found.source) == (lab.candidate("vendor"), "default")
    assert found.reason.startswith("Not verified: 1 calls can save at most")
    assert measured(tmp_path) == {}
    assert selector.select(problem, expected_calls=1e12).source == "verified"
    # What is remembered is given, however few calls come.
    assert selector.select(problem, expected_calls=1).candidate == lab.candidate("quick")


# --- Drift ---


def test_drift_is_noticed_and_the_winner_replaced(make, lab, tmp_path):
    selector, problem = make(drift_every=3), lab.a_problem()
    changed = []
    selector.listen(changed.append)
    assert selector.select(problem).candidate == lab.candidate("quick")
    lab.STATE.latency_us["quick"] = 300.0
    answers = [selector.select(problem).candidate.variant for _ in range(4)]
    assert answers == ["quick", "quick", "vendor", "vendor"]
    assert changed == [problem]
    # Another process has it from the disk.
    assert make().select(problem).candidate == lab.candidate("vendor")


def test_a_winner_that_still_wins_stays_as_it_was(make, lab):
    selector, problem = make(drift_every=2), lab.a_problem()
    selector.select(problem)
    first = selector.select(problem)
    lab.STATE.runs.clear()
    assert selector.select(problem) == first
    assert set(lab.STATE.runs) == {"vendor", "quick", "slow"}


# --- Candidates from elsewhere, and how many ---


def test_priors_are_measured_along_and_may_win(make, lab, tmp_path):
    selector = make(priors=lambda problem: [lab.candidate("last"), kc.Candidate.of("unknown")])
    found = selector.select(lab.a_problem())
    assert (found.candidate, found.measured) == (lab.candidate("last"), 4)
    assert set(measured(tmp_path)) == {"vendor", "quick", "slow", "last"}


def test_a_target_regret_measures_as_few_as_the_forecast_allows(make, lab, tmp_path):
    class Sure:
        facts: ClassVar = {"version": "fake"}
        gap = 2.0

        def spaces(self):
            return None

        def predict(self, problem, table, device):
            log = np.array([0.0 if each.variant == "last" else self.gap for each in table])
            return Prediction(log, np.full(len(table), 0.01), np.ones(len(table), dtype=bool))

    sure, unsure = make(target_regret=0.005), make(target_regret=0.005)
    sure.rankers._models[lab.NAME] = (Sure(), "by a fake")
    assert sure.select(lab.a_problem()).measured == 2  # the default and the first
    close = Sure()
    close.gap = 0.0
    unsure.rankers._models[lab.NAME] = (close, "by a fake")
    alike = unsure.select(lab.a_problem(32))
    assert alike.measured == 2
    # The cache keeps apart what was verified under different promises.
    assert make().select(lab.a_problem()).source == "verified"


@pytest.mark.parametrize(
    "options",
    [
        {"target_regret": 0.0},
        {"target_regret": 1.0},
        {"target_regret": "small"},
        {"expected_calls": 0},
        {"drift_every": -1},
        {"drift_every": 1.5},
        {"budget_seconds": float("inf")},
    ],
)
def test_options_that_cannot_be_used_are_refused(make, options):
    with pytest.raises(SettingsError, match=next(iter(options))):
        make(**options)


# --- Behind the drop-ins ---


@pytest.fixture
def registered(lab, tmp_path):
    """Options of drop-ins whose selections touch nothing but this test's folders."""
    folders = {name: tmp_path / name for name in ("models", "cache", "store")}
    yield folders
    kc.configure()


def test_a_drop_in_moves_over_when_its_verification_is_done(registered):
    plan = TimingPlan(rounds=2, least_rounds=1, seconds=0.2)
    kc.configure(**registered, background=True, top_k=2, plan=plan, mode="verify")
    a, b = torch.randn(17, 19), torch.randn(19, 23)
    first = kc.matmul(a, b)
    torch.testing.assert_close(first, a @ b)
    selector = dispatch.selector_for(a.device)
    assert selector.wait(60.0)
    assert not any(key[0] == "gemm" for key in dispatch.launchers)  # to be resolved anew
    torch.testing.assert_close(kc.matmul(a, b), a @ b)
    found = kc.select("gemm", m=17, n=23, k=19, dtype="float32")
    assert found.source == "cached"


def test_a_drop_in_that_is_watched_has_its_problem_verified_again_after_so_many_calls(registered):
    plan = TimingPlan(rounds=2, least_rounds=1, seconds=0.2)
    kc.configure(**registered, drift_every=4, top_k=1, plan=plan, mode="verify")
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    kc.matmul(a, b)
    selector, asked = dispatch.selector_for(a.device), []
    recheck = selector.recheck
    selector.recheck = lambda problem: asked.append(problem) or recheck(problem)
    for _ in range(10):
        torch.testing.assert_close(kc.matmul(a, b), a @ b)
    assert [str(problem)[:19] for problem in asked] == ["gemm(m=5, n=3, k=7,"] * 2


def test_a_new_variant_clears_what_the_drop_ins_remember(registered, monkeypatch):
    kc.configure(**registered, mode="predict")
    kc.softmax(torch.randn(3, 4))
    assert dispatch.launchers
    for told in registry._listeners:
        told("softmax")
    assert not dispatch.launchers


# --- Candidates that fail ---


def test_a_rejected_candidate_is_not_selected_again_and_the_next_one_is(make, lab, tmp_path):
    selector, problem = make(), lab.a_problem()
    assert selector.select(problem).candidate == lab.candidate("quick")
    assert selector.reject(problem, lab.candidate("quick"))
    second = selector.select(problem)
    assert (second.source, second.measured) == ("verified", 3)
    assert second.candidate == lab.candidate("vendor")  # "slow" and "twin" do not beat it
    assert selector.predict(problem).candidate == lab.candidate("slow")
    # Another process knows nothing of it, and finds what was verified instead.
    assert make().select(problem).candidate == lab.candidate("vendor")


def test_after_some_failures_the_default_is_left_to_run(make, lab):
    selector, problem = make(), lab.a_problem()
    again = [selector.reject(problem, lab.candidate(name)) for name in ("quick", "slow", "twin", "last")]
    assert again == [True, True, True, False]
    assert selector.select(problem).candidate == lab.candidate("vendor")
    assert not selector.reject(problem, lab.candidate("vendor"))


def test_a_drop_in_whose_candidate_fails_selects_among_the_others(registered, monkeypatch):
    from dropin_lab import Fails

    class Broken(Fails):
        name = "test_broken"

    known = {**registry._variants["softmax"], "test_broken": Broken()}
    monkeypatch.setitem(registry._variants, "softmax", known)
    kc.configure(**registered, mode="predict")
    x = torch.randn(7, 9)
    selector = dispatch.selector_for(x.device)
    first = kc.Candidate.of("test_broken")
    rank = selector.rankers.rank

    def broken_first(problem, *, whole=False):
        found = rank(problem, whole=whole)
        log = found.prediction.log_latency.copy()
        log[found.row_of(first)] = -9.0
        return Ranking(
            found.table, Prediction(log, found.prediction.error_log, found.prediction.covered), "analytic", "", "",
            found.default,
        )  # fmt: skip

    selector.rankers.rank = broken_first
    with pytest.warns(dispatch.LaunchWarning, match="failed"):
        torch.testing.assert_close(kc.softmax(x), torch.softmax(x, -1))
    torch.testing.assert_close(kc.softmax(x), torch.softmax(x, -1))
    selection = selector.select(kc.problem("softmax", rows=7, columns=9, dtype="float32"))
    assert (selection.source, selection.candidate == first) == ("analytic", False)


def test_a_prior_that_the_ranking_does_not_list_joins_it(make, lab):
    selector, problem = make(), lab.a_problem()
    ranking = selector.rank(problem)
    shorter = Ranking(
        type(ranking.table)(ranking.table.blocks[:2]),
        Prediction(ranking.prediction.log_latency[:2], ranking.prediction.error_log[:2], ranking.prediction.covered[:2]),
        "analytic", "", "", 0,
    )  # fmt: skip
    longer = shorter.including([lab.candidate("twin"), ranking.table[0], lab.candidate("twin")])
    assert [each.variant for each in longer.table] == [*(each.variant for each in shorter.table), "twin"]
    assert longer.order().tolist()[-1] == 2  # not covered: behind all that are
    assert longer.row_of(lab.candidate("twin")) == 2
    assert shorter.including([ranking.table[0]]) is shorter


# --- What others, or other versions, have verified ---


def test_a_pack_gives_the_choices_of_whoever_wrote_it(make, lab, tmp_path):
    from kernelcast.runtime.pack import write_pack

    elsewhere = Selector(
        HERE,
        models=tmp_path / "m",
        cache=tmp_path / "elsewhere",
        store=False,
        priors=lambda _: [lab.candidate("last")],
    )
    assert elsewhere.select(lab.a_problem()).candidate == lab.candidate("last")
    path = write_pack(tmp_path, elsewhere.cache.entries())
    lab.STATE.runs.clear()
    found = make(pack=path, mode="cached").select(lab.a_problem())
    assert (found.candidate, found.source) == (lab.candidate("last"), "cached")
    assert lab.STATE.runs == {}
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ImportFileError, match=path.name):
        make(pack=path)


def test_what_won_under_another_version_is_measured_again_beside_the_default(
    make, lab, tmp_path, monkeypatch
):
    lab.STATE.illegal = {"quick", "slow", "twin"}
    assert make().select(lab.a_problem()).candidate == lab.candidate("last")
    lab.STATE.illegal = set()
    monkeypatch.setenv(
        "MKL_CBWR", "COMPATIBLE"
    )  # the libraries that all variants call would choose other kernels
    forget_keys()
    try:
        found = make(top_k=2).select(lab.a_problem())
    finally:
        monkeypatch.undo()
        forget_keys()
    # The default and the first of the ranking, and the prior along with them.
    assert (found.source, found.measured) == ("verified", 3)
    assert found.candidate == lab.candidate("last")


# --- What the caller has entered, and what a caller may get wrong ---


def test_a_verification_is_not_seen_by_the_callers_modes(registered):
    from torch.overrides import TorchFunctionMode
    from torch.utils.flop_counter import FlopCounterMode

    seen = []

    class Watches(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    plan = TimingPlan(rounds=2, least_rounds=1, seconds=0.2)
    kc.configure(**registered, mode="verify", plan=plan, top_k=2)
    a, b = torch.randn(14, 15), torch.randn(15, 16)
    with FlopCounterMode(display=False) as counted:
        kc.matmul(a, b)
    assert counted.get_total_flops() == 2 * 14 * 15 * 16
    with Watches(), torch.device("meta"):
        found = kc.select("gemm", m=9, n=8, k=7, dtype="float32")
    assert found.source == "verified"
    assert torch.randn not in seen


@pytest.mark.parametrize("priors", [lambda problem: 1 / 0, lambda problem: None, lambda problem: [1]])
def test_priors_that_fail_cost_a_warning(make, lab, priors):
    with pytest.warns(UserWarning, match="could not be had"):
        assert make(priors=priors).select(lab.a_problem()).source == "verified"


def test_priors_that_are_no_function_are_refused(make):
    with pytest.raises(SettingsError, match="priors"):
        make(priors=[1])


def test_a_search_that_was_cut_short_does_not_replace_one_that_saw_more(make, lab):
    whole = make().tune(lab.a_problem())
    short = make(budget_seconds=1e-9).tune(lab.a_problem())
    assert (whole.measured, short.measured) == (5, 1)
    assert "stays what is remembered: last" in short.reason
    assert make(mode="tune").select(lab.a_problem()).candidate == lab.candidate("last")
