"""What the compiler makes of mixed_gemm's Triton kernels, and the instructions that they bring themselves."""

from __future__ import annotations

import re

import numpy as np
import pytest
from triton_lab import DEVICES, assert_compiles, compiler  # noqa: F401

from kernelcast.kernels import Candidate, problem, variant

TILE = {"block_m": 16, "block_n": 64, "block_k": 128, "group_m": 8, "num_warps": 4, "num_stages": 3}


def tiled(**changes):
    return Candidate.of("triton_tiled", {**TILE, **changes})


def split(**changes):
    return Candidate.of("triton_split_k", {**TILE, "split_k": 4, **changes})


def mixed(m=16, n=4096, k=4096, **values):
    return problem("mixed_gemm", m=m, n=n, k=k, **{"dtype": "float16", "layout": "nt", **values})


# Numbers made from bits


def run_ptx(text, source):
    """The two output registers that a few of NVIDIA's instructions make of one input register."""
    import torch

    registers = {"$2": source}

    def halves(register, dtype):
        both = np.array([register & 0xFFFF, register >> 16], dtype=np.uint16).view(np.int16)
        return torch.from_numpy(both).view(dtype)

    def packed(numbers, dtype):
        low, high = numbers.to(dtype).view(torch.int16).numpy().view(np.uint16).tolist()
        return low | high << 16

    def value(name):
        return int(name, 16) if name.startswith("0x") else registers[name]

    for statement in filter(None, (line.strip(" {};\n") for line in text.splitlines())):
        operation_name, rest = statement.split(None, 1)
        if operation_name == ".reg":
            continue
        target, *names = (name.strip() for name in rest.split(","))
        given = [value(name) for name in names]
        if operation_name == "mov.b32":
            found = given[0]
        elif operation_name == "xor.b32":
            found = given[0] ^ given[1]
        elif operation_name == "and.b32":
            found = given[0] & given[1]
        elif operation_name == "lop3.b32":
            assert (
                given[3] == 0xEA
            )  # (a & b) | c: its table is what the operation makes of 0xf0, 0xcc and 0xaa
            assert (0xF0 & 0xCC) | 0xAA == 0xEA
            found = (given[0] & given[1]) | given[2]
        elif operation_name == "prmt.b32":
            choices = given[0].to_bytes(4, "little") + given[1].to_bytes(4, "little")
            found = sum(choices[given[2] >> 4 * place & 7] << 8 * place for place in range(4))
        elif operation_name == "sub.f16x2":
            a, b = (halves(register, torch.float16) for register in given)
            found = packed(a.double() - b.double(), torch.float16)
        elif operation_name == "fma.rn.bf16x2":
            a, b, c = (halves(register, torch.bfloat16).double() for register in given)
            found = packed(a * b + c, torch.bfloat16)
        else:
            raise AssertionError(f"unknown instruction: {statement}")
        registers[target] = found
    return registers["$0"], registers["$1"]


@pytest.mark.parametrize("weight", ["int8", "uint8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bits_make_the_same_numbers(dtype, weight):
    """Every byte in every place: the instructions, run here one by one, against torch's conversion."""
    pytest.importorskip("triton")
    import torch

    from kernelcast.kernels.ops.mixed_gemm import triton_tiled_jit

    text = getattr(triton_tiled_jit, f"{weight}_TO_{dtype}".upper()).value
    for first in range(256):
        four = [first, (first + 85) % 256, (first + 170) % 256, 255 - first]
        registers = run_ptx(text, int.from_bytes(bytes(four), "little"))
        made = np.array(registers, dtype=np.uint32).view(np.int16)
        found = torch.from_numpy(made).view(getattr(torch, dtype)).float().tolist()
        assert found == np.array(four, dtype=np.uint8).view(weight).astype(float).tolist()


def test_only_nvidias_compiler_gets_nvidias_instructions():
    pytest.importorskip("triton")
    for name, candidate in (("triton_tiled", tiled()), ("triton_split_k", split())):
        describe = variant("mixed_gemm", name).compile_spec
        made = {
            target: describe(mixed(), candidate.parameters, target).constants["BITS"]
            for target in ("sm75", "sm80", "sm120", "gfx942", "gfx950", "")
        }
        assert made == {
            "sm75": True, "sm80": True, "sm120": True, "gfx942": False, "gfx950": False, "": False
        }  # fmt: skip


# Offline compilation

DECODE = {"m": 16, "n": 4096, "k": 4096, "layout": "nt"}
PREFILL = {"m": 512, "n": 4096, "k": 4096, "layout": "nt"}
RAGGED = {"m": 100, "n": 1001, "k": 1003, "layout": "nt"}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
@pytest.mark.parametrize(
    ("candidate", "values"),
    [
        (tiled(block_k=256), {**DECODE, "dtype": "float16"}),
        (tiled(block_m=64, block_n=128, block_k=64), {**PREFILL, "dtype": "bfloat16", "layout": "nn"}),
        (tiled(block_k=64), {**RAGGED, "dtype": "bfloat16", "weight_dtype": "uint8"}),
        (split(block_n=32), {**DECODE, "dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_what_is_legal_compiles_with_tensor_cores(compiler, target, candidate, values):  # noqa: F811
    described = problem("mixed_gemm", **values)
    # A long step may leave two words of the prologue on the stack.
    assert_compiles(compiler, candidate, described, target, tensor_cores=True, spills=2)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm89", "sm120", "gfx950"])
def test_other_targets_compile(compiler, target):  # noqa: F811
    facts = compiler(problem("mixed_gemm", **DECODE, dtype="bfloat16"), tiled(), target)
    assert (facts.outcome, facts.spills, facts.uses_tensor_cores) == ("ok", 0, True)
    assert facts.shared_bytes <= DEVICES[target].shared_bytes_per_block


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["int8", "uint8"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_converting_instruction_is_left(compiler, dtype, weight):  # noqa: F811
    from kernelcast.kernels.compile import compile_spec_for

    described = mixed(dtype=dtype, weight_dtype=weight)
    spec = variant("mixed_gemm", "triton_tiled").compile_spec(described, tiled().parameters, "sm80")
    ptx = compile_spec_for(spec, "sm80").asm["ptx"]
    assert "prmt.b32" in ptx
    assert not re.search(r"cvt\.rn\.\w+\.[su]\d", ptx)
    # The weight reaches shared memory by asynchronous copies of sixteen bytes, and no other way.
    assert "cp.async.cg.shared.global" in ptx
    assert "ld.global" not in ptx.split("mma.sync")[0]


@pytest.mark.slow
def test_large_tiles_are_multiplied_in_warp_groups(compiler):  # noqa: F811
    from kernelcast.kernels.compile import compile_spec_for

    described = problem("mixed_gemm", **PREFILL, dtype="float16")
    spec = variant("mixed_gemm", "triton_tiled").compile_spec(described, tiled(block_m=64).parameters, "sm90")
    assert "wgmma.mma_async" in compile_spec_for(spec, "sm90").asm["ptx"]
