"""torch.compile's choices pruned by a ranking, and its timings recorded: the hooks by themselves, then real compilations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import kernelcast.inductor
from kernelcast.costmodel import Prediction
from kernelcast.errors import ModelError, SettingsError
from kernelcast.kernels import Candidate
from kernelcast.kernels.devices import device
from kernelcast.runtime.inductor import InductorWarning, Session

A100 = device("a100")


class Node:
    """A tensor of a graph, as Inductor's nodes say what they are."""

    def __init__(self, *size):
        self.size = size

    def get_size(self):
        return list(self.size)

    def get_stride(self):
        return list(torch.empty(self.size, device="meta").stride())

    def get_dtype(self):
        return torch.float16


class Layout:
    dtype, device = torch.float16, torch.device("cuda:0")


class Choice:
    """A choice, as Inductor's callers say what they are."""

    layout, description = Layout(), ""

    def __init__(self, name, identity, nodes=None):
        self.name, self.identity = name, identity
        self.input_nodes = nodes or [Node(48, 64), Node(64, 80)]

    def autoheuristic_id(self):
        if self.identity is None:
            raise RuntimeError("no identity today")
        return self.identity

    def info_dict(self):
        return {}


def triton(block_m, *, number=0, template="mm"):
    identity = f"type=triton_BLOCK-M={block_m}_BLOCK-K=32_BLOCK-N=32_numstages=3_numwarps=4"
    return Choice(f"triton_{template}_{number or block_m}", identity)


class Model:
    """Ranks by a table of latencies; what is not in it is not covered."""

    def __init__(self, latency_us):
        self.latency_us = latency_us
        self.seen = []

    def predict(self, problem, table, device):
        self.seen.append(problem.operation)
        if self.latency_us is None:
            raise ModelError("other features")
        values = [self.latency_us.get(_short(each)) for each in table]
        covered = np.array([value is not None for value in values])
        return Prediction(np.log([value or 1.0 for value in values]), np.full(len(values), 0.1), covered)


def _short(candidate):
    return candidate.parameters.get("block_m", candidate.variant)


class Selects:
    """What a session asks of a selector."""

    def __init__(self, models, *, mode="verify"):
        self.mode, self.device, self.rankers = mode, A100, self
        self.models = models

    def model(self, operation):
        return self.models.get(operation), f"asked for {operation}"


LATENCY_US = {"vendor": 50.0, 16: 40.0, 32: 30.0, 64: 10.0, 128: 20.0}


def session(selects=None, *, count=None, **options):
    """A session in force, without Inductor."""
    values = {"top_k": 2, "record": False, "mode": None, "without_model": "all"} | options
    made = Session(
        selector=selects or Selects({"gemm": Model(LATENCY_US)}), benchmarks=count or iter, **values
    )
    made.active = True
    return made


def some_choices():
    return [Choice("mm", "extern_mm"), triton(16), triton(32), triton(64), triton(128)]


def names(choices):
    return [choice.name for choice in choices]


# --- pruning ---


def test_the_first_of_the_ranking_and_the_library_are_left_in_inductors_order():
    made = session()
    choices = some_choices()
    assert names(made.prune(choices)) == ["mm", "triton_mm_64", "triton_mm_128"]
    assert len(choices) == 5
    [pruning] = made.prunings
    assert (pruning.choices, pruning.kept) == (5, ("mm", "triton_mm_64", "triton_mm_128"))
    assert (pruning.product, str(pruning.problem)) == ("mm", "gemm(m=48, n=80, k=64, float16, layout=nn)")
    assert pruning.reason == "Asked for gemm."


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        ("off", 5),
        ("cached", 2),
        ("predict", 2),
        ("verify", 3),
        ("tune", 5),
    ],
)
def test_each_mode_leaves_so_many(mode, kept):
    assert len(session(mode=mode).prune(some_choices())) == kept
    # Without a mode of its own the session has that of the selector.
    assert len(session(Selects({"gemm": Model(LATENCY_US)}, mode=mode)).prune(some_choices())) == kept


def test_the_library_is_one_of_the_first_where_it_is_predicted_so():
    made = session(Selects({"gemm": Model({**LATENCY_US, "vendor": 5.0})}))
    assert names(made.prune(some_choices())) == ["mm", "triton_mm_64"]


def test_of_equal_predictions_the_default_comes_first_then_inductors_order():
    made = session(Selects({"gemm": Model(dict.fromkeys(LATENCY_US, 7.0))}))
    last = [*some_choices()[1:], Choice("mm", "extern_mm")]
    assert names(made.prune(last)) == ["triton_mm_16", "mm"]


def test_what_is_not_known_is_never_removed():
    unknown = [
        Choice("cutlass_1f2e", "unsupported_choice"),
        Choice("my_matmul", "extern_my_matmul"),
        # Known by name, and not to the model.
        triton(256),
        Choice("decompose_k_mm_4_split_1", "subgraph_decompose_k_mm_4_split_1"),
    ]
    left = session().prune([*some_choices(), *unknown])
    assert names(left) == ["mm", "triton_mm_64", "triton_mm_128", *names(unknown)]


def test_choices_of_another_operation_and_a_single_one_are_not_touched():
    made = session()
    convolution = [Choice("convolution", "extern_convolution"), triton(64, template="convolution2d")]
    for choices in (convolution, some_choices()[:1], []):
        assert made.prune(choices) is choices
    assert not made.prunings


def test_a_bias_has_a_model_of_its_own_or_that_of_the_product():
    nodes = [Node(80), Node(48, 64), Node(64, 80)]
    choices = [Choice("addmm", "extern_addmm", nodes), *some_choices()[1:]]
    for each in choices:
        each.input_nodes = nodes
    product = Model(LATENCY_US)
    assert len(session(Selects({"gemm": product})).prune(choices)) == 3
    assert product.seen == ["gemm"]
    own = Model({**LATENCY_US, 16: 1.0})
    left = session(Selects({"gemm": product, "addmm": own}), top_k=1).prune(choices)
    assert names(left) == ["addmm", "triton_mm_16"]
    assert own.seen == ["addmm"]


@pytest.mark.parametrize("model", [None, Model(None), Model({})], ids=["absent", "refuses", "covers none"])
def test_without_a_model_that_knows_them_all_are_timed_with_one_warning(model):
    made = session(Selects({"gemm": model}))
    with pytest.warns(InductorWarning, match="no model of gemm for a100-sxm4-80gb"):
        assert len(made.prune(some_choices())) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(made.prune(some_choices())) == 5
    assert len(made.prunings) == 2


def test_the_roofline_ranks_where_it_is_asked_to():
    left = session(Selects({}), without_model="roofline", top_k=1).prune(some_choices())
    assert len(left) in (1, 2)
    assert left[0].name == "mm"


def test_a_failure_leaves_the_choices_and_says_so_once():
    made = session()
    choices = [Choice("mm", None), triton(16)]
    with pytest.warns(InductorWarning, match="no identity today.*Inductor goes on"):
        assert made.prune(choices) is choices
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made.prune(choices) is choices


def test_the_kill_switch_and_a_session_that_ended_do_nothing(monkeypatch, tmp_path):
    made = session(record=tmp_path, count=lambda: 1)
    monkeypatch.setenv("KERNELCAST_DISABLE", "1")
    choices = some_choices()
    assert made.prune(choices) is choices
    made.save({choices[0]: 0.01}, "mm", [], choices)
    monkeypatch.delenv("KERNELCAST_DISABLE")
    made.active = False
    assert made.prune(choices) is choices
    made.save({choices[0]: 0.01}, "mm", [], choices)
    assert made.recorded == 0
    assert not list(tmp_path.iterdir())


# --- recording ---


def records(folder):
    lines = [line for path in folder.glob("journal/*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_timings_become_measurements(tmp_path):
    counts = iter([1, 2, 2])
    made = session(record=tmp_path, count=lambda: next(counts))
    mm, first, second, *_ = choices = some_choices()
    foreign = Choice("cutlass_1f2e", "unsupported_choice")
    timings = {mm: 0.05, first: 0.04, second: float("inf"), foreign: 0.01}
    made.save(timings, "mm", mm.input_nodes, choices, None, {})
    assert made.recorded == 3
    found = {Candidate.of(**each["candidate"]).variant: each for each in records(tmp_path)}
    vendor = found["vendor"]
    assert vendor["samples_us"] == [pytest.approx(50.0)]
    assert (vendor["workload"], vendor["environment"]["source"]) == ("inductor", "inductor")
    assert vendor["protocol"]["name"] == "inductor-min"
    assert vendor["device_fingerprint"] == A100.fingerprint
    assert vendor["problem"]["dims"] == {"m": 48, "n": 80, "k": 64}
    outcomes = sorted((each["outcome"], tuple(each["samples_us"])) for each in records(tmp_path))
    assert outcomes == [
        ("ok", (pytest.approx(40.0),)),
        ("ok", (pytest.approx(50.0),)),
        ("out_of_resources", ()),
    ]
    assert (tmp_path / "devices" / f"{A100.fingerprint}.json").exists()
    made.save({mm: 0.06}, "mm", mm.input_nodes, choices)
    assert made.recorded == 4
    # Inductor has timed nothing since: these come from its cache.
    made.save({mm: 0.06}, "mm", mm.input_nodes, choices)
    assert made.recorded == 4
    made.close()


def test_two_choices_of_one_candidate_are_samples_of_one_record(tmp_path):
    made = session(record=tmp_path, count=lambda: 1)
    twins = [triton(64, number=1), triton(64, number=2)]
    made.save(dict(zip(twins, (0.03, 0.02), strict=True)), "mm", [], twins)
    [record] = records(tmp_path)
    assert record["samples_us"] == [pytest.approx(30.0), pytest.approx(20.0)]


def test_a_store_that_cannot_be_written_costs_the_records_alone(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    made = session(record=blocked, count=lambda: 1)
    with pytest.warns(InductorWarning, match="could not be recorded"):
        made.save({some_choices()[0]: 0.01}, "mm", [], [])
    assert made.recorded == 0


def test_in_mode_off_nothing_is_recorded(tmp_path):
    made = session(record=tmp_path, count=lambda: 1, mode="off")
    made.save({some_choices()[0]: 0.01}, "mm", [], [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options", [{"top_k": 0}, {"top_k": True}, {"mode": "fast"}, {"without_model": "guess"}]
)
def test_an_option_that_cannot_be_used_is_refused(options):
    with pytest.raises(SettingsError):
        kernelcast.inductor.enable(**options)
    assert kernelcast.inductor.in_force() is None


@pytest.mark.slow
def test_a_model_of_what_was_recorded_prunes(tmp_path):
    """From timings to records, to a model, to pruning; also of a choice that the catalogue does not have."""
    from kernelcast.costmodel import RankingModel
    from kernelcast.datasets import Store
    from kernelcast.training.data import load_problems

    split = "decompose_k_mm_4_split_1"

    def choices_of(m, n, k):
        found = [*some_choices(), Choice(split, f"subgraph_{split}")]
        for each in found:
            each.input_nodes = [Node(m, k), Node(k, n)]
        return found

    made = session(record=tmp_path, count=iter(range(1, 1000)).__next__)
    sizes = [(m, n, k) for m in (16, 64, 256, 1024) for n in (64, 256, 1024) for k in (128, 512, 2048)]
    for m, n, k in sizes:
        choices = choices_of(m, n, k)
        # The tile as high as C is the best, up to 128; splitting a long k is better still.
        height = min(m, 128)
        heights = [abs(np.log2(each / height)) for each in (16, 32, 64, 128)]
        slowdowns = [3.0, *(1 + 0.5 * np.array(heights)), 0.5 if k == 2048 else 4.0]
        made.save({each: 0.01 * by for each, by in zip(choices, slowdowns, strict=True)}, "mm", [], choices)
    assert made.recorded == 6 * len(sizes)
    made.close()
    problems = load_problems(Store(tmp_path), "gemm", device=A100)
    model = RankingModel.fit(problems)
    pruning = session(Selects({"gemm": model}), top_k=1)
    assert names(pruning.prune(choices_of(64, 256, 512))) == ["mm", "triton_mm_64"]
    assert names(pruning.prune(choices_of(1024, 1024, 256))) == ["mm", "triton_mm_128"]
    assert names(pruning.prune(choices_of(64, 128, 2048))) == ["mm", split]


# --- Inductor itself, in processes of its own ---

PRELUDE = """
import json, sys, warnings
import torch
from torch._inductor import config, ir, select_algorithm
from torch._inductor.select_algorithm import ExternKernelCaller
import kernelcast.inductor as inductor
sys.path.insert(0, {tests!r})
from test_inductor import LATENCY_US, Model, Selects, names
torch.manual_seed(0)
torch.set_num_threads(1)
cache = select_algorithm.get_algorithm_selector_cache()
hooks = lambda: (list(cache.preprocessing_fns), list(cache.feedback_saver_fns))
shown = lambda **facts: print(json.dumps(facts))
"""

#: Choices such as Inductor has on a GPU, added to those that it has here: they are timed, and compute the library's result.
FAKE_TRITON = """
timed = []

class FakeTriton(ir.ChoiceCaller):
    def __init__(self, block_m, of):
        super().__init__(f"triton_bmm_{{block_m}}", of.input_nodes, of.layout, "")
        self.block_m, self.of = block_m, of

    def autoheuristic_id(self):
        return f"type=triton_BLOCK-M={{self.block_m}}_BLOCK-K=32_BLOCK-N=32_numstages=3_numwarps=4"

    def hash_key(self):
        return self.name

    def benchmark(self, *args, out):
        timed.append(self.block_m)
        return self.block_m / 1000

    def output_node(self):
        return self.of.output_node()

def like_a_gpu(choices):
    of = choices[0]
    return [*choices, *(FakeTriton(block_m, of) for block_m in (16, 32, 64, 128))] if of.name == "bmm" else choices

select_algorithm.add_preprocessing_fn(like_a_gpu)
a, b = torch.randn(3, 24, 16), torch.randn(3, 16, 40)

def compiled(function=torch.bmm, *inputs, **options):
    torch._dynamo.reset()
    timed.clear()
    with config.patch(max_autotune_gemm=True, max_autotune_gemm_backends="ATEN", force_disable_caches=True):
        return torch.compile(function, **options)(*(inputs or (a, b)))
"""


def in_process(tmp_path, code, *, prelude=PRELUDE + FAKE_TRITON):
    """What the code printed, each line as JSON."""
    text = prelude.format(tests=str(Path(__file__).parent)) + textwrap.dedent(code)
    environment = {
        **os.environ,
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "KERNELCAST_HOME": str(tmp_path / "home"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONWARNINGS": "ignore",
        # Inductor compiles and loads a file for every kind of vector unit that the CPU names, to see whether it works.
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_fewer_choices_are_timed_and_the_result_is_the_same(tmp_path):
    """A real compilation; and disable() leaves Inductor as it was."""
    before, first, during, after = in_process(
        tmp_path,
        """
        own = hooks()
        expected = torch.bmm(a, b)
        out = compiled()
        shown(timed=sorted(set(timed)), equal=torch.equal(out, expected))
        selects = Selects({"batched_gemm": Model(LATENCY_US)})
        with inductor.enable(top_k=2, selector=selects, mode="predict") as session:
            out = compiled()
            shown(timed=sorted(set(timed)), kept=session.prunings[-1].kept)
            with inductor.enable(top_k=2, selector=selects, record=True) as inner:
                assert inductor.in_force() is inner
                # The shapes are symbols here, and have the values of this call.
                out = compiled(torch.bmm, a, b, dynamic=True)
                shown(
                    timed=sorted(set(timed)), equal=torch.equal(out, expected), kept=inner.prunings[-1].kept,
                    problem=str(inner.prunings[-1].problem), recorded=inner.recorded, outer=len(session.prunings),
                )
            assert inductor.in_force() is session
            assert [len(each) for each in hooks()] == [len(each) + 1 for each in own]
        assert hooks() == own
        inductor.enable(selector=selects)
        inductor.disable()
        inductor.disable()
        assert hooks() == own and inductor.in_force() is None
        out = compiled()
        shown(timed=sorted(set(timed)), equal=torch.equal(out, expected))
        """,
    )
    assert before == {"timed": [16, 32, 64, 128], "equal": True}
    assert first["timed"] == [64]
    assert first["kept"] == ["bmm", "triton_bmm_64"]
    assert (during["timed"], during["equal"]) == ([64, 128], True)
    assert during["kept"] == ["bmm", "triton_bmm_64", "triton_bmm_128"]
    assert "batch=3, m=24, n=40, k=16, float32" in during["problem"]
    assert (during["recorded"], during["outer"]) == (3, 1)
    assert after == before
    found = {Candidate.of(**each["candidate"]).variant for each in records(tmp_path / "home" / "store")}
    assert found == {"vendor", "triton_tiled"}


@pytest.mark.slow
def test_what_fails_in_a_hook_does_not_end_a_compilation(tmp_path):
    told, missing = in_process(
        tmp_path,
        """
        class Broken(Selects):
            def model(self, operation):
                raise RuntimeError("broken model")

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with inductor.enable(selector=Broken({}), record="/dev/null/store"):
                out = compiled()
        said = [str(each.message) for each in caught if each.category is inductor.InductorWarning]
        shown(timed=len(set(timed)), equal=torch.equal(out, torch.bmm(a, b)), said=said)

        # A torch that lacks a hook.
        del select_algorithm.add_preprocessing_fn
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with inductor.enable(selector=Selects({"batched_gemm": Model(LATENCY_US)}), record=False):
                out = compiled()
        said = [str(each.message) for each in caught if each.category is inductor.InductorWarning]
        shown(timed=len(set(timed)), equal=torch.equal(out, torch.bmm(a, b)), said=said)
        """,
    )
    assert (told["timed"], told["equal"]) == (4, True)
    assert len(told["said"]) == 2
    assert "broken model" in told["said"][0]
    assert "could not be recorded" in told["said"][1]
    assert (missing["timed"], missing["equal"]) == (4, True)
    assert "has no add_preprocessing_fn, so its choices are not pruned" in missing["said"][0]


#: Inductor makes its Triton choices for a CPU as for a GPU, and asks a driver what to compile for. None can be compiled here.
NO_GPU = """
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class NoGpu:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 80, 32))
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
    get_current_device = staticmethod(lambda: 0)

driver.set_active(NoGpu())
"""


@pytest.mark.slow
def test_inductors_own_triton_choices(tmp_path):
    """Every choice of its templates is known, and those that are left are the only ones that it tries to time."""
    found = in_process(
        tmp_path,
        """
        import logging
        from kernelcast.runtime.inductor_choices import describe

        logging.disable(logging.CRITICAL)
        seen, timed = [], []
        def look(choices):
            seen[:] = [str(each) for each in describe(choices).candidates]
            return choices
        select_algorithm.add_preprocessing_fn(look)
        select_algorithm.add_feedback_saver(lambda timings, *_: timed.append(len(timings)))
        a, b = torch.randn(2, 64, 96), torch.randn(2, 96, 128)
        model = Model({"vendor": 9.0, 16: 5.0, 32: 1.0, 64: 2.0})
        selects = Selects({"gemm": model, "batched_gemm": model})
        calls = {"mm": (a[0], b[0]), "addmm": (torch.randn(128), a[0], b[0]), "bmm": (a, b)}
        for name, inputs in calls.items():
            torch._dynamo.reset()
            patches = dict(max_autotune_gemm=True, max_autotune_gemm_backends="ATEN,TRITON", cpu_backend="triton")
            with config.patch(force_disable_caches=True, **patches), inductor.enable(1, False, selector=selects) as session:
                out = torch.compile(getattr(torch, name))(*inputs)
            [pruning] = session.prunings
            shown(
                product=pruning.product, problem=str(pruning.problem), choices=pruning.choices, kept=len(pruning.kept),
                timed=timed.pop(), known=seen, equal=torch.allclose(out, getattr(torch, name)(*inputs), atol=1e-4),
            )
        """,
        prelude=PRELUDE + NO_GPU,
    )
    assert [each["product"] for each in found] == ["mm", "addmm", "bmm"]
    for each in found:
        assert each["equal"]
        assert "m=64, n=128, k=96, float32" in each["problem"]
        assert each["choices"] >= 15
        assert (each["kept"], each["timed"]) == (2, 2)
        assert each["known"][0] == "vendor"
        assert all(name.startswith("triton_tiled(") for name in each["known"][1:])
        assert len(set(each["known"])) == each["choices"]


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["sh", "-c", "command -v g++"], capture_output=True).returncode != 0,
    reason="Inductor's C++ template needs a compiler",
)
def test_the_choices_that_a_cpu_has(tmp_path):
    """Inductor's own two: the library's call and its C++ template, which a model may leave out once it knows it."""
    first, second, third = in_process(
        tmp_path,
        """
        timed = []
        def seen(timings, *_):
            timed.append(sorted(choice.name.split("_")[0] for choice in timings))
        select_algorithm.add_feedback_saver(seen)
        a, b = torch.randn(2, 32, 32), torch.randn(2, 32, 32)

        def compiled():
            torch._dynamo.reset()
            timed.clear()
            patches = dict(max_autotune_gemm=True, max_autotune_gemm_backends="ATEN,CPP", fx_graph_cache=False)
            # Compiling Inductor's headers ahead takes longer than compiling with them, for two files.
            with config.patch(cpp_cache_precompile_headers=False, **patches):
                return torch.compile(torch.bmm)(a, b)

        # No model: all are timed, and recorded.
        with inductor.enable() as session:
            out = compiled()
            shown(timed=timed, equal=torch.allclose(out, torch.bmm(a, b), atol=1e-4), recorded=session.recorded)
            # Again: Inductor has the timings in its cache, and they are not recorded as new ones.
            out = compiled()
            shown(timed=timed, recorded=session.recorded)
        knows = Selects({"batched_gemm": Model({"vendor": 5.0, "inductor_cpp": 9.0})}, mode="predict")
        with inductor.enable(selector=knows, record=False) as session:
            out = compiled()
            shown(timed=timed, equal=torch.allclose(out, torch.bmm(a, b), atol=1e-4), kept=session.prunings[-1].kept)
        """,
        prelude=PRELUDE,
    )
    assert first["equal"]
    assert first["timed"] == [["bmm", "cpp"]]
    assert first["recorded"] == 2
    assert second == {"timed": [["bmm", "cpp"]], "recorded": 2}
    # A single choice is not timed at all.
    assert third == {"timed": [], "equal": True, "kept": ["bmm"]}
    found = {Candidate.of(**each["candidate"]).variant for each in records(tmp_path / "home" / "store")}
    assert found == {"vendor", "inductor_cpp"}


@pytest.mark.gpu
def test_on_a_gpu_fewer_kernels_are_timed_and_recorded(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    whole, pruned = in_process(
        tmp_path,
        """
        a, b = (torch.randn(512, 512, device="cuda", dtype=torch.float16) for _ in range(2))
        for options in ({"mode": "tune"}, {"top_k": 2, "without_model": "roofline"}):
            torch._dynamo.reset()
            with config.patch(max_autotune_gemm=True, force_disable_caches=True), inductor.enable(**options) as session:
                out = torch.compile(torch.mm)(a, b)
            [pruning] = session.prunings
            shown(
                choices=pruning.choices, kept=len(pruning.kept), recorded=session.recorded,
                equal=torch.allclose(out, torch.mm(a, b), atol=0.1, rtol=0.01),
            )
        """,
        prelude=PRELUDE,
    )
    assert whole["equal"]
    assert pruned["equal"]
    assert whole["kept"] == whole["choices"] > 10
    assert pruned["kept"] < pruned["choices"] == whole["choices"]
    assert whole["recorded"] > pruned["recorded"] >= 1
    assert {each["environment"]["source"] for each in records(tmp_path / "home" / "store")} == {"inductor"}
