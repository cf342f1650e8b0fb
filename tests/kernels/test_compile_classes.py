"""Classes of problems whose kernels have the same machine code."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.kernels import CandidateTable, problem, variant
from kernelcast.kernels.compile import candidate_spec, code_key
from kernelcast.kernels.compile_classes import EXACT, class_key, find_levels, sizes_of, view

pytest.importorskip("triton")

GEMMS = [
    problem("gemm", m=m, n=n, k=k, dtype="float16", layout="nt")
    for m in (1, 100, 4096, 1577)
    for n in (4096, 51)
    for k in (64, 4096, 1003)
]
CONFIGS = {
    name: list(CandidateTable([variant("gemm", name).space("default")]))
    for name in ("triton_tiled", "triton_split_k")
}


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize(
    ("size", "levels"),
    [
        (0, [[0]] * 4),
        (1, [[1]] * 4),
        (7, [[-1, 0], [-2, 0], [-3, 0, 3], [7]]),
        (8, [[-1, 0], [-2, 3], [-3, 3, 3], [8]]),
        (48, [[-1, 1], [-2, 4], [-3, 4, 6], [48]]),
        (512, [[-1, 1], [-2, 8], [-3, 8, 9], [512]]),
        (1024 * 3, [[-1, 1], [-2, 8], [-3, 8, 12], [3072]]),
    ],
)
def test_what_each_level_sees(size, levels):
    assert [view(size, level) for level in range(EXACT + 1)] == levels


def test_levels_of_variants_that_pad_and_of_those_that_mask():
    tiled = find_levels(GEMMS, CONFIGS["triton_tiled"], "sm80")
    # Whether a tile divides a size is a constant, and the largest tile is 256. Leading dimensions never occurred.
    assert tiled == {"m": 1, "n": 1, "k": 1, "lda": EXACT, "ldb": EXACT}
    softmax = variant("softmax", "triton_row")
    configs = list(CandidateTable([softmax.space()]))
    problems = [
        problem("softmax", rows=rows, columns=columns, dtype="float16")
        for rows in (1, 96, 4096)
        for columns in (51, 1000, 4096)
    ]
    # A row is padded to a power of two.
    assert find_levels(problems, configs, "sm80") == {"rows": 0, "columns": 2}


def test_a_size_that_matters_only_beside_another_counts_as_it_is():
    """With as many heads of k as of q their ratio is 1, which Triton makes a constant; three are an argument."""
    configs = list(CandidateTable([variant("attention", "triton_flash").space("default")]))[:4]
    problems = [
        problem(
            "attention", batch=2, heads=8, kv_heads=kv, q_len=128, kv_len=128, head_dim=64, dtype="float16"
        )
        for kv in (8, 2)
    ]
    levels = find_levels(problems, configs, "sm80")
    assert levels["heads"] == levels["head_dim"] == EXACT
    assert levels["batch"] < EXACT


def test_the_order_of_the_problems_does_not_count():
    found = find_levels(GEMMS, CONFIGS["triton_tiled"], "sm80")
    assert find_levels(GEMMS[::-1], CONFIGS["triton_tiled"], "sm80") == found


def test_a_variant_that_breaks_on_every_other_size_is_exact(monkeypatch):
    tiled = variant("gemm", "triton_tiled")
    real = type(tiled).compile_spec

    def picky(self, described, config, architecture=""):
        if described not in GEMMS:
            raise ValueError("never heard of it")
        return real(self, described, config, architecture)

    monkeypatch.setattr(type(tiled), "compile_spec", picky)
    assert set(find_levels(GEMMS, CONFIGS["triton_tiled"], "sm80").values()) == {EXACT}


def test_the_key_holds_what_is_no_size_and_large_problems_as_they_are():
    levels = dict.fromkeys(("m", "n", "k", "lda", "ldb"), 0)

    def key(**changes):
        values = {"m": 64, "n": 64, "k": 64, "dtype": "float16", **changes}
        return class_key(problem("gemm", **values), levels)

    assert key(m=128, k=4096) == key()
    different = [key(), key(m=65), key(m=1), key(dtype="bfloat16"), key(layout="nt"), key(lda=96)]
    different += [key(dtype="float32"), key(dtype="float32", allow_tf32=True)]
    # From a GiB on, offsets may count in 64 bits.
    different += [key(m=2**15, n=2**15), key(m=2**15, n=2**15 + 16)]
    assert len(set(different)) == len(different)
    assert class_key(problem("gemm", m=64, n=64, k=64), {}) != class_key(
        problem("gemm", m=128, n=64, k=64), {}
    )


SIZE = st.sampled_from(
    [1, 3, 16, 17, 48, 64, 96, 100, 128, 200, 256, 512, 768, 1000, 1024, 3072, 4096, 4112, 8192]
)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "gfx942"])
@pytest.mark.parametrize("name", ["triton_tiled", "triton_split_k"])
def test_members_of_a_class_have_the_same_code(name, target):
    levels = find_levels(GEMMS, CONFIGS[name], target)
    seen: dict[tuple[str, str], str] = {}

    @settings(max_examples=examples(80), deadline=None, derandomize=True)
    @given(SIZE, SIZE, SIZE, st.sampled_from(CONFIGS[name]))
    def run(m, n, k, candidate):
        described = problem("gemm", m=m, n=n, k=k, dtype="float16", layout="nt")
        code = code_key(candidate_spec(described, candidate, target), target)
        assert seen.setdefault((class_key(described, levels), candidate.key), code) == code

    run()


def test_sizes_are_dimensions_and_numeric_options():
    described = problem("attention", batch=1, heads=2, q_len=3, kv_len=4, head_dim=5, causal=True)
    assert set(sizes_of(described)) >= {"batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"}
    assert "causal" not in sizes_of(described)
    assert sizes_of(problem("gemm", m=1, n=2, k=3, lda=8)) == {"m": 1, "n": 2, "k": 3, "lda": 0, "ldb": 0}
