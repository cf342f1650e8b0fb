"""From the store to problems, and the splits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernelcast import kernels
from kernelcast.costmodel import ProblemData
from kernelcast.datasets import Environment, Measurement, Protocol, Store
from kernelcast.errors import KernelcastError, ModelError, UnknownNameError
from kernelcast.kernels import Candidate, CandidateTable, Problem
from kernelcast.kernels.devices import device
from kernelcast.training.data import (
    backend_of_variant,
    dataset_hash,
    default_candidate,
    folds_by_shape,
    full_table,
    half_medians,
    load_problems,
    read_problems,
    split_workloads,
)

A100 = device("a100")
VENDOR = Candidate.of("vendor")


def tile(size: int) -> Candidate:
    return Candidate.of("triton_toy", {"tile": size})


def toy(m: int, dtype: str = "float32") -> Problem:
    return Problem("toy", (("m", m),), dtype)


def measured(
    problem: Problem,
    candidate: Candidate,
    *samples_us: float,
    workload: str = "net",
    source: str = "kernelcast",
    created_at: float = 0.0,
    error_log: float = math.nan,
    outcome: str = "ok",
) -> Measurement:
    return Measurement(
        problem=problem,
        candidate=candidate,
        device=A100.name,
        device_fingerprint=A100.fingerprint,
        environment=Environment(source=source),
        protocol=Protocol("test", error_log=error_log),
        samples_us=samples_us,
        outcome=outcome,
        workload=workload,
        created_at=created_at,
    )


@pytest.fixture
def store(tmp_path: Path):
    """Makes a store of some measurements."""

    def make(*measurements: Measurement) -> Store:
        made = Store(tmp_path / "store")
        made.add_device(A100)
        made.add_many(measurements)
        return made

    return make


def item(problem: Problem, workload: str = "net", latency_us: tuple[float, ...] = (1.0, 2.0)) -> ProblemData:
    table = CandidateTable.of([VENDOR, *(tile(2**i) for i in range(len(latency_us) - 1))])
    return ProblemData(
        problem, A100, table, np.log(latency_us), np.full(len(latency_us), math.nan), workload=workload
    )


def test_problems_hold_the_log_of_the_median_in_a_fixed_order(store):
    made = store(
        measured(toy(1), tile(8), 5.0),
        measured(toy(1), tile(16), 4.0, 2.0, 9.0, error_log=0.02),
        measured(toy(1), VENDOR, 3.0),
        measured(toy(1), tile(32), outcome="out_of_resources"),
    )
    (found,) = load_problems(made, "toy", device="a100")
    assert found.problem == toy(1)
    assert found.device == A100
    assert found.workload == "net"
    # The default first, then by key, where "16" comes before "8".
    assert list(found.table) == [VENDOR, tile(16), tile(8)]
    np.testing.assert_allclose(np.exp(found.log_latency), [3.0, 4.0, 5.0])
    np.testing.assert_array_equal(found.error_log, [math.nan, 0.02, math.nan])
    assert found.failed == (tile(32),)
    # Halves in the order taken: 4 alone, then 2 and 9.
    np.testing.assert_allclose(np.exp(found.halves), [[math.nan, 4.0, math.nan], [math.nan, 5.5, math.nan]])


def test_each_workload_has_its_own_item(store):
    made = store(
        *(measured(toy(1), c, 1.0, workload="a", source="a") for c in (VENDOR, tile(8))),
        *(measured(toy(1), c, 2.0, workload="b", source="b") for c in (VENDOR, tile(8))),
    )
    found = load_problems(made, "toy", device=A100)
    assert [(one.workload, np.exp(one.log_latency).round(6).tolist()) for one in found] == [
        ("a", [1.0, 1.0]),
        ("b", [2.0, 2.0]),
    ]
    assert [one.workload for one in load_problems(made, "toy", device=A100, workloads=["b"])] == ["b"]


def test_the_newest_record_of_a_candidate_counts_be_it_a_failure(store):
    made = store(
        measured(toy(1), VENDOR, 9.0, source="new", created_at=2.0),
        measured(toy(1), VENDOR, 1.0, source="old", created_at=1.0),
        measured(toy(1), tile(8), 1.0, source="old", created_at=1.0),
        measured(toy(1), tile(8), source="new", created_at=2.0, outcome="crash"),
        measured(toy(1), tile(16), 4.0),
    )
    found = read_problems(made, "toy", device="a100")
    (only,) = found.problems
    assert dict(zip(only.table, np.exp(only.log_latency).round(6), strict=True)) == {
        VENDOR: 9.0,
        tile(16): 4.0,
    }
    assert only.failed == (tile(8),)
    assert found.records == 3


def test_problems_with_fewer_than_two_working_candidates_are_left_out_and_counted(store):
    made = store(
        measured(toy(1), VENDOR, 1.0),
        measured(toy(1), tile(8), outcome="timeout"),
        measured(toy(2), VENDOR, 1.0),
        measured(toy(3), VENDOR, 1.0),
        measured(toy(3), tile(8), 1.0),
    )
    found = read_problems(made, "toy", device="a100")
    assert [one.problem for one in found.problems] == [toy(3)]
    assert (found.left_out, found.records) == (2, 2)


def test_backends_are_a_filter_by_catalogue_or_by_name(store):
    made = store(*(measured(toy(1), c, 1.0) for c in (VENDOR, tile(8), tile(16))))
    (found,) = load_problems(made, "toy", device="a100", backends=("triton",))
    assert list(found.table) == [tile(16), tile(8)]
    assert full_table(found).default is None
    with pytest.raises(
        ModelError, match=r"No record of toy .* backend torch; those there are: triton, vendor"
    ):
        load_problems(made, "toy", device="a100", backends=("torch",))
    assert backend_of_variant("gemm", "transposed") == "torch"
    assert backend_of_variant("gemm", "triton_from_elsewhere") == "triton"
    assert backend_of_variant("gemm", "something") == "unknown"


def test_a_variant_that_changed_its_parameters_has_two_blocks(store):
    other = Candidate.of("triton_toy", {"tile": 8, "warps": 4})
    made = store(*(measured(toy(1), c, 1.0) for c in (other, tile(8), tile(16))))
    (found,) = load_problems(made, "toy", device="a100")
    assert list(found.table) == [tile(16), tile(8), other]
    assert [block.length for block in found.table.blocks] == [2, 1]


def test_what_is_missing_is_said_with_what_there_is(store):
    made = store(measured(toy(1), VENDOR, 1.0), measured(toy(2), VENDOR, 1.0, workload="other"))
    holds = r"The store holds: toy on a100-sxm4-80gb \(net, other\)\."
    with pytest.raises(ModelError, match=rf"no records of gemm on a100-sxm4-80gb\. {holds}"):
        load_problems(made, "gemm", device="a100")
    with pytest.raises(ModelError, match=rf"no records of toy on h100\. {holds}"):
        load_problems(made, "toy", device="h100")
    with pytest.raises(ModelError, match=rf"of the workload hf\. {holds}"):
        load_problems(made, "toy", device="a100", workloads=["net", "hf"])
    with pytest.raises(ModelError, match=r"no records of h100"):
        load_problems(made, "toy", device=device("h100"))


def test_one_name_of_two_devices_needs_the_fingerprint(store):
    made = store(measured(toy(1), VENDOR, 1.0), measured(toy(1), tile(8), 1.0))
    made.add_device(replace(A100, clock_hz=A100.clock_hz + 1))
    with pytest.raises(ModelError, match=f"2 devices .*{A100.fingerprint}"):
        load_problems(made, "toy", device="a100")
    assert len(load_problems(made, "toy", device=A100.fingerprint)) == 1


def test_an_empty_store_says_so(store):
    with pytest.raises(ModelError, match="The store is empty"):
        load_problems(store(), "toy", device="a100")


def test_half_medians():
    found = half_medians([[1.0], [3.0, 1.0], [], [9.0, 1.0, 4.0, 2.0, 8.0]])
    np.testing.assert_array_equal(found, [[math.nan, 3.0, math.nan, 5.0], [math.nan, 1.0, math.nan, 4.0]])
    assert np.isnan(half_medians([[], []])).all()


def test_the_full_table_holds_failures_in_the_fixed_order():
    data = ProblemData(
        toy(1),
        A100,
        CandidateTable.of([tile(16), tile(8)]),
        np.log([4.0, 5.0]),
        np.full(2, math.nan),
        failed=(tile(32), VENDOR),
    )
    full = full_table(data)
    assert list(full.table) == [VENDOR, tile(16), tile(32), tile(8)]
    np.testing.assert_allclose(full.latency_us, [math.inf, 4.0, math.inf, 5.0])
    assert full.default == 0


def test_the_default_is_the_catalogues():
    assert default_candidate("gemm") == kernels.operation("gemm").default
    assert default_candidate("toy") == VENDOR


def test_the_hash_depends_on_every_fact_and_not_on_the_order_of_items():
    data = [item(toy(1)), item(toy(2))]
    first = dataset_hash(data)
    assert dataset_hash(data[::-1]) == first
    assert len(first) == 16
    changed = [
        [item(toy(1))],
        [item(toy(1)), item(toy(3))],
        [item(toy(1)), item(toy(2), workload="other")],
        [item(toy(1)), item(toy(2), latency_us=(1.0, 2.0000001))],
        [item(toy(1)), item(toy(2), latency_us=(1.0, 2.0, 3.0))],
        [item(toy(1)), replace(item(toy(2)), failed=(tile(64),))],
        [item(toy(1)), replace(item(toy(2)), device=device("h100"))],
        [item(toy(1)), replace(item(toy(2)), table=CandidateTable.of([VENDOR, tile(2)]))],
    ]
    hashes = {dataset_hash(one) for one in changed}
    assert len(hashes) == len(changed)
    assert first not in hashes


def test_shapes_in_both_workloads_leave_the_training_side():
    data = [
        item(toy(1), "a"),
        item(toy(2), "a"),
        item(toy(2, "float16"), "a"),
        item(toy(2), "b"),
        item(toy(3), "b"),
        item(toy(4), "c"),
    ]
    train, test = split_workloads(data, ["a"], ["b"])
    # The float16 problem has the shape of one that is judged.
    assert [one.problem for one in train] == [toy(1)]
    assert [one.problem for one in test] == [toy(2), toy(3)]
    train, test = split_workloads(data, ["a", "c"], ["b"])
    assert [one.problem for one in train] == [toy(1), toy(4)]


def test_workloads_that_cannot_be_split_are_refused():
    data = [item(toy(1), "a"), item(toy(1), "b"), item(toy(2), "b")]
    with pytest.raises(UnknownNameError, match=r"Unknown workload 'z'\. Known: a, b"):
        split_workloads(data, ["a"], ["z"])
    with pytest.raises(KernelcastError, match="b cannot be both trained on and tested on"):
        split_workloads(data, ["a", "b"], ["b"])
    with pytest.raises(ModelError, match=r"training side names no workload\. There are: a, b"):
        split_workloads(data, [], ["b"])
    with pytest.raises(KernelcastError, match="nothing is left to train on"):
        split_workloads(data, ["a"], ["b"])


def test_folds_keep_a_shape_together_and_judge_each_problem_once():
    data = [item(toy(m, dtype)) for m in range(12) for dtype in ("float32", "float16")]
    folds = folds_by_shape(data, 3, 0)
    assert len(folds) == 3
    judged = [one for _, test in folds for one in test]
    assert sorted(map(id, judged)) == sorted(map(id, data))
    for train, test in folds:
        assert len(train) + len(test) == len(data)
        assert not {one.problem.shape for one in train} & {one.problem.shape for one in test}
    again = folds_by_shape(data, 3, 0)
    assert [[one.problem for one in test] for _, test in again] == [
        [one.problem for one in t] for _, t in folds
    ]
    other = folds_by_shape(data, 3, 1)
    assert [[one.problem for one in test] for _, test in other] != [
        [one.problem for one in t] for _, t in folds
    ]


def test_impossible_folds_are_refused():
    data = [item(toy(m)) for m in range(3)]
    with pytest.raises(KernelcastError, match="folds is 1"):
        folds_by_shape(data, 1, 0)
    with pytest.raises(KernelcastError, match="3 shapes cannot be split into 4 folds"):
        folds_by_shape(data, 4, 0)
