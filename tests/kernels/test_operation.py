"""The base contracts: result checks, spaces, rules and refusals, source hashes, poisoned outputs."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.errors import InvalidRecordError
from kernelcast.kernels import (
    Candidate,
    Device,
    Operation,
    Parameter,
    Problem,
    ProblemSchema,
    Rule,
    Tolerance,
    Variant,
    Work,
)

CPU = Device("cpu", "cpu", "intel", "x86_64-avx512", 2, warp_size=1)
PROBLEM = Problem("toy", (("m", 6),), "float32")


class Toy(Operation):
    name = "toy"
    doc = "a vector"
    schema = ProblemSchema("toy", (), ("float32",))

    def make_inputs(self, problem, *, seed, device):
        return ()

    def reference(self, problem, *inputs):
        raise NotImplementedError

    def tolerance(self, problem):
        return Tolerance(relative=0.5, absolute=0.25)

    def flops(self, problem):
        return 1.0

    def traffic_bytes(self, problem):
        return 1.0


class Tiled(Variant):
    name = "tiled"
    backend = "user"
    doc = "for the tests"
    parameters = (
        Parameter("block", (1, 2, 4, 8), "rows", quick=(2, 8)),
        Parameter("order", ("row", "column"), "of the tiles"),
        Parameter("fast", (False, True), "a switch", quick=(True,)),
    )
    rules = (
        Rule(
            "block-fits",
            "a block is no larger than the vector",
            check=lambda problem, columns, device: columns["block"] <= problem["m"],
            explain=lambda problem, columns, device: f"{columns['block'][0]} > {problem['m']}",
        ),
        Rule(
            "fast-by-row",
            "the fast way goes by row",
            check=lambda problem, columns, device: ~columns["fast"] | (columns["order"] == "row"),
        ),
        Rule("cpu", "it runs on a CPU", check=lambda problem, columns, device: device.kind == "cpu"),
    )

    def work(self, problem, columns, device):
        return Work(1.0, 1.0)

    def build(self, problem, config):
        raise NotImplementedError


def verdict(output, reference):
    import torch

    return Toy().check(
        PROBLEM, torch.tensor(reference, dtype=torch.float64), torch.tensor(output, dtype=torch.float32)
    )


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("output", "reference"),
    [
        ([1.0, -2.0], [1.0, -2.0]),
        ([4.25], [3.0]),  # 0.25 + 0.5 * 3 = 1.75
        ([1.25], [3.0]),
        ([0.25, -0.25], [0.0, 0.0]),
        ([INF, -INF, NAN], [INF, -INF, NAN]),
        ([], []),
    ],
)
def test_right_results_pass(output, reference):
    assert verdict(output, reference) is None


@for_each(
    ("output", "reference", "said"),
    [
        ([4.76, 3.0], [3.0, 3.0], "1 of 2 elements differ .* 0.25 .* 0.5 .*largest difference is 1.76"),
        ([0.26], [0.0], "largest difference is 0.26"),
        ([NAN, 1.0], [1.0, 1.0], "1 of 2 .* difference is inf, 1 are NaN"),
        ([1.0], [NAN], "1 of 1"),
        ([INF], [1e30], "difference is inf"),
        ([INF], [-INF], "1 of 1"),
        ([1.0], [INF], "1 of 1"),
        ([NAN], [INF], "1 are NaN"),
    ],
)
def test_wrong_results_are_described(output, reference, said):
    import re

    found = verdict(output, reference)
    assert found is not None
    assert re.search(said, found), found


@pytest.mark.parametrize("place", [0, 65_535, 65_536, 131_072, 131_999])
@pytest.mark.parametrize("value", [2.0, math.nan, math.inf])
def test_one_wrong_element_of_many_is_found_wherever_it_is(place, value):
    import torch

    reference = torch.ones(132, 1000, dtype=torch.float64)
    output = reference.float()
    assert Toy().check(PROBLEM, reference, output) is None
    output.view(-1)[place] = value
    assert Toy().check(PROBLEM, reference, output).startswith("1 of 132000 elements")
    assert (reference == 1.0).all()


def test_elements_are_compared_in_their_places_whatever_the_strides():
    import torch

    reference = torch.arange(200_000, dtype=torch.float64).reshape(400, 500).T
    output = reference.float().contiguous()
    assert not reference.is_contiguous()
    before = output.clone()
    assert Toy().check(PROBLEM, reference, output) is None
    assert torch.equal(output, before)
    # The same numbers in the order of the memory.
    wrong = torch.arange(200_000, dtype=torch.float32).reshape(500, 400)
    assert "elements differ" in Toy().check(PROBLEM, reference, wrong)


def test_an_infinite_reference_allows_no_other_value():
    import torch

    reference = torch.tensor([1.0, math.inf, math.nan], dtype=torch.float64)
    assert Toy().check(PROBLEM, reference, reference.float()) is None
    assert Toy().check(PROBLEM, reference, torch.tensor([1.0, 5.0, math.nan])).startswith("1 of 3")
    assert Toy().check(PROBLEM, reference[:2], torch.tensor([1.0, 5.0])).startswith("1 of 2")


def test_another_shape_or_dtype_is_wrong():
    import torch

    assert "has shape (2,); the reference has (1, 2)" in Toy().check(
        PROBLEM, torch.zeros(1, 2, dtype=torch.float64), torch.zeros(2)
    )
    assert "torch.float16; it must be float32" in Toy().check(
        PROBLEM, torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float16)
    )
    assert Toy().check(PROBLEM, torch.zeros(0, 3), torch.zeros(3, 0)) is not None


def test_the_default_is_the_vendor():
    assert Toy().default == Candidate("vendor")


def test_the_space_is_the_product_the_last_parameter_fastest():
    block = Tiled().space()
    assert block.length == 16
    assert block.at(0) == Candidate.of("tiled", {"block": 1, "order": "row", "fast": False})
    assert block.at(1) == Candidate.of("tiled", {"block": 1, "order": "row", "fast": True})
    assert block.at(2) == Candidate.of("tiled", {"block": 1, "order": "column", "fast": False})
    assert block.at(15) == Candidate.of("tiled", {"block": 8, "order": "column", "fast": True})
    assert len({block.at(row) for row in range(16)}) == 16


def test_the_quick_subset_keeps_all_values_where_none_are_named():
    block = Tiled().space("default")
    assert {block.at(row) for row in range(block.length)} == {
        Candidate.of("tiled", {"block": rows, "order": order, "fast": True})
        for rows in (2, 8)
        for order in ("row", "column")
    }


def test_a_variant_without_parameters_is_one_candidate():
    class Plain(Tiled):
        parameters = ()
        rules = ()

    block = Plain().space()
    assert (block.length, block.columns) == (1, {})
    assert block.at(0) == Candidate("tiled")
    assert Plain().legal(PROBLEM, CPU, block).tolist() == [True]


@for_each(
    "values",
    [(), (1, 1), (1, True), (0, "0"), (False, 0), (1, "a"), (2**63,), (2**64,), (1.5,), (None,)],
    ids=str,
)
def test_a_parameter_whose_values_are_no_column_is_refused(values):
    with pytest.raises(InvalidRecordError):
        Parameter("p", values, "")


def test_quick_values_are_among_the_values():
    with pytest.raises(InvalidRecordError, match="not among"):
        Parameter("p", (1, 2), "", quick=(2, 3))


def test_a_refusal_names_the_first_broken_rule_and_what_was_seen():
    found = {refusal.candidate: refusal for refusal in Tiled().refusals(PROBLEM, CPU, Tiled().space())}
    assert len(found) == 4 + 3
    both = found[Candidate.of("tiled", {"block": 8, "order": "column", "fast": True})]
    assert (both.rule, both.seen) == ("block-fits", "8 > 6")
    assert str(both) == (
        "tiled(block=8, fast=True, order=column): a block is no larger than the vector (8 > 6)"
    )
    fast = found[Candidate.of("tiled", {"block": 1, "order": "column", "fast": True})]
    assert str(fast) == "tiled(block=1, fast=True, order=column): the fast way goes by row"


@given(st.integers(0, 10), st.booleans())
def test_every_row_is_legal_or_refused_once(m, cpu):
    problem = Problem("toy", (("m", m),), "float32")
    device = CPU if cpu else Device("gpu", "gpu", "nvidia", "sm80", 108)
    block = Tiled().space()
    legal = Tiled().legal(problem, device, block)
    refused = [refusal.candidate for refusal in Tiled().refusals(problem, device, block)]
    assert sorted(refused, key=str) == sorted((block.at(row) for row in np.flatnonzero(~legal)), key=str)
    assert legal.sum() == (sum(rows <= m for rows in (1, 2, 4, 8)) * 3 if cpu else 0)


def test_the_source_hash_follows_the_text_of_the_module(tmp_path):
    script = tmp_path / "mine.py"
    code = (
        "from kernelcast.kernels import Variant\n"
        "class Mine(Variant):\n"
        "    def work(self, problem, columns, device): ...\n"
        "    def build(self, problem, config): ...\n"
    )
    show = "import sys; sys.path.insert(0, sys.argv[1]); import mine; print(mine.Mine.source_hash())"
    hashes = []
    for text in (code, code + "# changed\n", code):
        script.write_text(text)
        hashes.append(run("-B", "-c", show, str(tmp_path)))
    assert len(hashes[0]) == 16
    assert hashes[0] == hashes[2] != hashes[1]
    # A script is the module __main__, of which importlib finds no source.
    script.write_text(code + "print(Mine.source_hash())\n")
    as_script = run(str(script))
    script.write_text(code + "print( Mine.source_hash())\n")
    assert len(as_script) == 16
    assert as_script != run(str(script))
    assert len(run("-c", code + "print(Mine.source_hash())")) == 16


def test_the_source_hash_covers_the_modules_named():
    class Named(Tiled):
        source_modules = ("kernelcast.kernels.rule",)

    class Missing(Tiled):
        source_modules = ("kernelcast.kernels.no_such_module",)

    assert len({Tiled.source_hash(), Named.source_hash(), Missing.source_hash()}) == 3


def test_work_gives_one_float_a_row():
    columns = Work(flops=np.array([1, 2, 3]), traffic_bytes=7, warps=np.array([4, 4, 8])).columns(3)
    assert all(column.shape == (3,) and column.dtype == np.float64 for column in columns.values())
    assert columns["flops"].tolist() == [1, 2, 3]
    assert columns["traffic_bytes"].tolist() == [7, 7, 7]
    assert columns["scratch_bytes"].tolist() == [0, 0, 0]
    assert columns["calls"].tolist() == [1, 1, 1]
    assert np.isnan(columns["programs"]).all()
    assert list(columns) == [
        "flops", "traffic_bytes", "scratch_bytes", "calls", "programs", "warps", "shared_bytes", "accumulators",
        "inner_steps",
    ]  # fmt: skip


def test_outputs_are_poisoned_within_the_block_and_thread_alone(monkeypatch):
    import threading

    import torch

    from kernelcast.kernels.memory import empty, poisoned

    # What uninitialised memory holds is chance, an earlier poison included: let it hold zeros.
    monkeypatch.setattr(torch, "empty", torch.zeros)
    with poisoned():
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
            assert empty((3, 2), dtype=dtype, device="cpu").isnan().all(), dtype
        assert (empty((2,), dtype=torch.int8, device="cpu") == 127).all()
        assert (empty((2,), dtype=torch.int32, device="cpu") == 2**31 - 1).all()
        assert empty((2,), dtype=torch.bool, device="cpu").all()
        assert empty((0, 4), dtype=torch.float32, device="cpu").shape == (0, 4)
        seen = []

        def elsewhere():
            seen.append(empty((64,), dtype=torch.float32, device="cpu").isnan().any().item())

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert seen == [False]
    with pytest.raises(ZeroDivisionError), poisoned():
        1 / 0  # noqa: B018
    assert not empty((64,), dtype=torch.float32, device="cpu").isnan().any()


def run(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()
