"""The user's own kernels: what the decorator makes of a callable and of a Triton kernel, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from kernelcast.errors import InvalidProblemError, InvalidRecordError, KernelcastError, SettingsError
from kernelcast.kernels import Device, candidates, operation, problem, refusals, registry, variant, variants
from kernelcast.kernels.user import TensorSpec, kernel

torch = pytest.importorskip("torch")

CPU = Device("cpu", "cpu", "intel", "x86_64-avx512", 2, warp_size=1)
H100 = Device("h100", "gpu", "nvidia", "sm90", 132, shared_bytes_per_block=232_448)


@pytest.fixture(autouse=True)
def _own_catalogue(monkeypatch):
    """What a test registers is gone after it; what is built in is loaded before, and stays."""
    registry.operation_names()
    monkeypatch.setattr(registry, "_operations", dict(registry._operations))
    monkeypatch.setattr(
        registry, "_variants", {name: dict(found) for name, found in registry._variants.items()}
    )
    monkeypatch.setattr(registry, "_imported", set())


def row_scale(x, factor, *, chunk):
    """Scale rows.

    More text.
    """
    return torch.cat([a * b[:, None] for a, b in zip(x.split(chunk), factor.split(chunk), strict=True)])


def describe(function=row_scale, name="test_user", **changed):
    told = {
        "tensors": {"x": ("rows", "columns"), "factor": ("rows",)},
        "space": {"chunk": (16, 64, 256)},
        "reference": lambda x, factor: x * factor[:, None],
        **changed,
    }
    return kernel(name, **told)(function)


def outputs(described, seed=3):
    """(candidate, what is wrong with its output) of every legal candidate, on the CPU."""
    found = operation(described.operation)
    inputs = found.make_inputs(described, seed=seed, device="cpu")
    expected = found.reference(described, *inputs)
    return {
        str(each): found.check(
            described, expected, variant(found.name, each.variant).build(described, each.parameters)(*inputs)
        )
        for each in candidates(described, CPU)
    }


def test_a_callable_becomes_an_operation_and_stays_what_it_was():
    assert describe() is row_scale
    found = operation("test_user")
    assert [dim.name for dim in found.schema.dims] == ["rows", "columns"]
    assert (found.doc, found.schema.dtypes, found.default_variant) == ("Scale rows", ("float32",), "default")
    assert [(each.name, each.backend) for each in variants("test_user").values()] == [
        ("default", "user"),
        ("row_scale", "user"),
    ]
    described = problem("test_user", rows=100, columns=8)
    assert outputs(described) == {"default": None, "row_scale(chunk=64)": None, "row_scale(chunk=256)": None}
    (refusal,) = refusals(described, CPU)
    assert (refusal.rule, refusal.candidate.parameters) == ("not-the-default", {"chunk": 16})
    # 100 rows of 8, the factors, and a result that is not described.
    assert (found.flops(described), found.traffic_bytes(described)) == (0.0, 4.0 * (100 * 8 + 100))
    assert (variant("test_user", "row_scale").work(described, {}, CPU).traffic_bytes) == 3600.0


def test_a_wrong_kernel_is_seen():
    describe(lambda x, factor, *, chunk: x * factor[:, None] + (chunk == 64), variant="off")
    wrong = outputs(problem("test_user", rows=10, columns=8))
    assert wrong["default"] is None
    assert wrong["off(chunk=256)"] is None
    assert "80 of 80 elements differ" in wrong["off(chunk=64)"]


@pytest.mark.parametrize("result", [None, 3.0, "text"])
def test_what_is_no_tensor_is_a_wrong_result(result):
    describe(lambda x, factor, *, chunk: result, variant="off")
    assert "not a tensor" in outputs(problem("test_user", rows=4, columns=4))["default"]


def test_costs_options_tolerance_and_named_default():
    def scaled(x, *, times, chunk, rows):
        assert rows == len(x)
        return x * (2 if times == "two" else 3)

    kernel(
        "test_user",
        variant="v",
        tensors={"x": ("rows", 8)},
        output=TensorSpec(("rows", 8)),
        space=[{"chunk": 4}, {"chunk": 8}],
        options={"times": ("two", "three")},
        dtypes=("float32", "float16"),
        default=lambda x: x + x,
        tolerance={"float16": (0.5, 0.25)},
        flops=lambda p: 8 * p["rows"],
        where={"a chunk is at most all rows": lambda p, c: c["chunk"] <= p["rows"]},
    )(scaled)
    found = operation("test_user")
    described = problem("test_user", rows=5, dtype="float16")
    assert described["times"] == "two"
    assert (found.tolerance(described).relative, found.tolerance(described).absolute) == (0.5, 0.25)
    assert found.tolerance(problem("test_user", rows=5)).relative == 1.3e-6
    assert (found.flops(described), found.traffic_bytes(described)) == (40.0, 2 * 2.0 * 40)
    # The reference is what the default computes, which knows no options.
    assert outputs(described) == {"vendor": None, "v(chunk=4)": None}
    assert "differ" in outputs(problem("test_user", rows=5, times="three"))["v(chunk=4)"]
    assert [str(each) for each in refusals(described, CPU)] == [
        "v(chunk=8): a chunk is at most all rows (chunk=8)"
    ]
    with pytest.raises(InvalidProblemError, match="two, three"):
        problem("test_user", rows=5, times="four")


def test_conditions_may_be_written_for_one_config_or_for_columns():
    seen = []

    def single(p, c):
        seen.append(np.shape(c["chunk"]))
        return min(c["chunk"], 100) == 64 or c["chunk"] > p["rows"]

    describe(where={"one of many": single})
    assert [c.parameters.get("chunk") for c in candidates(problem("test_user", rows=255, columns=1), CPU)] == [
        None, 64, 256,
    ]  # fmt: skip
    # The first try is with the column.
    assert seen[0] == (3,)
    assert () in seen


def test_a_condition_that_is_one_flag_for_all_columns_is_asked_config_by_config():
    describe(where={"whole numbers": lambda p, c: isinstance(c["chunk"], int) and c["chunk"] > 16})
    found = candidates(problem("test_user", rows=255, columns=1), CPU)
    assert [c.parameters.get("chunk") for c in found] == [None, 64, 256]


def test_conditions_that_fail_are_errors():
    describe(where={"a typing error": lambda p, c: c["chank"] > 1})
    with pytest.raises(InvalidRecordError, match=r"condition 'a typing error' fails for .*KeyError: 'chank'"):
        candidates(problem("test_user", rows=2, columns=1), CPU)


def test_whole_numbers_and_other_dtypes():
    def gather(x, index, *, unroll):
        return x[index.long()]

    kernel(
        "test_user",
        tensors={"x": ("rows",), "index": TensorSpec(("many",), dtype="int32", low=1, high="rows")},
        space={"unroll": (1, 2)},
        dtypes=("float16", "bfloat16"),
    )(gather)
    described = problem("test_user", rows=7, many=500, dtype="bfloat16")
    x, index = operation("test_user").make_inputs(described, seed=0, device="cpu")
    assert (x.dtype, index.dtype) == (torch.bfloat16, torch.int32)
    assert (int(index.min()), int(index.max())) == (1, 6)
    assert outputs(described) == {"default": None, "gather(unroll=2)": None}


def test_inputs_that_a_kernel_writes_to_are_copied():
    def inplace(x, *, step):
        return x.mul_(2)

    kernel("test_user", tensors={"x": ("n",)}, space={"step": (1, 2)}, mutates=("x",))(inplace)
    described = problem("test_user", n=5)
    (x,) = operation("test_user").make_inputs(described, seed=0, device="cpu")
    before = x.clone()
    result = variant("test_user", "inplace").build(described, {"step": 2})(x)
    assert torch.equal(x, before)
    assert torch.equal(result, 2 * before)


def test_a_second_kernel_is_a_further_variant():
    describe()
    describe(lambda x, factor, *, chunk: x * factor[:, None], variant="plain", tensors=None, reference=None)
    assert list(variants("test_user")) == ["default", "plain", "row_scale"]
    described = problem("test_user", rows=20, columns=3)
    assert set(outputs(described).values()) == {None}
    assert len(outputs(described)) == 1 + 3 + 2
    with pytest.raises(KernelcastError, match="registered twice"):
        describe(tensors=None, reference=None)
    with pytest.raises(InvalidRecordError, match="reference, flops belong to its first kernel"):
        describe(lambda x, f, *, chunk: x, variant="third", tensors=None, flops=lambda p: 1.0)


def test_a_variant_of_a_built_in_operation():
    def halves(a, b, *, parts):
        return torch.cat([part @ b for part in a.chunk(parts)])

    kernel(
        "gemm",
        tensors={"a": ("m", "k"), "b": ("k", "n")},
        space={"parts": (2, 4)},
        where={"each part has a row": lambda p, c: c["parts"] <= p["m"]},
    )(halves)
    described = problem("gemm", m=3, n=5, k=7, layout="tn", threads=1)
    found = {name: wrong for name, wrong in outputs(described).items() if name.startswith("halves")}
    assert found == {"halves(parts=2)": None}


def test_sizes_that_a_built_in_operation_does_not_have():
    with pytest.raises(InvalidRecordError, match="sizes q, which gemm does not have; it has k, "):
        kernel("gemm", tensors={"a": ("m", "q"), "b": ("q", "n")}, space={"chunk": (1,)})(row_scale)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tensors": {}}, "states no tensors"),
        ({"tensors": {"x": "rows"}}, "it must be a shape"),
        ({"tensors": {"x": ("rows", -1)}}, "has the size -1"),
        ({"tensors": {"x": TensorSpec(("rows",)), "factor": 7}}, "described by 7"),
        ({"space": {"chunk": ()}}, "must be a list of some"),
        ({"space": {"chunk": "16"}}, "must be a list of some"),
        ({"space": {"chunk": (1, 1)}}, "occurs twice"),
        ({"space": {"chunk": (1, 2.5)}}, "several types"),
        ({"space": [{"chunk": 1}, {"other": 1}]}, "same parameters"),
        ({"space": 3}, "it must map parameters"),
        ({"space": {"chunk": (1, 2), "fast": (True, False)}}, "takes no fast"),
        ({"space": {"rows": (1, 2)}}, "each name has one meaning"),
        ({"grid": lambda p, c: (1,)}, "grid is for Triton kernels"),
        ({"output": "x"}, "returns its output"),
        ({"mutates": ("y",)}, "mutates names y"),
        ({"name": "my op"}, "letters, digits"),
        ({"where": [1]}, "must map reasons"),
        ({"where": {"small": True}}, "must be a function of"),
        ({"flops": 5}, "flops is 5; it must be a function"),
        ({"default": "relu"}, "default is 'relu'"),
        ({"options": {"causal": ()}}, "no values"),
        ({"dtypes": ("float33",)}, "float33"),
        ({"tolerance": "small"}, "must be .relative, absolute"),
        ({"tolerance": (float("nan"), 0.0)}, "must be finite"),
        ({"function": lambda x, factor, *, chunk: x}, "has no name"),
        ({"function": 3}, "neither a Triton kernel nor callable"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_reason(changed, message):
    with pytest.raises(InvalidRecordError, match=message):
        describe(**changed)
    assert "test_user" not in registry._operations


def test_a_kernel_without_parameters_is_the_default_alone():
    kernel("test_user", tensors={"x": ("n",)})(_double)
    assert outputs(problem("test_user", n=4)) == {"default": None}
    kernel("test_user_2", tensors={"x": ("n",)}, default=lambda x: x + x)(_double)
    assert outputs(problem("test_user_2", n=4)) == {"vendor": None, "_double": None}


def _double(x):
    return 2 * x


def test_the_version_of_a_kernel_is_its_own_text():
    describe()
    ours = variant("test_user", "row_scale").source_hash()
    kernel("test_user_2", tensors={"x": ("n",)}, default=lambda x: x + x)(_double)
    assert len({ours, variant("test_user_2", "_double").source_hash()}) == 2
    assert variant("test_user", "default").source_hash() == ours


# Triton

ADD = """
import torch, triton, triton.language as tl
import kernelcast as kc

@kc.kernel(
    "test_vector_add",
    tensors={"out_ptr": ("n",), "x_ptr": ("n",), "y_ptr": ("n",), "lock_ptr": kc.TensorSpec((4,), dtype="int32")},
    output="out_ptr", scratch=("lock_ptr",), zeroed=("lock_ptr",),
    scalars={"stride": lambda p: 1, "scale": 2.0},
    options={"twice": (False, True)},
    grid=lambda p, c: (triton.cdiv(p["n"], c["BLOCK"]),),
    dtypes=("float32", "float16"),
    reference=lambda x, y: x + 2 * y,
)
@triton.autotune(
    [triton.Config({"BLOCK": size}, num_warps=warps) for size in (128, 256) for warps in (1, 2)], key=["n"],
    reset_to_zero=["out_ptr"],
)
@triton.jit
def add(n, out_ptr, x_ptr, lock_ptr, scale, y_ptr, stride, BLOCK: tl.constexpr, twice: tl.constexpr = False):
    \"\"\"x + scale y.\"\"\"
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * stride
    tl.atomic_add(lock_ptr, 1)
    total = tl.load(x_ptr + at, mask=at < n) + scale * tl.load(y_ptr + at, mask=at < n)
    tl.atomic_add(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < n)
"""

RUN_ADD = """
import sys
import vector_add
from kernelcast.kernels import candidates, operation, problem, variant
from kernelcast.kernels.devices import device
from kernelcast.kernels.memory import poisoned

described = problem("test_vector_add", n=1000, dtype="float32")
found = operation("test_vector_add")
inputs = found.make_inputs(described, seed=0, device="cpu")
for each in candidates(described, device("h100-sxm5-80gb")):
    launch = variant(found.name, each.variant).build(described, each.parameters)
    with poisoned():
        outputs = [launch(*inputs), launch(*inputs)]
    print(each, [found.check(described, found.reference(described, *inputs), output) for output in outputs])
try:
    launch(inputs[0][::2], inputs[1])
except Exception as error:
    print(error)
"""

GRID_ADD = """
import vector_add
from kernelcast.kernels import candidates, problem, variant
from kernelcast.kernels.devices import device

found = variant("test_vector_add", "add")
block = found.space()
try:
    found.work(problem("test_vector_add", n=1024), block.columns, device("h100-sxm5-80gb"))
except Exception as error:
    print(type(error).__name__, error)
"""

COMPILE_ADD = """
import vector_add
from kernelcast.kernels import Candidate, candidates, problem, variant
from kernelcast.kernels.compile import compile_facts
from kernelcast.kernels.devices import device

described = problem("test_vector_add", n=1024, dtype="float16")
work = variant("test_vector_add", "add").work(
    described, candidates(described, device("h100-sxm5-80gb")).blocks[1].columns, None
)
print(work.programs.tolist(), work.warps.tolist())
for each in (Candidate.of("default"), Candidate.of("add", {"BLOCK": 256, "num_warps": 2, "num_ctas": 1, "num_stages": 3})):
    facts = compile_facts(described, each, "sm90")
    print(facts.outcome, facts.spills, facts.detail)
"""


def run_with_add(tmp_path, script, text=ADD, **environment):
    pytest.importorskip("triton")
    (tmp_path / "vector_add.py").write_text(text)
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "TRITON_CACHE_DIR": str(tmp_path / "cache"),
            **environment,
        },
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_an_autotuned_triton_kernel_with_arguments_in_any_order(tmp_path):
    lines = run_with_add(tmp_path, RUN_ADD, TRITON_INTERPRET="1")
    assert len(lines) == 5
    assert lines[0] == "default [None, None]"
    assert all(line.startswith("add(BLOCK=") and line.endswith("[None, None]") for line in lines[1:4]), lines
    assert lines[4] == "add takes contiguous tensors; call .contiguous() on those that are not."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "message"),
    [('p["n"] // c["BLOCK"]', "must give a tuple of one to three sizes"), ('(p["m"],)', "KeyError: 'm'")],
)
def test_a_grid_that_fails_is_an_error_that_names_it(tmp_path, grid, message):
    text = ADD.replace('(triton.cdiv(p["n"], c["BLOCK"]),)', grid)
    (line,) = run_with_add(tmp_path, GRID_ADD, text=text)
    assert line.startswith(
        "InvalidRecordError The kernel 'add' of 'test_vector_add': the grid fails for (test_vector_add("
    )
    assert message in line


@pytest.mark.slow
def test_a_triton_kernel_compiles_offline(tmp_path):
    lines = run_with_add(tmp_path, COMPILE_ADD)
    # Blocks of 128 with 2 warps, of 256 with 1 and 2; that of 128 with 1 is the default.
    assert lines[0] == "[8.0, 4.0, 4.0] [2, 1, 2]"
    assert lines[1:] == ["ok 0 ", "ok 0 "]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('    grid=lambda p, c: (triton.cdiv(p["n"], c["BLOCK"]),),\n', ""), "needs a grid"),
        (('output="out_ptr"', 'output="z_ptr"'), "output is 'z_ptr'"),
        (('"scale": 2.0', '"other": 2.0'), "nothing gives its parameter scale a value"),
        (('"y_ptr": ("n",)', '"z_ptr": ("n",)'), "it has no parameter z_ptr"),
        (('{"BLOCK": size}', '{"BLOCK": size, "SPLIT": 1}'), "the space has SPLIT"),
        (
            ("@triton.autotune(", "@triton.heuristics({'stride': lambda a: 1})\n@triton.autotune("),
            "heuristics",
        ),
    ],
)
def test_a_triton_kernel_that_does_not_fit(tmp_path, change, message):
    pytest.importorskip("triton")
    assert change[0] in ADD
    script = "import sys\ntry:\n    import vector_add\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    text = ADD.replace(*change)
    (tmp_path / "vector_add.py").write_text(text)
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("InvalidRecordError")
    assert message in done.stdout


# KERNELCAST_IMPORT

MODULE = """
import kernelcast as kc

@kc.kernel("test_imported", tensors={"x": ("n",)}, space={"by": (1, 2)})
def scaled(x, *, by):
    return by * x
"""


def test_files_that_the_environment_names_are_imported(tmp_path, monkeypatch):
    path = tmp_path / "kernelcast_test_imported.py"
    path.write_text(MODULE)
    monkeypatch.setenv("KERNELCAST_IMPORT", f" {path} ,")
    assert "test_imported" in registry.operation_names()
    assert operation("test_imported").schema.dims[0].name == "n"
    sys.modules.pop("kernelcast_test_imported")


def test_modules_that_the_environment_names_are_imported(tmp_path, monkeypatch):
    (tmp_path / "kernelcast_test_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("KERNELCAST_IMPORT", "kernelcast_test_module")
    assert list(variants("test_imported")) == ["default", "scaled"]
    sys.modules.pop("kernelcast_test_module")


@pytest.mark.parametrize(
    ("text", "message"), [(None, "FileNotFoundError"), ("1 / 0", "ZeroDivisionError"), ("def", "SyntaxError")]
)
def test_a_file_that_cannot_be_imported_is_an_error_each_time(tmp_path, monkeypatch, text, message):
    path = tmp_path / "broken.py"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("KERNELCAST_IMPORT", str(path))
    for _ in range(2):
        with pytest.raises(SettingsError, match=message):
            operation("no_such_operation")
    assert "broken" not in sys.modules
