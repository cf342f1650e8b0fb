"""Analytic costs against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.featurizer import analytic_costs
from kernelcast.featurizer.analytic import ANALYTIC_UNITS
from kernelcast.kernels import Device, Problem, Work

#: Round numbers: 100 TFLOP/s, 1 TB/s.
GPU = Device(
    "gpu", "gpu", "nvidia", "sm80", 100, warp_size=32, max_threads_per_core=2048, registers_per_core=65536,
    shared_bytes_per_core=160_000, memory_bandwidth=1e12,
    peak_flops=(("float32", 1e13), ("tf32", 5e13), ("float16", 1e14)),
)  # fmt: skip
CPU = Device(
    "cpu", "cpu", "intel", "x86", 4, warp_size=1, memory_bandwidth=1e10, peak_flops=(("float32", 1e11),)
)
HALF = Problem("toy", (), "float16")


def costs(work, *, problem=HALF, device=GPU, rows=1):
    found = analytic_costs(problem, work.columns(rows), device)
    assert list(found) == list(ANALYTIC_UNITS)
    return {name: column.tolist() for name, column in found.items()}


def test_a_library_is_a_roofline_with_a_launch():
    found = costs(Work(flops=np.array([2e9, 2e9]), traffic_bytes=np.array([1e7, 5e7])), rows=2)
    assert found["compute_us"] == pytest.approx([20.0, 20.0])  # 2e9 / 1e14 s
    assert found["memory_us"] == pytest.approx([10.0, 50.0])  # 1e7 / 1e12 s
    assert found["launch_us"] == [4.0, 4.0]
    assert found["roofline_us"] == pytest.approx([24.0, 54.0])
    assert np.isnan(found["waves"] + found["tail"] + found["busy_share"] + found["step_us"]).all()


def test_scratch_is_written_and_read_and_every_call_is_launched():
    found = costs(Work(flops=1e9, traffic_bytes=0.0, scratch_bytes=3e6, calls=2.0))
    assert found["scratch_us"] == pytest.approx([6.0])
    assert found["launch_us"] == [8.0]
    assert found["roofline_us"] == pytest.approx([10.0 + 6.0 + 8.0])


def test_a_core_holds_what_shared_memory_registers_and_threads_allow():
    def blocks(**work):
        return costs(Work(1.0, 1.0, **work))["blocks_per_core"]

    assert blocks(warps=4.0, shared_bytes=30_000.0, accumulators=24.0) == [5]  # 160,000 / 30,000
    assert blocks(warps=4.0, shared_bytes=10_000.0, accumulators=88.0) == [4]  # 65,536 / (128 * (88 + 40))
    assert blocks(warps=16.0, shared_bytes=10_000.0, accumulators=8.0) == [2]  # 65,536 / (512 * 48)
    assert blocks(warps=8.0, shared_bytes=0.0, accumulators=-39.0) == [8]  # 2,048 / 256
    assert blocks(warps=1.0, shared_bytes=1.0, accumulators=-39.0) == [32]
    assert blocks(warps=32.0, shared_bytes=10.0**6, accumulators=500.0) == [1]
    assert blocks() == [32]
    bare = dataclasses.replace(GPU, shared_bytes_per_core=0, registers_per_core=0, max_threads_per_core=0)
    assert costs(Work(1.0, 1.0, warps=4.0, shared_bytes=1e6), device=bare)["blocks_per_core"] == [32]
    assert costs(Work(1.0, 1.0, warps=4.0), device=CPU)["blocks_per_core"] == [1]


def test_waves_and_their_tail():
    # Shared memory holds 2 blocks a core: 200 slots.
    work = Work(
        flops=1e10, traffic_bytes=0.0, programs=np.array([200, 201, 400, 150, 50, 0]), warps=4.0,
        shared_bytes=80_000.0, accumulators=8.0, inner_steps=10.0,
    )  # fmt: skip
    found = costs(work, rows=6)
    assert found["blocks_per_core"] == [2] * 6
    assert found["waves"] == pytest.approx([1.0, 1.005, 2.0, 0.75, 0.25, 0.005])
    assert found["tail"] == pytest.approx([1.0, 400 / 201, 1.0, 200 / 150, 4.0, 200.0])
    assert found["busy_share"] == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.5, 0.01])
    # 100 us of arithmetic: a second, almost empty wave doubles it; half of the cores idle doubles it.
    assert found["roofline_us"] == pytest.approx([104.0, 100 * 400 / 201 + 4, 104.0, 104.0, 204.0, 10_004.0])


def test_the_time_of_one_step_of_the_loop():
    work = Work(
        flops=0.0, traffic_bytes=6e7, programs=250.0, warps=4.0, shared_bytes=80_000.0, inner_steps=10.0
    )
    assert costs(work)["step_us"] == pytest.approx([60 / (2 * 10)])


def test_a_cpu_launches_faster_and_its_cores_hold_one_task_each():
    work = Work(flops=1e6, traffic_bytes=1e5, programs=np.array([2.0, 4.0, 6.0]))
    found = costs(work, problem=Problem("toy", (), "float32"), device=CPU, rows=3)
    assert found["launch_us"] == [3.0] * 3
    assert found["compute_us"] == pytest.approx([10.0] * 3)
    assert found["memory_us"] == pytest.approx([10.0] * 3)
    assert found["waves"] == pytest.approx([0.5, 1.0, 1.5])
    assert found["roofline_us"] == pytest.approx([20 + 3, 10 + 3, 10 * 8 / 6 + 3])


def test_the_peak_is_that_of_the_dtype():
    def compute(dtype, **switches):
        return costs(Work(1e9, 0.0), problem=Problem("toy", (), dtype, **switches))["compute_us"][0]

    assert compute("float16") == pytest.approx(10)
    assert compute("float32") == pytest.approx(100)
    assert compute("float32", allow_tf32=True) == pytest.approx(20)
    assert compute("bfloat16") == pytest.approx(100)  # not listed: float32's


def test_unknown_facts_leave_their_term_out():
    unknown = Device("unknown", "gpu", "nvidia", "sm80", 1)
    found = costs(Work(1e12, 1e12, scratch_bytes=1e9, calls=3.0), device=unknown)
    assert found["compute_us"] == found["memory_us"] == found["scratch_us"] == [0.0]
    assert found["roofline_us"] == [12.0]


amounts = st.one_of(st.just(0.0), st.floats(1.0, 1e30))
unknowns = st.one_of(st.just(math.nan), amounts)


@given(
    st.builds(
        Work, flops=amounts, traffic_bytes=amounts, scratch_bytes=amounts, calls=st.floats(1, 1e6),
        programs=unknowns, warps=st.one_of(st.just(math.nan), st.floats(1, 32)), shared_bytes=unknowns,
        accumulators=unknowns, inner_steps=unknowns,
    ),
    st.sampled_from([GPU, CPU, Device("unknown", "gpu", "amd", "gfx942", 7)]),
)  # fmt: skip
def test_the_roofline_is_finite_and_never_below_any_of_its_parts(work, device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {name: column[0] for name, column in costs(work, device=device).items()}
    assert math.isfinite(found["roofline_us"])
    for part in ("compute_us", "memory_us", "scratch_us", "launch_us"):
        assert found["roofline_us"] >= found[part] * (1 - 1e-12)
    assert found["blocks_per_core"] >= 1
    if not math.isnan(work.programs):
        assert found["tail"] >= 1 - 1e-12
        assert 0 < found["busy_share"] <= 1
