"""Facts of compiled candidates as features: the lookup, its JSON, the schema's flag, and occupancy."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math

import numpy as np
import pytest
from cases import for_each

from kernelcast.errors import ArtifactError, InvalidRecordError
from kernelcast.featurizer import FeatureSchema, Featurizer
from kernelcast.featurizer.analytic import resident_blocks
from kernelcast.featurizer.compiled import CompiledFacts, CompiledRow
from kernelcast.featurizer.featurizer import COMPILED_UNITS
from kernelcast.kernels import Block, Candidate, CandidateTable, Device, problem
from kernelcast.kernels.compile_classes import class_key
from kernelcast.kernels.devices import device

A100 = device("a100")
TILE = {"block_m": 64, "block_n": 128, "block_k": 32, "group_m": 8, "num_warps": 4, "num_stages": 4}
LEVELS = {"triton_tiled": {"m": 1, "n": 1, "k": 1, "lda": 3, "ldb": 3}}
ALIGNED = problem("gemm", m=256, n=512, k=1024, dtype="float16")
ALIKE = problem("gemm", m=1024, n=256, k=4096, dtype="float16")
RAGGED = problem("gemm", m=1000, n=512, k=1024, dtype="float16")


def tiled(**changes):
    return Candidate.of("triton_tiled", {**TILE, **changes})


def row(candidate, registers, *, of=ALIGNED, spills=0, shared=1024):
    return CompiledRow(class_key(of, LEVELS["triton_tiled"]), candidate, registers, spills, shared)


ROWS = [
    row(tiled(), 100, spills=3, shared=36_864),
    row(tiled(num_warps=8), 60, shared=36_864),
    row(tiled(block_m=16, num_stages=2), 40),
    row(tiled(), 120, of=RAGGED),
]
FACTS = CompiledFacts("sm80", LEVELS, ROWS)
TABLE = CandidateTable.of(
    [Candidate("vendor"), tiled(), tiled(block_m=32), tiled(num_warps=8), tiled(block_m=16, num_stages=2)]
)


def registers(facts, described, *candidates):
    block = CandidateTable.of(candidates).blocks[0]
    return facts.lookup(described, block)[:, 0].tolist()


def test_facts_hold_for_the_class_and_nothing_else():
    nan = math.nan
    wanted = (
        tiled(num_warps=8),
        tiled(block_m=32),
        tiled(),
        tiled(block_m=16, num_stages=2),
        tiled(num_stages=2),
    )
    for described in (ALIGNED, ALIKE):
        np.testing.assert_array_equal(registers(FACTS, described, *wanted), [60, nan, 100, 40, nan])
    np.testing.assert_array_equal(registers(FACTS, RAGGED, *wanted), [nan, nan, 120, nan, nan])
    other = problem("gemm", m=256, n=512, k=1024, dtype="bfloat16")
    np.testing.assert_array_equal(registers(FACTS, other, *wanted), [nan] * 5)
    (block,) = CandidateTable.of([tiled()]).blocks
    np.testing.assert_array_equal(FACTS.lookup(ALIGNED, block), [[100, 3, 36_864]])
    assert len(FACTS) == 4


def test_other_variants_and_other_parameters_are_not_known():
    for candidate in (
        Candidate("vendor"),
        Candidate.of("triton_tiled", {"block_m": 64}),
        Candidate.of("triton_tiled", {**TILE, "more": 1}),
        Candidate.of("triton_tiled", {**TILE, "block_m": "64"}),
    ):
        assert np.isnan(registers(FACTS, ALIGNED, candidate)).all()
    empty = Block("triton_tiled", {name: np.zeros(0, dtype=int) for name in TILE}, 0)
    assert FACTS.lookup(ALIGNED, empty).shape == (0, 3)


def test_texts_flags_and_numbers_are_told_apart():
    key = class_key(ALIGNED, {})
    rows = [
        CompiledRow(key, Candidate.of("v", {"order": order, "fast": fast}), place, 0, 0)
        for place, (order, fast) in enumerate([("row", True), ("row", False), ("column", True)])
    ]
    facts = CompiledFacts("sm80", {"v": {}}, rows)

    def found(**config):
        return registers(facts, ALIGNED, Candidate.of("v", config))[0]

    assert [
        found(order="row", fast=True),
        found(order="row", fast=False),
        found(order="column", fast=True),
    ] == [0, 1, 2]
    assert math.isnan(found(order="column", fast=False))
    assert math.isnan(found(order="rows", fast=True))
    assert math.isnan(found(order=1, fast=True))
    assert math.isnan(found(order="row", fast=1))


def test_many_rows_are_found_where_they_are():
    generator = np.random.default_rng(0)
    names = ("block_m", "block_n", "num_warps")
    configs = sorted({tuple(int(v) for v in generator.choice([1, 2, 4, 8, 16], 3)) for _ in range(80)})
    candidates = [Candidate.of("v", dict(zip(names, config, strict=True))) for config in configs]
    key = class_key(ALIGNED, {})
    known = candidates[::2]
    facts = CompiledFacts(
        "sm80", {"v": {}}, [CompiledRow(key, each, at, 0, 0) for at, each in enumerate(known)]
    )
    order = generator.permutation(len(candidates))
    found = registers(facts, ALIGNED, *(candidates[at] for at in order))
    expected = [at // 2 if at % 2 == 0 else math.nan for at in order]
    np.testing.assert_array_equal(found, expected)


def test_facts_survive_json_and_their_order_does_not_count():
    content = FACTS.to_json()
    read = CompiledFacts.from_json(content)
    assert read.to_json() == content == CompiledFacts("sm80", LEVELS, ROWS[::-1]).to_json()
    assert (read.target, len(read)) == ("sm80", 4)
    np.testing.assert_array_equal(read.lookup(ALIKE, TABLE.blocks[1]), FACTS.lookup(ALIKE, TABLE.blocks[1]))


@for_each(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"target": "sm80"}',
        FACTS.to_json().replace(b'"levels"', b'"level"'),
        FACTS.to_json().replace(b"36864", b'"x"'),
        FACTS.to_json().replace(b'["block_k","block_m",', b'["block_m",'),
        FACTS.to_json().replace(b'"rows":[[0,', b'"rows":[[9,'),
        FACTS.to_json().replace(b'"rows":[[', b'"rows":[[0,'),
    ],
)
def test_a_broken_file_is_an_error(content):
    with pytest.raises(ArtifactError, match="Not facts of compiled kernels"):
        CompiledFacts.from_json(content)


def test_rows_that_contradict_each_other_are_refused():
    with pytest.raises(InvalidRecordError, match="no levels of other"):
        CompiledFacts("sm80", LEVELS, [CompiledRow("", Candidate("other"), 1, 0, 0)])
    with pytest.raises(InvalidRecordError, match="does not have the parameters"):
        CompiledFacts("sm80", LEVELS, [*ROWS, row(Candidate.of("triton_tiled", {"block_m": 1}), 1)])


# --- the schema and the columns ---


def schema(**options):
    return FeatureSchema.infer([ALIGNED, RAGGED], [TABLE], with_work=True, **options)


def test_the_flag_adds_columns_at_the_end_and_changes_the_hash_only_where_it_is_set():
    plain, flagged = schema(), schema(compile_facts=True)
    assert Featurizer(flagged).names == [*Featurizer(plain).names, *COMPILED_UNITS]
    assert Featurizer(flagged).units[-4:] == list(COMPILED_UNITS.values())
    assert flagged.hash != plain.hash
    # What a schema was before there was the flag.
    before = {field.name for field in dataclasses.fields(FeatureSchema)} - {"compile_facts", "with_device"}
    assert set(plain.to_dict()) == before
    text = json.dumps(plain.to_dict(), sort_keys=True)
    assert plain.hash == hashlib.sha256(text.encode()).hexdigest()[:16]
    for each in (plain, flagged):
        assert FeatureSchema.from_dict(json.loads(json.dumps(each.to_dict()))) == each
    without_work = FeatureSchema.infer([ALIGNED], [TABLE], with_work=False, compile_facts=True)
    assert not without_work.compile_facts


def test_the_columns_hold_the_facts_and_what_follows_from_them():
    x = Featurizer(schema(compile_facts=True), FACTS)(ALIKE, TABLE, A100)
    nan = math.nan
    np.testing.assert_array_equal(x[:, -4], np.float32([nan, 100, nan, 60, 40]))
    np.testing.assert_array_equal(x[:, -3], np.float32([nan, 3, nan, 0, 0]))
    np.testing.assert_array_equal(x[:, -2], np.float32([nan, 36_864, nan, 36_864, 1024]))
    # 128 threads of 104 registers: 4 blocks, and 4 of 37 KiB; 256 of 64: 4; 128 of 40: 12 (of 2 KiB, 82; of threads, 16).
    np.testing.assert_array_equal(x[:, -1], np.float32([nan, 4, nan, 4, 12]))
    np.testing.assert_array_equal(x[:, :-4], Featurizer(schema())(ALIKE, TABLE, A100))


def test_without_facts_or_on_another_architecture_the_columns_are_empty():
    flagged = schema(compile_facts=True)
    assert np.isnan(Featurizer(flagged)(ALIKE, TABLE, A100)[:, -4:]).all()
    assert np.isnan(Featurizer(flagged, FACTS)(ALIKE, TABLE, device("h100"))[:, -4:]).all()
    np.testing.assert_array_equal(
        Featurizer(schema(), FACTS)(ALIKE, TABLE, A100), Featurizer(schema())(ALIKE, TABLE, A100)
    )


def test_resident_blocks():
    def blocks(registers, shared, warps, where=A100):
        facts = np.array([[registers, 0.0, shared]])
        return float(resident_blocks(facts, np.array([float(warps)]), where)[0])

    assert blocks(32, 0, 4) == 16  # 2,048 threads of 128
    assert blocks(32, 0, 1) == 32  # no more blocks than that
    assert blocks(255, 0, 8) == 1  # 65,536 registers, 256 a thread
    assert blocks(33, 0, 8) == 6  # 40 a thread
    assert blocks(33, 163 * 1024, 8) == 1  # all of a core but the KiB that the system keeps
    assert blocks(33, 164 * 1024, 8) == 0
    assert blocks(64, 32 * 1024, 4, device("mi300x")) == 2  # AMD keeps none: 64 KiB in halves
    assert math.isnan(blocks(math.nan, 0, 4))
    assert math.isnan(blocks(32, 0, math.nan))
    assert blocks(999, 10**9, 4, Device("unknown", "gpu", "nvidia", "sm80", 1)) == 32
