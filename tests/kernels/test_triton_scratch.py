"""The scratch of output tiles against what Triton 3.9 allotted, for tiles whose operands take less."""

from __future__ import annotations

import numpy as np
from cases import for_each
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.kernels.triton_scratch import OutputTile, scratch_bytes, tensor_memory_scratch_bytes

#: (target, aligned, element bytes, block_m, block_n, warps): bytes of shared memory, compiled with block_k=16 and one stage.
COMPILED = {
    # mma.sync, float32 parts: full, halves, quarters.
    ("sm80", True, 4, 64, 64, 8): 16384,
    ("sm80", True, 4, 64, 64, 4): 8192,
    ("sm80", True, 4, 128, 128, 4): 16384,
    ("sm80", True, 4, 128, 128, 8): 16384,
    ("sm80", True, 4, 128, 64, 8): 32768,
    ("sm80", True, 4, 256, 128, 8): 32768,
    ("sm80", True, 4, 32, 64, 1): 4096,
    ("sm80", False, 4, 128, 128, 8): 32768,
    ("sm80", False, 4, 32, 256, 8): 32768,
    ("sm80", False, 4, 64, 128, 2): 8192,
    # mma.sync, 16 bits.
    ("sm80", True, 2, 64, 128, 4): 8192,
    ("sm80", True, 2, 64, 128, 8): 16384,
    ("sm80", True, 2, 128, 128, 4): 16384,
    ("sm80", True, 2, 128, 128, 8): 32768,
    ("sm80", True, 2, 256, 128, 8): 65536,
    ("sm80", False, 2, 128, 64, 4): 16384,
    ("sm80", False, 2, 64, 256, 4): 16384,
    ("sm80", False, 2, 64, 32, 1): 4096,
    # wgmma.
    ("sm90", True, 4, 128, 128, 8): 65536,
    ("sm90", True, 4, 128, 128, 4): 32768,
    ("sm90", True, 4, 256, 64, 4): 16384,
    ("sm90", False, 4, 256, 64, 4): 32768,
    ("sm90", True, 2, 128, 256, 8): 32768,
    ("sm90", True, 2, 128, 128, 8): 32768,
    ("sm90", True, 2, 64, 128, 4): 8192,
    ("sm90", False, 2, 64, 128, 4): 8192,
    ("sm90", False, 2, 256, 128, 8): 65536,
    # mma.sync on a chip that stores matrices.
    ("sm90", True, 2, 32, 64, 8): 4096,
    ("sm90", False, 2, 32, 128, 8): 8192,
    ("sm90", False, 2, 64, 32, 2): 4096,
}
#: Tiles whose scratch is no larger than their operands.
HIDDEN = {
    ("sm80", True, 2, 128, 256, 8): 12288,
    ("sm80", True, 2, 64, 256, 4): 10240,
    ("sm80", True, 2, 128, 64, 2): 6144,
    ("sm80", True, 2, 256, 32, 8): 9216,
    ("sm80", True, 4, 64, 64, 2): 4096,
    ("sm80", True, 2, 64, 64, 1): 4096,
    ("sm90", True, 2, 128, 128, 4): 8192,
    ("sm90", False, 2, 64, 256, 4): 10240,
    ("sm90", True, 2, 32, 256, 8): 9216,
    ("sm90", True, 2, 32, 64, 2): 3072,
    ("sm90", False, 2, 128, 64, 2): 6144,
    ("sm90", False, 2, 64, 64, 2): 4096,
}


def tile(aligned, element_bytes, block_m, block_n, warps, groups, matrices=True):
    columns = (np.array([value]) for value in (block_m, block_n, warps))
    return OutputTile(*columns, element_bytes, aligned, np.array([groups]), matrices)


def scratch_of(target, aligned, element_bytes, block_m, block_n, warps):
    groups = target == "sm90" and block_m >= 64 and warps >= 4
    described = tile(aligned, element_bytes, block_m, block_n, warps, groups, target == "sm90")
    return float(scratch_bytes(described)[0])


@for_each("key", COMPILED, ids=str)
def test_what_the_compiler_allotted(key):
    assert scratch_of(*key) == COMPILED[key]


@for_each("key", HIDDEN, ids=str)
def test_what_hides_behind_the_operands(key):
    assert scratch_of(*key) <= HIDDEN[key]


def test_tensor_memory_gives_a_quarter_of_a_large_aligned_tile_and_all_of_others():
    def found(aligned, size, m, n, warps):
        return float(tensor_memory_scratch_bytes(tile(aligned, size, m, n, warps, True))[0])

    assert found(True, 4, 128, 256, 8) == 32768
    assert found(True, 2, 128, 256, 8) == 16384
    assert found(True, 2, 64, 64, 8) == 8192
    assert found(True, 2, 64, 32, 4) == 4096
    assert found(False, 2, 128, 128, 4) == 32768
    assert found(False, 4, 256, 64, 4) == 32768


SIDES = st.sampled_from([16, 32, 64, 128, 256])


@settings(deadline=None)
@given(
    st.lists(st.tuples(SIDES, SIDES, st.sampled_from([1, 2, 4, 8]), st.booleans()), min_size=1, max_size=20),
    st.sampled_from([2, 4]),
    st.booleans(),
)
def test_columns_are_as_their_rows_and_parts_are_powers_of_two(rows, size, aligned):
    m, n, w, groups = (np.array(column) for column in zip(*rows, strict=True))
    groups = groups & (m >= 64) & (w >= 4)
    for function in (scratch_bytes, tensor_memory_scratch_bytes):
        found = function(OutputTile(m, n, w, size, aligned, groups, True))
        for at in range(len(rows)):
            alone = function(tile(aligned, size, int(m[at]), int(n[at]), int(w[at]), bool(groups[at])))
            assert found[at] == alone[0]
        assert (found <= size * m * n).all()
        parts = np.log2(size * m * n / found[found > 0]) if (found > 0).all() else np.zeros(1)
        np.testing.assert_array_equal(parts, parts.round())
