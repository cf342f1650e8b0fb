"""The analytic baseline ranks by the roofline, and claims no more."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cases import for_each

from kernelcast import kernels
from kernelcast.costmodel import AnalyticModel
from kernelcast.kernels import Candidate, CandidateTable, Device, Problem

#: 1 TFLOP/s and 100 GB/s.
CPU = Device(
    "cpu", "cpu", "intel", "x86", 4, warp_size=1, memory_bandwidth=1e11, peak_flops=(("float32", 1e12),)
)


def test_predictions_are_the_roofline_by_hand():
    described = kernels.problem("gemm", m=100, n=200, k=500, threads=4)
    table = CandidateTable.of(
        [Candidate("vendor"), *(Candidate.of("transposed", {"output": how}) for how in ("view", "copy"))]
    )
    found = AnalyticModel().predict(described, table, CPU)
    compute_us = 2 * 100 * 200 * 500 / 1e12 * 1e6  # 20
    memory_us = 4 * (100 * 500 + 500 * 200 + 100 * 200) / 1e11 * 1e6  # 6.8
    copy_us = 2 * 4 * 100 * 200 / 1e11 * 1e6
    assert compute_us > memory_us
    np.testing.assert_allclose(
        found.latency_us, [compute_us + 3, compute_us + 3, compute_us + copy_us + 6], rtol=1e-12
    )
    assert found.covered.all()
    assert found.error_log.tolist() == [0.7] * 3
    assert found.order().tolist() == [0, 1, 2]


def test_other_variants_are_not_covered_and_rank_last():
    described = kernels.problem("gemm", m=100, n=200, k=500)
    table = CandidateTable.of([Candidate("b"), Candidate("vendor"), Candidate.of("a", {"x": 1})])
    found = AnalyticModel().predict(described, table, CPU)
    assert found.covered.tolist() == [False, True, False]
    assert found.order().tolist() == [1, 0, 2]
    assert np.isfinite(found.log_latency).all()


def test_an_operation_that_is_not_in_the_catalogue_keeps_the_tables_order():
    found = AnalyticModel().predict(
        Problem("toy", (("m", 1),), "float32"), CandidateTable.of([Candidate("b"), Candidate("a")]), CPU
    )
    assert not found.covered.any()
    assert found.order().tolist() == [0, 1]


def test_an_empty_table_and_an_unknown_device():
    described = kernels.problem("gemm", m=0, n=200, k=500)
    assert len(AnalyticModel().predict(described, CandidateTable([]), CPU).order()) == 0
    unknown = Device("unknown", "gpu", "nvidia", "sm80", 1)
    table = kernels.candidates(described, unknown, subset="default")
    found = AnalyticModel().predict(described, table, unknown)
    assert np.isfinite(found.log_latency).all()
    assert found.latency_us[0] == pytest.approx(4.0)


@for_each("name", kernels.operation_names())
def test_every_candidate_of_every_operation_has_a_finite_prediction(name):
    schema = kernels.operation(name).schema
    for size in (1, 64):
        described = schema.problem(**{dim.name: size for dim in schema.dims}, threads=2)
        for where in (
            CPU,
            Device(
                "gpu", "gpu", "nvidia", "sm80", 108, memory_bandwidth=2e12, peak_flops=(("float32", 2e13),)
            ),
        ):
            table = kernels.candidates(described, where, subset="default")
            found = AnalyticModel().predict(described, table, where)
            assert found.covered.all()
            assert np.isfinite(found.log_latency).all()
            assert (found.latency_us >= 1e-3 * (1 - 1e-9)).all()


def test_more_work_takes_longer():
    def predicted(k):
        table = CandidateTable.of([Candidate("vendor")])
        return AnalyticModel().predict(kernels.problem("gemm", m=512, n=512, k=k), table, CPU).latency_us[0]

    times = [predicted(k) for k in (1, 64, 1024, 65536)]
    assert times == sorted(times)
    assert times[-1] / times[-2] == pytest.approx(64, rel=0.01)
    assert not math.isinf(predicted(2**39))
