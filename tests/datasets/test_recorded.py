"""Operations that are built from records, and T1 descriptions of spaces."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from kernelcast.datasets import ImportSummary, Store, import_files
from kernelcast.datasets.recorded import RecordedOperation, register_recorded
from kernelcast.datasets.t1 import read_t1
from kernelcast.errors import (
    IllegalCandidateError,
    ImportFileError,
    InvalidProblemError,
    KernelcastError,
    StoreError,
    UnknownNameError,
)
from kernelcast.featurizer import Featurizer
from kernelcast.kernels import (
    Candidate,
    candidates,
    operation,
    problem,
    refusals,
    registry,
    require_legal,
    variants,
)
from kernelcast.kernels.devices import device

A100, H100 = device("a100"), device("h100")

DATA = Path(__file__).parents[3] / "shared" / "data" / "kernel_tuner"
recorded = pytest.mark.skipif(not DATA.is_dir(), reason="no recorded measurements in ../shared/data")


@pytest.fixture(autouse=True)
def _own_catalogue(monkeypatch):
    """What a test registers is gone after it; what is built in is loaded before, and stays."""
    registry.operation_names()
    monkeypatch.setattr(registry, "_operations", dict(registry._operations))
    monkeypatch.setattr(
        registry, "_variants", {known: dict(found) for known, found in registry._variants.items()}
    )


def cache(kernel: str, size: Any = (64, 32), **changes: Any) -> dict[str, Any]:
    entries = {
        "16,fast": {"block": 16, "mode": "fast", "time": 2.0},
        "32,fast": {"block": 32, "mode": "fast", "time": 1.0},
        "8,slow": {"block": 8, "mode": "slow", "time": "RuntimeFailedConfig"},
    }
    return {
        "device_name": "NVIDIA A100-PCIE-40GB",
        "kernel_name": kernel,
        "problem_size": list(size),
        "tune_params_keys": ["block", "mode"],
        "cache": {**entries, **changes},
    }


@pytest.fixture
def name(tmp_path: Path) -> str:
    """A new operation, with records of two sizes in ``tmp_path/store``. The catalogue keeps it: each has another name."""
    kernel = f"blur_{secrets.token_hex(4)}"
    more = {"16,slow": {"block": 16, "mode": "slow", "time": 3.0}}
    for number, file in enumerate((cache(kernel), cache(kernel, (128, 32), **more))):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(file))
        import_files("kernel-tuner", [str(path)], device=A100, workload="hub", store=tmp_path / "store")
    return f"kt_{kernel}"


def of(block: int, mode: str) -> Candidate:
    return Candidate.of("kernel_tuner", {"block": block, "mode": mode})


def test_the_space_is_what_was_recorded(tmp_path: Path, name: str) -> None:
    found = register_recorded(tmp_path / "store", name)
    assert isinstance(found, RecordedOperation)
    assert operation(name) is found
    (variant,) = variants(name).values()
    assert {each.name: each.values for each in variant.parameters} == {
        "block": (8, 16, 32),
        "mode": ("fast", "slow"),
    }
    assert set(map(variant.space().at, range(variant.space().length))) == {
        of(16, "fast"), of(32, "fast"), of(8, "slow"), of(16, "slow"),
    }  # fmt: skip
    assert [each.default for each in found.schema.dims] == [None, 32]
    assert problem(name, x=64) in Store(tmp_path / "store").problems().values()


def test_what_failed_or_was_not_tried_is_refused_where_it_was_recorded(tmp_path: Path, name: str) -> None:
    register_recorded(tmp_path / "store", name)
    small, large, new = (problem(name, x=size) for size in (64, 128, 96))
    assert set(candidates(small, A100)) == {of(16, "fast"), of(32, "fast")}
    assert set(candidates(large, A100)) == {of(16, "fast"), of(32, "fast"), of(16, "slow")}
    assert len(candidates(new, A100)) == len(candidates(small, H100)) == 4
    assert {(each.candidate, each.rule, each.seen) for each in refusals(small, A100)} == {
        (of(8, "slow"), "worked", "out_of_resources"),
        (of(16, "slow"), "recorded", ""),
    }
    with pytest.raises(IllegalCandidateError, match="It failed when it was recorded"):
        require_legal(small, A100, of(8, "slow"))


def test_what_has_no_kernel_cannot_be_run(tmp_path: Path, name: str) -> None:
    found = register_recorded(tmp_path / "store", name)
    described = problem(name, x=64)
    (variant,) = variants(name).values()
    for call in (
        lambda: found.make_inputs(described, seed=0, device="cpu"),
        lambda: found.reference(described),
        lambda: found.tolerance(described),
        lambda: variant.build(described, {"block": 16, "mode": "fast"}),
    ):
        with pytest.raises(KernelcastError, match=f"{name} is known from records alone.* --mode predict"):
            call()


@pytest.mark.slow
def test_it_is_measured_nowhere_and_trained_on_as_before(tmp_path: Path, name: str) -> None:
    from kernelcast.costmodel.model import schema_of
    from kernelcast.datasets.timing import TimingPlan, measure
    from kernelcast.kernels.detect import detect
    from kernelcast.training.data import load_problems

    def features() -> list[Any]:
        data = load_problems(Store(tmp_path / "store"), name, device=A100)
        return [(each.problem, list(each.table), schema_of(data)) for each in data]

    before = features()
    register_recorded(tmp_path / "store", name)
    assert [each[:2] for each in features()] == [each[:2] for each in before]
    described = problem(name, x=64)
    # Also the features of a model that was fitted before or after.
    for _, _, schema in (*before, *features()):
        table = candidates(described, A100)
        assert Featurizer(schema)(described, table, A100).shape[0] == len(table)
    pytest.importorskip("torch")
    with pytest.raises(KernelcastError, match="no kernel here to run"):
        measure(problem(name, x=64, threads=1), [of(16, "fast")], detect("cpu"), plan=TimingPlan())


def test_problems_must_fit_the_records(tmp_path: Path, name: str) -> None:
    register_recorded(tmp_path / "store", name)
    with pytest.raises(InvalidProblemError, match="needs the dimension 'x'"):
        problem(name)
    with pytest.raises(InvalidProblemError, match=r"does not take dtype 'float16'\. It takes: unknown"):
        problem(name, x=64, dtype="float16")
    with pytest.raises(InvalidProblemError, match="no dimension or option 'z'"):
        problem(name, x=64, z=3)


def test_other_names_and_stores(tmp_path: Path, name: str) -> None:
    root = tmp_path / "store"
    with pytest.raises(UnknownNameError, match=f"Did you mean '{name}'"):
        register_recorded(root, f"{name}x")
    with pytest.raises(UnknownNameError, match=r"Known: .*gemm"):
        register_recorded(tmp_path / "none", name)
    assert register_recorded(root, "gemm").name == "gemm"
    assert register_recorded(root, name) is register_recorded(root, name)
    # It is none of the catalogue: more of it can be imported.
    more = write(tmp_path / "more.json", cache(name.removeprefix("kt_"), (256, 32)))
    assert import_files("kernel-tuner", [more], device=A100, workload="hub", store=root).added == 3
    with pytest.raises(KernelcastError, match="start another process"):
        register_recorded(tmp_path / "other", name)
    (root / "store.json").write_text("{}")
    with pytest.raises(StoreError, match="is no operation of the catalogue, and: "):
        register_recorded(root, "kt_never_seen")


def test_tables_with_options_dtypes_and_several_variants(tmp_path: Path) -> None:
    name = f"sort_{secrets.token_hex(4)}"
    (tmp_path / "a.csv").write_text(
        "rows,mode,type,lib,tile,us\n7,x,float16,vendor,0,3\n7,y,float16,triton_sort,16,4\n9,x,int8,triton_sort,32,5\n"
    )
    import_files(
        "table",
        [str(tmp_path / "a.csv")],
        device=A100,
        workload="w",
        store=tmp_path / "store",
        options={
            "operation": name,
            "map": "rows=rows,option.mode=mode,dtype=type,variant=lib,config.tile=tile,latency_us=us",
        },
    )
    found = register_recorded(tmp_path / "store", name)
    assert found.schema.dtypes == ("float16", "int8")
    assert [(each.name, each.choices) for each in found.schema.options] == [("mode", ("x", "y"))]
    with pytest.raises(InvalidProblemError, match="needs a dtype: float16, int8"):
        problem(name, rows=7)
    with pytest.raises(InvalidProblemError, match="mode is 'z'; it must be one of x, y"):
        problem(name, rows=7, mode="z", dtype="int8")
    assert [(each.name, each.backend) for each in variants(name).values()] == [
        ("vendor", "vendor"),
        ("triton_sort", "triton"),
    ]
    assert list(candidates(problem(name, rows=7, mode="x", dtype="float16"), A100)) == [
        Candidate.of("vendor", {"tile": 0})
    ]


def test_each_form_of_a_kernels_sizes_can_be_named(tmp_path: Path) -> None:
    """Two files state the size otherwise than the first: each of the three problems keeps a name."""
    kernel = f"blur_{secrets.token_hex(4)}"
    name = f"kt_{kernel}"
    for number, size in enumerate(((64, 32), ("callable",), ("n", 4))):
        file = write(tmp_path / f"{number}.json", cache(kernel, size))
        import_files("kernel-tuner", [file], device=A100, workload="hub", store=tmp_path / "store")
    register_recorded(tmp_path / "store", name)
    held = set(Store(tmp_path / "store").problems().values())
    named = [
        problem(name, **values)
        for values in ({"x": 64, "y": 32}, {"problem_size": "callable"}, {"problem_size": "n,4"})
    ]
    assert len(set(named)) == 3
    assert set(named) == held
    assert problem(name, x=64) == named[0]
    assert problem(name, x=128, y=3).dims == (("x", 128), ("y", 3))
    assert set(candidates(named[0], A100)) == {of(16, "fast"), of(32, "fast")}
    with pytest.raises(InvalidProblemError, match=r"leave open .*problem_size=callable.*x=64, y=32"):
        problem(name)
    with pytest.raises(InvalidProblemError, match=r"in 2 forms: x problem_size; x y\. .*option 'z'"):
        problem(name, z=3)


# T1


def t1(**changes: Any) -> dict[str, Any]:
    space = {
        "TuningParameters": [
            {"Name": "block", "Values": "[8, 16, 32]"},
            {"Name": "mode", "Values": ["fast", "slow"]},
        ],
        "Conditions": [{"Expression": "mode == 'fast' or block < 32"}, {"Expression": "64 % block == 0"}],
        **changes,
    }
    return {
        "ConfigurationSpace": space,
        "KernelSpecification": {"KernelName": "blur_kernel", "ProblemSize": [64, 32]},
    }


def write(path: Path, data: Any) -> str:
    path.write_text(json.dumps(data))
    return str(path)


def import_t4(folder: Path, space: Any, *configs: tuple[Any, Any], **options: str) -> ImportSummary:
    results = [
        {
            "configuration": {"block": block, "mode": mode},
            "times": {"runtimes": [1.5]},
            "invalidity": "correct",
        }
        for block, mode in configs
    ]
    file = write(folder / "hub_A100_T4.json", {"results": results})
    return import_files(
        "t4",
        [file],
        device=A100,
        workload="hub",
        store=folder / "store",
        options={"space": write(folder / "T1.json", space), **options},
    )


def test_a_space_says_kernel_and_size_and_checks_the_configs(tmp_path: Path) -> None:
    assert import_t4(tmp_path, t1(), (16, "slow"), (32, "fast")).added == 2
    (found,) = Store(tmp_path / "store").problems().values()
    assert (found.operation, found.dims) == ("kt_blur", (("x", 64), ("y", 32)))
    import_t4(tmp_path, t1(), (16, "slow"), operation="soft", **{"problem-size": "8"})
    assert {(each.operation, each.dims) for each in Store(tmp_path / "store").problems().values()} == {
        ("kt_blur", (("x", 64), ("y", 32))),
        ("soft", (("x", 8),)),
    }


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ((32, "slow"), "it breaks the condition \"mode == 'fast' or block < 32\""),
        ((24, "fast"), r"block is 24, none of \[8, 16, 32\]"),
        ((True, "fast"), "block is True, none of"),
        ((16, "Slow"), "mode is 'Slow', none of"),
    ],
)
def test_a_config_of_another_space_is_refused(tmp_path: Path, config: tuple[Any, Any], fault: str) -> None:
    with pytest.raises(ImportFileError, match=rf"hub_A100_T4.json: results\[1\].*T1.json: {fault}"):
        import_t4(tmp_path, t1(), (16, "fast"), config)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("expression", "met"),
    [
        ("block * 2 + 1 == 33 and not mode == 'slow'", True),
        ("block in (8, 16) and -block < 0", True),
        ("8 <= block < 16", False),
        ("block // 0 == 1", False),
        ("block / 3 > 5 or mode != 'fast'", True),
    ],
)
def test_conditions(tmp_path: Path, expression: str, met: bool) -> None:
    space = read_t1(write(tmp_path / "T1.json", t1(Conditions=[{"Expression": expression}])))
    assert (space.fault({"block": 16, "mode": "fast"}) == "") is met


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "block.__class__", "(lambda: 1)()", "[x for x in (1,)]", "block ** block",
        "block << 70", "other == 3", "9" * 30 + " > block", "mode * 1000000000 == ''", "'%1000000000d' % block == ''",
        "block if block else 1", "f'{block}'", "block := 3", "block ==", "(" * 500 + "block" + ")" * 500, 7, None,
        "block == 1 " * 1000, "...", "b'' == block", "block == 1; block", "block == 1j",
        "[0] * 1000000000 == block", "block in (0,) * 1000000000", "1000000000 * [block] == block",
    ],
)  # fmt: skip
def test_a_condition_that_does_more_than_reckon_is_refused(tmp_path: Path, expression: Any) -> None:
    file = write(tmp_path / "T1.json", t1(Conditions=[{"Expression": expression}]))
    with pytest.raises(ImportFileError, match=r"T1.json: Conditions\[0\]"):
        read_t1(file)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "it is no T1 file"),
        ({"ConfigurationSpace": {"TuningParameters": []}}, "it is no T1 file"),
        (t1(TuningParameters=[{"Name": "a"}]), r"TuningParameters\[0\]"),
        (t1(TuningParameters=[{"Name": "a", "Values": "[1, 2"}]), r"TuningParameters\[0\]"),
        (t1(TuningParameters=[{"Name": "a", "Values": "open('x')"}]), r"TuningParameters\[0\]"),
        (t1(TuningParameters=[{"Name": "a", "Values": [[1]]}]), r"TuningParameters\[0\]"),
        (t1(TuningParameters=[{"Name": "a", "Values": [2**70]}]), r"TuningParameters\[0\]"),
        (t1(TuningParameters=[{"Name": "a", "Values": [1]}] * 2), r"TuningParameters\[1\]"),
        (t1(Conditions={}), "Conditions is {}"),
        ({"ConfigurationSpace": t1()["ConfigurationSpace"]}, "KernelSpecification.KernelName"),
    ],
)
def test_a_broken_space_is_named(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(ImportFileError, match=f"T1.json: .*{message}"):
        import_t4(tmp_path, data, (16, "fast"))


@recorded
@pytest.mark.data
@pytest.mark.slow
def test_the_recorded_space_is_that_of_the_recorded_files(tmp_path: Path) -> None:
    store, space = tmp_path / "store", str(DATA / "convolution_milo_T1.json")
    common = {"device": A100, "workload": "hub", "store": store}
    import_files("kernel-tuner", [str(DATA / "convolution_milo_A100.json.gz")], **common)
    file = str(DATA / "convolution_milo_A100_T4.json.gz")
    assert import_files("t4", [file], options={"space": space}, **common).added == 4362
    assert len(Store(store).problems()) == 1
    register_recorded(store, "kt_convolution")
    table = candidates(problem("kt_convolution"), A100)
    assert {block.variant: block.length for block in table.blocks} == {"kernel_tuner": 4201, "t4": 4201}
    described = read_t1(space)
    assert all(described.fault(table[row].parameters) == "" for row in range(0, len(table), 50))
