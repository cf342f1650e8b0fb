"""``kernelcast.triton.perf_model`` behind Triton's own autotuner, and ``kernelcast.triton.record`` beside it."""

from __future__ import annotations

import math
import warnings

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton_host as host  # noqa: E402
from triton import knobs  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402

import kernelcast as kc  # noqa: E402
from kernelcast.costmodel import AnalyticModel, Prediction  # noqa: E402
from kernelcast.datasets.journal import read_journal  # noqa: E402
from kernelcast.errors import InvalidRecordError, UnknownNameError  # noqa: E402
from kernelcast.kernels import Candidate, CandidateTable, variant  # noqa: E402
from kernelcast.kernels.detect import detect  # noqa: E402
from kernelcast.runtime import ModelWarning, dispatch, triton_recording  # noqa: E402
from kernelcast.runtime.triton_autotune import autotune  # noqa: E402
from kernelcast.runtime.triton_perf import perf_model  # noqa: E402
from kernelcast.runtime.triton_recording import record  # noqa: E402

TILES = [(16, 16, 16), (32, 32, 16), (64, 64, 32), (128, 128, 32), (256, 64, 64)]
GEMM = {
    "dims": {"m": "M", "n": "N", "k": "K"},
    "parameters": {"BLOCK_M": "block_m", "BLOCK_N": "block_n", "BLOCK_K": "block_k"},
    "fixed": {"group_m": 8},
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path))
    monkeypatch.delenv("KERNELCAST_MODE", raising=False)
    monkeypatch.delenv("KERNELCAST_DISABLE", raising=False)
    kc.configure()
    yield tmp_path
    monkeypatch.undo()
    kc.configure()


def tile_configs(stages=3):
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=4, num_stages=stages)
        for m, n, k in TILES
    ]


def tuned_matmul(model, top_k=2):
    """Triton's own autotuner over a matmul on the host, the model behind it, and the benchmark."""
    kernel = host.HostKernel(host.matmul)
    bench = host.Bench(kernel, lambda launch: 1.0)
    decorated = triton.autotune(
        configs=tile_configs(),
        key=["M", "N", "K"],
        prune_configs_by={"perf_model": model, "top_k": top_k},
        do_bench=bench,
    )(kernel)
    return decorated, bench


def multiply(tuner, m=128, n=64, k=32):
    a, b, c = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    tuner[(1,)](a, b, c, m, n, k)
    assert torch.equal(c, a @ b)


def gemm_table(stages=3):
    return CandidateTable.of(
        Candidate.of("triton_tiled", {
            "block_m": m, "block_n": n, "block_k": k, "group_m": 8, "num_warps": 4, "num_stages": stages,
        })
        for m, n, k in TILES
    )  # fmt: skip


# --- an operation of the catalogue ---


def test_the_roofline_ranks_where_there_is_no_model(monkeypatch):
    # Nothing is legal on this machine's CPU: rules of the hardware are looked at in the next test.
    everything = variant("gemm", "triton_tiled")
    monkeypatch.setattr(type(everything), "legal", lambda self, problem, device, block: [True] * block.length)
    tuner, bench = tuned_matmul(perf_model("gemm", **GEMM))
    multiply(tuner)
    problem = kc.problem("gemm", m=128, n=64, k=32, dtype="float32", threads=torch.get_num_threads())
    order = AnalyticModel().predict(problem, gemm_table(), detect("cpu")).order()
    expected = [TILES[place] for place in order[:2]]
    assert [(each["BLOCK_M"], each["BLOCK_N"], each["BLOCK_K"]) for each in bench.timed] == expected
    assert expected != TILES[:2]


class Fitted:
    """A model that prefers large tiles, as loaded from a registry; counts its predictions."""

    def __init__(self, covered=True):
        self.facts, self.rows, self.problems = {"version": "0001-00000000"}, [], []
        self.covered = covered

    def predict(self, problem, table, device):
        import numpy as np

        self.rows.append(len(table))
        self.problems.append(problem)
        latency = [-candidate.parameters["block_m"] for candidate in table]
        covered = np.full(len(table), self.covered)
        return Prediction(np.log(np.exp(np.array(latency) / 100.0)), np.full(len(table), 0.1), covered)


@pytest.fixture
def fitted(monkeypatch):
    """The model that stands for gemm on this CPU."""
    found = Fitted()
    selector = dispatch.selector_for(torch.device("cpu"))
    selector.rankers._models["gemm"] = (found, "")
    everything = variant("gemm", "triton_tiled")
    monkeypatch.setattr(type(everything), "legal", lambda self, problem, device, block: [True] * block.length)
    return found


def test_a_model_ranks_all_configs_of_a_key_at_once_and_answers_from_memory(fitted):
    tuner, bench = tuned_matmul(perf_model("gemm", configs=tile_configs(), **GEMM))
    multiply(tuner)
    assert fitted.rows == [5]
    assert [each["BLOCK_M"] for each in bench.timed] == [256, 128]
    assert fitted.problems[0].dims == (("m", 128), ("n", 64), ("k", 32))
    multiply(tuner)
    multiply(tuner, m=64)
    assert fitted.rows == [5, 5]


def test_configs_that_were_not_named_are_learned_with_the_first_key(fitted):
    tuner, bench = tuned_matmul(perf_model("gemm", **GEMM))
    multiply(tuner)
    multiply(tuner, m=64)
    assert fitted.rows == [1, 2, 3, 4, 5, 5]
    assert [each["BLOCK_M"] for each in bench.timed] == [256, 128] * 2


def test_values_may_be_numbers_and_functions_and_the_dtype_may_be_named(fitted):
    model = perf_model(
        "gemm",
        dims={"m": lambda given: given["a"].shape[0], "n": 64, "k": "K"},
        options={"layout": lambda given: "nt"},
        dtype="float16",
        parameters=GEMM["parameters"],
        fixed={"group_m": 8, "num_warps": 8, "num_stages": 2},
    )
    given = {"a": torch.randn(128, 32), "K": 32, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "num_warps": 4}
    assert model(**given) == pytest.approx(math.exp(-0.16))
    (problem,) = fitted.problems
    assert (problem.dims, problem.dtype, problem["layout"]) == (
        (("m", 128), ("n", 64), ("k", 32)),
        "float16",
        "nt",
    )


def test_what_the_model_does_not_know_comes_after_and_what_a_rule_refuses_last(fitted, monkeypatch):
    everything = variant("gemm", "triton_tiled")
    monkeypatch.setattr(
        type(everything), "legal", lambda self, problem, device, block: block.columns["block_m"] < 200
    )
    model = perf_model("gemm", configs=tile_configs(), **GEMM)
    given = {
        "a": torch.zeros(8, 8),
        "M": 8,
        "N": 8,
        "K": 8,
        "BLOCK_N": 64,
        "BLOCK_K": 64,
        "num_warps": 4,
        "num_stages": 3,
    }
    assert model(**given, BLOCK_M=256) == math.inf
    fitted.covered = False
    assert 1e20 < model(**given, BLOCK_M=64) < math.inf


def test_a_fault_is_one_warning_and_the_order_as_declared():
    tuner, bench = tuned_matmul(perf_model("gemm", **{**GEMM, "dims": {"m": "M", "n": "N", "k": "no_such"}}))
    with pytest.warns(ModelWarning, match="no_such"):
        multiply(tuner)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        multiply(tuner, m=64)
    assert [each["BLOCK_M"] for each in bench.timed] == [16, 32] * 2


def test_the_kill_switch_keeps_the_order_as_declared(monkeypatch, fitted):
    monkeypatch.setenv("KERNELCAST_DISABLE", "1")
    tuner, bench = tuned_matmul(perf_model("gemm", **GEMM))
    multiply(tuner)
    assert [each["BLOCK_M"] for each in bench.timed] == [16, 32]
    assert fitted.rows == []


@pytest.mark.parametrize(("change", "error", "said"), [
    ({"dims": {"rows": "M"}}, UnknownNameError, "rows"),
    ({"options": {"colour": 1}}, UnknownNameError, "colour"),
    ({"parameters": {"BLOCK_M": "blok_m"}}, UnknownNameError, "block_m"),
    ({"fixed": {}}, InvalidRecordError, "group_m"),
    ({"variant": "no_such"}, UnknownNameError, "no_such"),
])  # fmt: skip
def test_wrong_names_are_refused_at_once(change, error, said):
    with pytest.raises(error, match=said):
        perf_model("gemm", **{**GEMM, **change})


# --- recording ---


def records(folder):
    return [each for path in sorted((folder / "journal").glob("*")) for each in read_journal(path)]


def tuned_add(blocks=(16, 32, 64), decorator=triton.autotune, **options):
    kernel = host.HostKernel(host.add)
    bench = host.Bench(kernel, lambda launch: 1 / launch["BLOCK"])
    return decorator(configs=host.configs(*blocks), key=["n"], do_bench=bench, **options)(kernel), bench


def run_add(tuner, n=100):
    x, out = torch.randn(n), torch.empty(n)
    tuner[(1,)](x, x, out, n)
    assert torch.equal(out, x + x)
    return tuner.best_config.kwargs["BLOCK"]


WAYS = ["listener", "bench"] if hasattr(knobs.autotuning, "listener") else ["bench"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Both ways of watching, whatever this Triton has."""
    if request.param == "bench":
        monkeypatch.setattr(triton_recording, "_has_listener", lambda: False)
    return request.param


def test_every_timing_of_an_autotuned_kernel_is_kept_while_recording(home, way):
    tuner, bench = tuned_add()
    with record(workload="mine") as recording:
        assert run_add(tuner) == 64
        run_add(tuner)
        assert recording.count == 3
    run_add(tuner, n=101)
    assert len(bench.timed) == 6
    assert len(tuner.fn.launches) == 6 + 3  # as without recording
    found = records(home / "store")
    assert [(each.candidate.parameters["BLOCK"], each.latency_us) for each in found] == [
        (16, pytest.approx(62.5)), (32, pytest.approx(31.25)), (64, pytest.approx(15.625)),
    ]  # fmt: skip
    assert {each.problem for each in found} == {found[0].problem}
    assert found[0].problem.operation == "triton.triton_host.add"
    assert found[0].problem.dims == (("n", 100),)
    assert (found[0].workload, found[0].candidate.variant) == ("mine", "triton_add")
    assert Autotuner._bench is triton_recording._unwatched_bench


def test_a_recorded_timing_is_the_record_that_a_tuned_kernel_would_send(home, way):
    tuner, _ = tuned_add()
    with record():
        run_add(tuner)
    ours, _ = tuned_add(decorator=autotune, mode="tune")
    with record() as recording:
        run_add(ours)
    assert recording.count == 0  # it records itself
    theirs, own = records(home / "store")[:3], records(home / "store")[3:]
    assert [each.id for each in theirs] == [each.id for each in own]
    assert [each.samples_us for each in theirs] == [each.samples_us for each in own]


def test_a_listener_that_is_there_keeps_being_called(monkeypatch, home):
    if WAYS == ["bench"]:
        pytest.skip("this Triton has no listener")
    heard, over = [], []

    def before(**told):
        heard.append(told)

    monkeypatch.setattr(knobs.autotuning, "listener", before)
    tuner, _ = tuned_add()
    recording = record()
    ours = knobs.autotuning.listener

    def later(**told):
        over.append(told)
        ours(**told)

    knobs.autotuning.listener = later
    run_add(tuner)
    assert (len(heard), len(over), recording.count) == (1, 1, 3)
    recording.stop()
    recording.stop()
    assert knobs.autotuning.listener is later  # put over ours since: left alone
    with record() as again:
        run_add(tuner, n=101)
    assert (len(heard), len(over), again.count, recording.count) == (2, 2, 3, 3)
    assert knobs.autotuning.listener is later
    knobs.autotuning.listener = before
    with record():
        pass
    assert knobs.autotuning.listener is before


def test_recordings_may_overlap_and_have_stores_of_their_own(home, way, tmp_path):
    tuner, _ = tuned_add()
    with record(tmp_path / "one") as one:
        run_add(tuner)
        with record(tmp_path / "two") as two:
            run_add(tuner, n=50)
    assert (one.count, two.count) == (6, 3)
    assert len(records(tmp_path / "one")) == 6
    assert len(records(tmp_path / "two")) == 3
    assert not (home / "store").exists()


def test_failures_are_recorded_as_such(home, way):
    tuner, _ = tuned_add()

    def raising(launch):
        if launch["BLOCK"] == 32:
            raise host.out_of_resources()

    tuner.fn.raising = raising
    with record():
        run_add(tuner)
    assert [each.outcome for each in records(home / "store")] == ["ok", "out_of_resources", "ok"]


def test_a_fault_of_recording_costs_the_records_alone(home, way, monkeypatch):
    tuner, _ = tuned_add()
    monkeypatch.setattr(triton_recording, "candidates_of", lambda *args: 1 / 0)
    with record() as recording, pytest.warns(UserWarning, match="ZeroDivisionError"):
        assert run_add(tuner) == 64
    assert recording.count == 0


def test_the_kill_switch_keeps_nothing(home, way, monkeypatch):
    monkeypatch.setenv("KERNELCAST_DISABLE", "1")
    tuner, _ = tuned_add()
    with record() as recording:
        assert run_add(tuner) == 64
    assert recording.count == 0
    assert not (home / "store").exists()
