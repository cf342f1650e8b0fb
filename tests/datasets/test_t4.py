from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernelcast.datasets import Environment, ImportSummary, Measurement, Protocol, Store, import_files
from kernelcast.datasets.t4 import export_t4
from kernelcast.errors import ImportFileError, StoreError
from kernelcast.kernels import Candidate, problem
from kernelcast.kernels.devices import device

A100 = device("a100")

DATA = Path(__file__).parents[3] / "shared" / "data" / "kernel_tuner"
recorded = pytest.mark.skipif(not DATA.is_dir(), reason="no recorded measurements in ../shared/data")


def result(block: int, invalidity: str = "correct", value: Any = 1.0, **facts: Any) -> dict[str, Any]:
    return {
        "timestamp": "2023-12-22 09:54:05.500000+00:00",
        "configuration": {"block": block},
        "times": {"compilation": 3.0},
        "invalidity": invalidity,
        "correctness": int(invalidity == "correct"),
        "measurements": [{"name": "time", "value": value, "unit": ""}],
        "objectives": ["time"],
        **facts,
    }


RESULTS = [
    result(1, times={"runtimes": [2.0, 4.0]}),
    result(2, value=0.5),
    result(3, "runtime", "RuntimeFailedConfig"),
    result(4, "runtime", "segfault"),
    result(5, "compile"),
    result(6, "timeout"),
    result(7, "correctness"),
    result(8, "constraints"),
    result(9, correctness=0),
    result(1, times={"runtimes": [8.0]}),
    result(1, "timeout"),
]


def file_of(path: Path, results: Any = None, **facts: Any) -> str:
    data = {"results": RESULTS if results is None else results, "schema_version": "1.0.0", **facts}
    path.write_text(json.dumps(data))
    return str(path)


def run(store: Path, *files: str, on: str = "a100", **options: str) -> ImportSummary:
    return import_files("t4", files, device=device(on), workload="hub", store=store, options=options)


def found(store: Path) -> dict[Candidate, Measurement]:
    return {each.candidate: each for each in Store(store).measurements()}


def test_a_file_becomes_one_problem_with_every_config(tmp_path: Path) -> None:
    file = file_of(tmp_path / "Blur_A100_T4.json", metadata={"timeunit": "miliseconds"})
    summary = run(tmp_path / "store", file)
    assert (summary.rows, summary.added, summary.dropped, summary.problems) == (11, 9, 1, 1)
    records = found(tmp_path / "store")
    assert {key.parameters["block"]: (each.outcome, each.samples_us) for key, each in records.items()} == {
        1: ("ok", (2000.0, 4000.0, 8000.0)),
        2: ("ok", (500.0,)),
        3: ("out_of_resources", ()),
        4: ("crash", ()),
        5: ("compile_error", ()),
        6: ("timeout", ()),
        7: ("wrong_result", ()),
        8: ("out_of_resources", ()),
        9: ("wrong_result", ()),
    }
    one = next(iter(records.values()))
    assert (one.problem.operation, one.problem.dims) == ("t4_blur_a100", (("x", 1),))
    assert one.created_at == 1703238845.5
    assert Store(tmp_path / "store").check() == []
    assert run(tmp_path / "store", file).known == 9


@pytest.mark.parametrize(
    ("unit", "factor"), [("seconds", 1e6), ("us", 1.0), ("nanoseconds", 1e-3), ("ms", 1e3)]
)
def test_the_unit(tmp_path: Path, unit: str, factor: float) -> None:
    run(tmp_path / "store", file_of(tmp_path / "a.json", [result(1)], metadata={"timeunit": unit}))
    assert [each.latency_us for each in found(tmp_path / "store").values()] == [factor]


def test_the_operation_and_the_size_can_be_given(tmp_path: Path) -> None:
    run(tmp_path / "store", file_of(tmp_path / "a.json"), operation="blur", **{"problem-size": "64,32"})
    (only,) = Store(tmp_path / "store").problems().values()
    assert (only.operation, only.dims) == ("blur", (("x", 64), ("y", 32)))


broken: dict[str, tuple[Any, str]] = {
    "a list": ([1], "no list of results"),
    "no results": ({"metadata": {}}, "no list of results"),
    "nothing measured": ({"results": []}, "holds no measurement"),
    "metadata that is none": ({"results": [], "metadata": 3}, "metadata is 3"),
    "an unknown unit": ({"results": [], "metadata": {"timeunit": "weeks"}}, "timeunit is 'weeks'"),
    "no configuration": ({"results": [{}]}, "results\\[0\\] has no configuration"),
    "an object in one": ({"results": [{"configuration": {"a": {}}}]}, "results\\[0\\].configuration: 'a' is"),
    "an unknown invalidity": ({"results": [result(1, "sad")]}, "results\\[0\\]: invalidity is 'sad'"),
    "no time": ({"results": [result(1, value=None)]}, "results\\[0\\]: the measured time"),
    "a negative time": (
        {"results": [result(1, times={"runtimes": [1, -1]})]},
        "results\\[0\\].times.runtimes\\[1\\] is -1",
    ),
    "times that are none": ({"results": [result(1, times=3)]}, "times.runtimes is 3"),
    "no timestamp": ({"results": [result(1, timestamp=7)]}, "the timestamp is 7"),
    "a variant that is none": ({"results": [result(1, variant=7)]}, "the variant is 7"),
    "no problem": ({"results": [], "metadata": {"kernelcast": {}}}, "holds no problem"),
    "a problem that the catalogue refuses": (
        {
            "results": [],
            "metadata": {
                "kernelcast": {"problem": {**problem("gemm", m=1, n=1, k=1).to_dict(), "dims": {"m": 1}}}
            },
        },
        "holds no problem",
    ),
}


@pytest.mark.parametrize("fault", broken)
def test_a_broken_file_is_named_and_nothing_is_kept(tmp_path: Path, fault: str) -> None:
    data, message = broken[fault]
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(data))
    with pytest.raises(ImportFileError, match=message) as caught:
        run(tmp_path / "store", file_of(tmp_path / "good.json"), str(bad))
    assert str(caught.value).startswith(str(bad))
    assert not (tmp_path / "store").exists()


def measured(
    variant: str, config: dict[str, Any], samples: tuple[float, ...] = (), outcome: str = "ok"
) -> Measurement:
    return Measurement(
        problem=problem("gemm", m=64, n=48, k=32, dtype="float16", layout="nt"),
        candidate=Candidate.of(variant, config),
        device=A100.name,
        device_fingerprint=A100.fingerprint,
        environment=Environment(),
        protocol=Protocol("a"),
        samples_us=samples,
        outcome=outcome,
        workload="here",
        created_at=1703238845.5,
    )


def facts_of(store: Path) -> list[tuple[Any, ...]]:
    return [
        (each.problem, each.candidate, each.samples_us, each.outcome, each.created_at)
        for each in Store(store).measurements()
    ]


def test_an_export_comes_back_equal(tmp_path: Path) -> None:
    store, path = Store(tmp_path / "store"), tmp_path / "out.json"
    store.add_many(
        [
            measured("vendor", {}, (1.25, 0.1, 3.7)),
            # One name, two types: what plain files would make text of.
            measured("one", {"way": 3, "flag": True}, (2.5,)),
            measured("two", {"way": "fast"}, (0.3, 0.7)),
            *(
                measured("bad", {"number": number}, outcome=outcome)
                for number, outcome in enumerate(
                    ("compile_error", "out_of_resources", "wrong_result", "timeout", "crash")
                )
            ),
        ]
    )
    assert export_t4(store, path) == 8
    run(tmp_path / "again", str(path))
    assert facts_of(tmp_path / "again") == facts_of(tmp_path / "store")
    with pytest.raises(StoreError, match="is there already"):
        export_t4(store, path)
    with pytest.raises(StoreError, match=r"is a \.json file"):
        export_t4(store, tmp_path / "out.csv")
    with pytest.raises(StoreError, match="leave 0 problems on 0 devices"):
        export_t4(store, path, overwrite=True, operation="softmax")


@recorded
@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize(("card", "on"), [("A100", "a100"), ("MI250X", "mi250x")])
def test_both_formats_of_the_recorded_files_give_the_same(tmp_path: Path, card: str, on: str) -> None:
    plain, store = DATA / f"convolution_milo_{card}.json.gz", tmp_path / "store"
    import_files("kernel-tuner", [str(plain)], device=device(on), workload="hub", store=store)
    t4 = str(DATA / f"convolution_milo_{card}_T4.json.gz")
    run(store, t4, on=on, operation="kt_convolution", **{"problem-size": "4096,4096"})
    frame = Store(store).frame(["variant", "problem_id", "config", "latency_us", "outcome", "created_at"])
    one, other = (
        frame[frame["variant"] == variant].drop(columns="variant").sort_values("config", ignore_index=True)
        for variant in ("kernel_tuner", "t4")
    )
    assert len(one) == 4362
    assert one.equals(other)
