"""``kernelcast.triton.autotune`` beside ``triton.autotune``: the same results, fewer timings, nothing else."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import threading
import warnings

import hypothesis
import pytest
from examples import examples
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton_host as host  # noqa: E402

import kernelcast as kc  # noqa: E402
from kernelcast.datasets.journal import read_journal  # noqa: E402
from kernelcast.errors import KernelcastError, SettingsError  # noqa: E402
from kernelcast.runtime import CacheWarning, dispatch, triton_choice  # noqa: E402
from kernelcast.runtime.triton_key import TunedKey  # noqa: E402
from kernelcast.runtime.triton_memory import Entry, TunedMemory  # noqa: E402
from kernelcast.triton import autotune  # noqa: E402

#: Of each block size, in milliseconds: 16 is declared first, 256 is the fastest.
LATENCY_MS = {16: 3.0, 32: 2.0, 64: 1.0, 128: 4.0, 256: 0.5}
BLOCKS = tuple(LATENCY_MS)


def latency(launch):
    return LATENCY_MS[launch["BLOCK"]]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home of the test's own, and no options of other tests."""
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path))
    monkeypatch.delenv("KERNELCAST_MODE", raising=False)
    monkeypatch.delenv("KERNELCAST_DISABLE", raising=False)
    kc.configure()
    yield tmp_path
    monkeypatch.undo()
    kc.configure()


class Tuned:
    """A kernel on the host with a tuner around it, and what was called."""

    def __init__(self, decorator, *, fn=host.add, blocks=BLOCKS, wrap=None, latency_ms=latency, **options):
        self.kernel = host.HostKernel(fn)
        self.bench = host.Bench(self.kernel, latency_ms)
        inner = self.kernel if wrap is None else wrap(self.kernel)
        options.setdefault("configs", host.configs(*blocks))
        options.setdefault("key", ["n"])
        self.tuner = decorator(do_bench=self.bench, **options)(inner)

    @property
    def timed(self):
        return [launch["BLOCK"] for launch in self.bench.timed]

    def add(self, n=100, offset=0):
        """Add two vectors with it, after ``offset`` elements that are not its own; check the result. Returns the block size."""
        x, y = torch.randn(offset + n)[offset:], torch.randn(offset + n)[offset:]
        out = torch.full((n,), float("nan"))
        self.tuner[(1,)](x, y, out, n)
        assert torch.equal(out, x + y)
        return self.tuner.best_config.kwargs["BLOCK"]


def entries(home):
    return sorted((home / "cache" / "triton").glob("??/*.json"))


def records(home):
    return [each for path in sorted((home / "store" / "journal").glob("*")) for each in read_journal(path)]


# --- as Triton's, with fewer timings ---


def test_all_configs_give_what_triton_chooses_and_computes():
    theirs, ours = Tuned(triton.autotune), Tuned(autotune, mode="tune")
    assert theirs.add() == ours.add() == 256
    assert theirs.timed == ours.timed == list(BLOCKS)
    (their_key,), (our_key,) = theirs.tuner.cache, ours.tuner.cache
    assert our_key[: len(their_key)] == their_key
    assert isinstance(ours.tuner, triton.runtime.autotuner.Autotuner)
    assert ours.tuner.base_fn is host.add


def test_the_first_of_the_ranking_and_the_config_declared_first_are_timed_and_a_remembered_key_launches_once():
    tuned = Tuned(autotune, top_k=2)
    assert tuned.add() == 256
    assert tuned.timed == [16, 256]  # the one furthest from the default
    assert len(tuned.kernel.launches) == 3
    assert tuned.add() == 256
    assert len(tuned.kernel.launches) == 4
    assert tuned.timed == [16, 256]
    assert tuned.tuner.ranked.by == "spread"
    tuned.tuner.cache.clear()
    assert tuned.add() == 256  # from the disk
    assert tuned.timed == [16, 256]


def test_a_perf_model_ranks_and_the_default_is_timed_beside_its_first():
    model = {16: 9.0, 32: 1.0, 64: 2.0, 128: 3.0, 256: 8.0}
    calls = []

    def estimate(**given):
        calls.append(given["BLOCK"])
        assert given["n"] in (100, 101, 102)
        return model[given["BLOCK"]]

    tuned = Tuned(autotune, top_k=2, prune_configs_by={"perf_model": estimate, "top_k": 5})
    assert tuned.add() == 64
    assert tuned.timed == [16, 32, 64]
    assert tuned.tuner.ranked.by == "perf_model"
    # The kernel's own top_k is the limit, as in Triton: what its model drops is not timed, the default no more than others.
    own = Tuned(autotune, top_k=3, prune_configs_by={"perf_model": estimate, "top_k": 2})
    assert own.add(n=101) == 64
    assert sorted(own.timed) == [32, 64]
    for mode in ("off", "cached"):
        still = Tuned(autotune, mode=mode, prune_configs_by={"perf_model": estimate, "top_k": 5})
        assert (still.add(n=102), still.timed) == (16, [])
    one = Tuned(autotune, prune_configs_by={"perf_model": estimate, "top_k": 1})
    assert (one.add(), one.timed) == (32, [])


def test_early_pruning_decides_what_there_is():
    def early(configs, named, **kwargs):
        assert named["n"] == 100
        return [config for config in configs if config.kwargs["BLOCK"] in (32, 64, 128)]

    tuned = Tuned(autotune, top_k=3, prune_configs_by={"early_config_prune": early})
    assert tuned.add() == 64
    assert sorted(tuned.timed) == [32, 64, 128]
    off = Tuned(autotune, mode="off", prune_configs_by={"early_config_prune": early})
    assert (off.add(), off.timed) == (32, [])


def test_ties_go_to_the_config_declared_first():
    times = {16: 1.005, 256: 1.0, 64: 2.0}
    tuned = Tuned(autotune, top_k=3, latency_ms=lambda launch: times.get(launch["BLOCK"], 5.0))
    assert tuned.add() == 16
    times[16] = 1.02
    assert tuned.add(n=101) == 256


@pytest.mark.parametrize("decorator", [triton.autotune, autotune])
def test_arguments_are_restored_and_the_result_is_that_of_one_launch(decorator):
    tuned = Tuned(decorator, fn=host.accumulate, restore_value=["out"])
    x, out = torch.randn(64), torch.randn(64)
    expected = out + x
    tuned.tuner[(1,)](x, out, 64)
    assert torch.equal(out, expected)
    assert len(tuned.kernel.launches) == len(tuned.timed) + 1
    tuned.tuner[(1,)](x, out, 64)
    assert torch.equal(out, expected + x)


@pytest.mark.parametrize("decorator", [triton.autotune, autotune])
def test_arguments_are_zeroed_before_each_timing_and_the_first_launch(decorator):
    tuned = Tuned(decorator, fn=host.accumulate, reset_to_zero=["out"])
    x, out = torch.randn(64), torch.randn(64)
    tuned.tuner[(1,)](x, out, 64)
    assert torch.equal(out, x)
    tuned.tuner[(1,)](x, out, 64)  # not zeroed where nothing is timed
    assert torch.equal(out, x + x)


@pytest.mark.parametrize("decorator", [triton.autotune, autotune])
def test_hooks_are_called_as_triton_calls_them(decorator):
    seen = []
    hooked = host.configs(16, 64)
    for config in hooked:
        config.pre_hook = lambda given: seen.append(("config", given["BLOCK"]))
    tuned = Tuned(
        decorator,
        configs=hooked,
        pre_hook=lambda given, reset_only=False: seen.append(("pre", reset_only)),
        post_hook=lambda given, exception: seen.append(("post", exception)),
    )
    assert tuned.add() == 64
    one = [("pre", False), ("post", None)]
    assert seen == [("config", 16), *one, ("config", 64), *one, ("pre", True), ("config", 64)]
    assert tuned.add() == 64
    assert seen[-1:] == [("config", 64)]
    assert len(seen) == 9


def test_heuristics_below_and_above():
    even = triton.heuristics({"BLOCK": lambda given: 2 * given["n"]})
    below = Tuned(
        autotune,
        configs=[triton.Config({}, num_warps=1), triton.Config({}, num_warps=2)],
        wrap=even,
        latency_ms=lambda launch: 1 / launch["num_warps"],
    )
    x, out = torch.randn(10), torch.empty(10)
    below.tuner[(1,)](x, x, out, 10)
    assert torch.equal(out, x + x)
    assert [(each["num_warps"], each["BLOCK"]) for each in below.kernel.launches] == [
        (1, 20),
        (2, 20),
        (2, 20),
    ]
    above = triton.heuristics({"n": lambda given: given["x"].numel()})(Tuned(autotune).tuner)
    above[(1,)](x, x, out)
    assert above.fn.best_config.kwargs["BLOCK"] == 256


def test_one_config_is_run_as_it_is():
    tuned = Tuned(autotune, configs=host.configs(32))
    assert (tuned.add(), tuned.timed) == (32, [])


# --- modes and switches ---


@pytest.mark.parametrize(("mode", "chosen", "timed"), [
    ("off", 16, 0), ("cached", 16, 0), ("predict", 16, 0), ("verify", 256, 3), ("tune", 256, 5),
])  # fmt: skip
def test_modes(mode, chosen, timed, monkeypatch):
    monkeypatch.setenv("KERNELCAST_MODE", mode)
    tuned = Tuned(autotune)
    assert (tuned.add(), len(tuned.timed)) == (chosen, timed)


def test_cached_takes_what_was_verified_and_tune_does_not():
    Tuned(autotune, top_k=2).add()
    cached = Tuned(autotune, mode="cached")
    assert (cached.add(), cached.timed) == (16, [])  # three were asked for, two had been measured
    assert (Tuned(autotune, mode="cached", top_k=2).add(), cached.timed) == (256, [])
    tuned = Tuned(autotune, mode="tune")
    assert (tuned.add(), tuned.timed) == (256, [32, 64, 128])  # only those that were not timed before
    assert (Tuned(autotune, mode="cached").add(), cached.timed) == (256, [])


def test_configure_forgets_what_was_chosen_under_other_options():
    tuned = Tuned(autotune)
    assert tuned.add() == 256
    kc.configure(mode="off")
    assert tuned.add() == 16
    kc.configure()
    assert tuned.add() == 256


def test_a_mode_that_changes_counts_from_the_next_call_on(monkeypatch):
    tuned, fixed = Tuned(autotune), Tuned(autotune, mode="verify")
    for mode, chosen in (("off", 16), ("verify", 256), ("off", 16)):
        monkeypatch.setenv("KERNELCAST_MODE", mode)
        assert (tuned.add(), fixed.add()) == (chosen, 256)


def test_the_kill_switch_makes_it_tritons(monkeypatch, home):
    monkeypatch.setenv("KERNELCAST_DISABLE", "1")
    theirs, ours = Tuned(triton.autotune), Tuned(autotune)
    assert theirs.add() == ours.add() == 256
    assert theirs.timed == ours.timed == list(BLOCKS)
    assert list(ours.tuner.cache) == list(theirs.tuner.cache)
    assert not (home / "cache").exists()
    assert not (home / "store").exists()


def test_nothing_is_timed_or_remembered_while_a_graph_is_captured(monkeypatch):
    tuned = Tuned(autotune)
    with monkeypatch.context() as patch:
        patch.setattr(triton_choice.Choice, "_capturing", lambda self: True)
        assert (tuned.add(), tuned.timed, len(tuned.kernel.launches)) == (16, [], 1)
    assert (tuned.add(), len(tuned.timed)) == (256, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 0},
        {"top_k": True},
        {"top_k": 1.5},
        {"mode": "fast"},
        {"round_key": {"m": triton.next_power_of_2}},
    ],
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(SettingsError):
        autotune(configs=host.configs(16), key=["n"], **wrong)


# --- the disk ---


def test_another_tuner_of_the_kernel_times_nothing(home):
    Tuned(autotune).add()
    (entry,) = entries(home)
    assert sorted(json.loads(entry.read_text())["entry"]["timings_ms"].values())[0] == [0.5, 0.49, 0.525]
    again = Tuned(autotune)
    assert (again.add(), again.timed, len(again.kernel.launches)) == (256, [], 1)


def test_a_new_config_times_one_and_a_longer_ranking_the_rest():
    Tuned(autotune, top_k=5).add()
    more = Tuned(autotune, top_k=6, configs=host.configs(*BLOCKS, 512), latency_ms=lambda launch: 0.1)
    assert (more.add(), more.timed) == (512, [512])


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b"[]", b'{"version": 99}', b"\xff" * 64, b'{"version": 1, "key": {}}']
)
def test_a_broken_entry_is_a_miss_and_a_warning(home, content):
    Tuned(autotune).add()
    (entry,) = entries(home)
    entry.write_bytes(content)
    again = Tuned(autotune)
    with pytest.warns(CacheWarning, match="broken and was ignored"):
        assert (again.add(), len(again.timed)) == (256, 3)
    assert (Tuned(autotune).add(), entries(home)) == (256, [entry])


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutations_of_an_entry_are_misses_and_warnings(tmp_path, count):
    memory = TunedMemory(tmp_path / "triton")
    key = TunedKey("triton.k", "abc", "{}", "device", ("2.13", "3.9"))
    entry = Entry("configs", "16", 3, {"16": (1.0, 0.9, 1.1), "32": ()})
    memory.put(key, entry)
    assert memory.get(key) == entry
    (path,) = sorted((tmp_path / "triton").glob("??/*.json"))
    whole, chance = path.read_bytes(), random.Random(0)
    for _ in range(count):
        place = chance.randrange(len(whole) - 1)
        bits = whole[:place] + bytes([whole[place] ^ (1 << chance.randrange(8))]) + whole[place + 1 :]
        path.write_bytes(chance.choice([whole[:place], bits, whole[:place] + whole[place + 1 :], bits[::-1]]))
        try:
            same = json.loads(path.read_bytes()) == json.loads(whole)  # such as a space less
        except ValueError:
            same = False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert memory.get(key) == (entry if same else None)
        assert [each.category for each in caught] == ([] if same else [CacheWarning])


def test_a_pipe_or_a_folder_in_the_place_of_an_entry_is_a_miss(home):
    for make in (os.mkfifo, os.mkdir):
        Tuned(autotune).add()
        (entry,) = entries(home)
        entry.unlink()
        make(entry)
        with pytest.warns(CacheWarning):
            assert Tuned(autotune).add() == 256
        entry.rmdir() if entry.is_dir() else entry.unlink()


def test_a_folder_that_cannot_be_written_is_a_warning(home):
    (home / "cache").write_text("no folder")
    tuned = Tuned(autotune)
    with pytest.warns(CacheWarning, match="cannot be (written|locked)"):
        assert (tuned.add(), len(tuned.timed)) == (256, 3)


# --- failures and records ---


def test_what_does_not_fit_is_passed_over_and_recorded(home):
    tuned = Tuned(autotune, top_k=3)

    def raising(launch):
        if launch["BLOCK"] in (16, 256, 64):
            raise host.out_of_resources()

    tuned.kernel.raising = raising
    assert tuned.add() == 32  # the first three do not fit, so the next ones are timed
    found = {each.candidate.parameters["BLOCK"]: each for each in records(home)}
    assert {block: each.outcome for block, each in found.items()} == {
        16: "out_of_resources", 256: "out_of_resources", 64: "out_of_resources", 32: "ok", 128: "ok",
    }  # fmt: skip
    assert "shared memory" in found[16].detail
    assert found[32].samples_us == pytest.approx((2000.0, 1960.0, 2100.0))


def test_where_no_config_fits_the_error_is_tritons():
    tuned = Tuned(autotune)

    def raising(launch):
        raise host.out_of_resources()

    tuned.kernel.raising = raising
    with pytest.raises(type(host.out_of_resources())):
        tuned.add()
    assert tuned.tuner.cache == {}


def test_a_remembered_config_that_no_longer_fits_is_forgotten_and_another_chosen(home):
    Tuned(autotune).add()
    again = Tuned(autotune)

    def raising(launch):
        if launch["BLOCK"] == 256:
            raise host.out_of_resources()

    again.kernel.raising = raising
    assert again.add() == 64
    assert json.loads(entries(home)[0].read_text())["entry"]["choice"].count("64")


def test_another_error_of_a_kernel_is_passed_on_and_recorded_as_a_crash(home):
    tuned = Tuned(autotune)

    def raising(launch):
        raise RuntimeError("an illegal access")

    tuned.kernel.raising = raising
    with pytest.raises(RuntimeError, match="an illegal access"):
        tuned.add()
    assert [(each.outcome, each.detail) for each in records(home)] == [
        ("crash", "RuntimeError: an illegal access")
    ]


def test_records_say_what_was_timed_and_how(home):
    Tuned(autotune).add()
    found = records(home)
    assert [each.candidate.parameters["BLOCK"] for each in found] == [16, 256, 64]
    (problem,) = {each.problem for each in found}
    assert problem.operation == "triton.triton_host.add"
    assert problem.dims == (("n", 100),)
    assert problem.dtype == "float32"
    assert problem["dtypes"] == "float32,float32,float32"
    assert {each.candidate.variant for each in found} == {"triton_add"}
    assert {each.protocol.name for each in found} == {"triton-autotune"}
    assert found[0].candidate.parameters == {"BLOCK": 16, "num_ctas": 1, "num_stages": 3, "num_warps": 4}


def test_who_is_stopped_in_the_middle_has_not_timed_in_vain(home):
    stopped = Tuned(autotune, mode="tune")

    def raising(launch):
        if launch["BLOCK"] == 128:
            raise KeyboardInterrupt

    stopped.kernel.raising = raising
    with pytest.raises(KeyboardInterrupt):
        stopped.add()
    assert [each.candidate.parameters["BLOCK"] for each in records(home)] == [16, 32, 64]
    assert (Tuned(autotune, mode="cached").add(), Tuned(autotune, mode="off").add()) == (16, 16)
    again = Tuned(autotune, mode="tune")
    assert (again.add(), again.timed) == (256, [128, 256])


def test_under_a_mistyped_mode_triton_tunes_alone(monkeypatch, home):
    tuned = Tuned(autotune)
    monkeypatch.setenv("KERNELCAST_MODE", "foo")
    with pytest.warns(
        dispatch.LaunchWarning, match=r"KERNELCAST_MODE is 'foo'; .* Triton alone tunes"
    ) as given:
        assert tuned.add() == 256
    assert (len(given), tuned.timed) == (1, [16, 32, 64, 128, 256])
    monkeypatch.delenv("KERNELCAST_MODE")
    assert tuned.add() == 256


def test_what_kernelcast_cannot_describe_triton_tunes_alone(monkeypatch, home):
    tuned = Tuned(autotune)

    def refuse(device):
        raise KernelcastError("no such device.")

    monkeypatch.setattr(dispatch, "selector_for", refuse)
    with pytest.warns(
        dispatch.LaunchWarning, match=r"no such device. Triton alone tunes triton.triton_host.add"
    ):
        assert tuned.add() == 256
    assert tuned.timed == list(BLOCKS)
    assert not (home / "cache").exists()


def test_a_store_that_cannot_be_written_costs_the_records_alone(home):
    (home / "store").write_text("no folder")
    tuned = Tuned(autotune)
    with pytest.warns(UserWarning, match="not kept"):
        assert tuned.add() == 256


# --- keys, threads, what was learned ---


def test_alignment_dtype_and_constants_are_part_of_the_key_and_values_are_not():
    tuned = Tuned(autotune)
    for call in ({}, {"offset": 1}, {"n": 101}):
        tuned.add(**call)
    assert len(tuned.tuner.cache) == len(tuned.timed) // 3 == 3
    x = torch.randn(100, dtype=torch.float64)
    tuned.tuner[(1,)](x, x, x.clone(), 100)
    assert len(tuned.tuner.cache) == 4
    timed = len(tuned.timed)
    for values in (torch.zeros(100), torch.full((100,), float("nan")), torch.full((100,), float("inf"))):
        tuned.tuner[(1,)](values, values, torch.empty(100), n=100)
    assert len(tuned.timed) == timed


@hypothesis.settings(max_examples=examples(20))
@hypothesis.given(
    st.lists(
        st.tuples(
            st.sampled_from([64, 65, 80]), st.booleans(), st.sampled_from(["normal", "zeros", "nan", "inf"])
        )
    )
)
def test_every_call_is_one_launch_beside_timings_and_values_never_count(calls):
    kc.configure(cache=False, store=False)
    tuned, chosen = Tuned(autotune, latency_ms=lambda launch: abs(launch["n"] - launch["BLOCK"]) + 1), {}
    for made, (n, aligned, values) in enumerate(calls, start=1):
        x = torch.randn(n + 4)[0 if aligned else 1 :][:n]
        x.mul_({"normal": 1, "zeros": 0, "nan": math.nan, "inf": math.inf}[values])
        before, out = x.clone(), torch.empty(n)
        tuned.tuner[(1,)](x, x, out, n)
        assert torch.equal(out.nan_to_num(nan=7.0), (before + before).nan_to_num(nan=7.0))
        assert torch.equal(x.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))
        assert len(tuned.kernel.launches) == len(tuned.timed) + made
        assert chosen.setdefault((n, aligned), tuned.tuner.best_config) is tuned.tuner.best_config
    assert len(tuned.tuner.cache) == len(chosen)
    assert len(tuned.timed) <= 4 * len(chosen)  # the first three, and the default


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_lengths_are_tuned_once_a_bucket(home, count):
    tuned = Tuned(autotune, fn=host.accumulate, round_key={"n": triton.next_power_of_2})
    lengths = [2 + (517 * step) % 1000 for step in range(count)]
    for n in lengths:
        x = torch.ones(n)
        tuned.tuner[(1,)](x, x, n)
    buckets = {(triton.next_power_of_2(n), n % 16 == 0) for n in lengths}
    assert len(tuned.tuner.cache) == len(entries(home)) == len(buckets) < 20
    assert len(tuned.kernel.launches) == count + len(tuned.timed)
    assert len(tuned.timed) <= 4 * len(buckets)
    # What is recorded is the length that was timed, not that of its bucket.
    assert {each.problem["n"] for each in records(home)} <= set(lengths)
    assert {each.problem["n"] for each in records(home)} - {triton.next_power_of_2(n) for n in lengths}
    again = Tuned(autotune, fn=host.accumulate, round_key={"n": triton.next_power_of_2})
    again.tuner[(1,)](x, x, 519)
    assert again.timed == []


def test_many_threads_on_a_cold_key_tune_once_and_choose_alike():
    tuned = Tuned(autotune)
    gate, chosen = threading.Barrier(8), []

    def work():
        gate.wait()
        chosen.append(tuned.add())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(chosen) == 8
    assert len(tuned.timed) == 3
    assert len(tuned.kernel.launches) == 8 + 3


def test_processes_on_a_cold_key_tune_once_and_choose_alike():
    context = multiprocessing.get_context("fork")
    answers, gate = context.Queue(), context.Barrier(4)

    def work():
        tuned = Tuned(autotune)
        gate.wait()
        answers.put((tuned.add(), len(tuned.timed)))

    processes = [context.Process(target=work) for _ in range(4)]
    for each in processes:
        each.start()
    found = sorted(answers.get(timeout=60) for _ in processes)
    for each in processes:
        each.join()
    assert found == [(256, 0), (256, 0), (256, 0), (256, 3)]


def test_what_won_on_the_nearest_keys_is_tried_first():
    def by_size(launch):
        return 1 + abs(launch["n"] - launch["BLOCK"])

    tuned = Tuned(autotune, top_k=1, latency_ms=by_size)
    for n in (33, 34, 36, 240, 250):
        tuned.tuner._mode = "tune"
        tuned.add(n)
    tuned.bench.timed.clear()
    tuned.tuner._mode = None
    assert tuned.add(35) == 32
    assert tuned.timed == [16, 32]
    assert tuned.tuner.ranked.by == "nearest"
    assert tuned.add(270) == 256


def test_a_listener_of_tritons_hears_of_each_tuning(monkeypatch):
    if not hasattr(triton.knobs.autotuning, "listener"):
        pytest.skip("this Triton has no listener")
    heard = []
    monkeypatch.setattr(triton.knobs.autotuning, "listener", lambda **told: heard.append(told))
    tuned = Tuned(autotune)
    tuned.add()
    tuned.add()
    (told,) = heard
    assert told["fn"] is tuned.kernel
    assert told["key"] == (100, "torch.float32", "torch.float32", "torch.float32")
    assert told["best_config"].kwargs == {"BLOCK": 256}
    assert {config.kwargs["BLOCK"]: ms[0] for config, ms in told["configs_timings"].items()} == {
        16: 3,
        256: 0.5,
        64: 1,
    }
    assert told["cache_hit"] is False
