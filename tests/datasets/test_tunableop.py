from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernelcast.datasets import ImportSummary, Store, import_files
from kernelcast.errors import ImportFileError
from kernelcast.kernels import Candidate, problem
from kernelcast.kernels.devices import device

HEAD = "Validator,PT_VERSION,2.6.0\nValidator,ROCM_VERSION,6.0.0.0-12969\nValidator,GCN_ARCH_NAME,gfx90a\n"


def run(store: Path, path: Path, rows: str, head: str = HEAD) -> ImportSummary:
    path.write_text(head + rows)
    return import_files("tunableop", [str(path)], device=device("mi250x"), workload="llm", store=store)


def winner(name: str) -> Candidate:
    return Candidate.of("tunableop", {"solution": name})


# torch's matrices swap places in BLAS, and so do m and n: A of BLAS is torch's second.
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            "GemmTunableOp_float_NT,nt_25088_4096_64,Gemm_Hipblaslt_1234,0.123",
            {"m": 4096, "n": 25088, "k": 64, "dtype": "float32", "layout": "tn"},
        ),
        (
            "GemmTunableOp_tf32_TN,tn_8_16_4_ld_4_4_8,Gemm_Hipblaslt_1234,0.123",
            {"m": 16, "n": 8, "k": 4, "dtype": "float32", "allow_tf32": True, "layout": "nt"},
        ),
        (
            "GemmTunableOp_BFloat16_NN,nn_8_16_4_ld_12_7_8,Gemm_Hipblaslt_1234,0.123,more",
            {"m": 16, "n": 8, "k": 4, "dtype": "bfloat16", "layout": "nn", "lda": 7, "ldb": 12},
        ),
        (
            "GemmTunableOp_c10::Half_TT,tt_8_16_4,Gemm_Hipblaslt_1234,0.123",
            {"m": 16, "n": 8, "k": 4, "dtype": "float16", "layout": "tt"},
        ),
    ],
)
def test_a_row_is_the_product_that_torch_was_asked_for(
    tmp_path: Path, row: str, expected: dict[str, Any]
) -> None:
    run(tmp_path / "store", tmp_path / "a.csv", row + "\n")
    (only,) = Store(tmp_path / "store").measurements()
    assert only.problem == problem("gemm", **expected)
    assert (only.candidate, only.samples_us) == (winner("Gemm_Hipblaslt_1234"), (123.0,))
    assert (only.environment.torch, only.environment.runtime) == ("2.6.0", "rocm-6.0.0.0-12969")
    assert only.environment.source == "tunableop:a.csv"
    assert Store(tmp_path / "store").check() == []


def test_the_default_is_the_vendor_and_other_operators_have_names_of_their_own(tmp_path: Path) -> None:
    rows = [
        "GemmTunableOp_double_NN,nn_8_16_4,Default,1",
        "GemmAndBiasTunableOp_Half_TN,tn_8_16_4_ld_4_4_8,1219,2",
        "GemmStridedBatchedTunableOp_Half_NN,nn_8_16_4_B_3_ld_8_4_8,Gemm_Rocblas_3,3",
        "ScaledGemmTunableOp_Float8_e4m3fnuz_Float8_e4m3fnuz_BFloat16_TN,tn_8_16_4_ld_4_4_8_rw_0_bias_None,X,4",
        "",
    ]
    summary = run(tmp_path / "store", tmp_path / "a.csv", "\r\n".join(rows))
    assert (summary.rows, summary.problems, summary.added) == (4, 4, 4)
    assert run(tmp_path / "store", tmp_path / "a.csv", "\r\n".join(rows)).known == 4
    found = {each.problem.operation: each for each in Store(tmp_path / "store").measurements()}
    assert {name: each.latency_us for name, each in found.items()} == {
        "gemm_float64": 1000.0,
        "gemm_bias": 2000.0,
        "batched_gemm": 3000.0,
        "scaled_gemm": 4000.0,
    }
    assert found["gemm_float64"].candidate == Candidate.of("vendor")
    assert found["batched_gemm"].problem.dims == (("batch", 3), ("m", 16), ("n", 8), ("k", 4))
    # As the catalogue makes it.
    assert found["batched_gemm"].problem == problem(
        "batched_gemm", batch=3, m=16, n=8, k=4, dtype="float16", layout="nn"
    )
    assert found["scaled_gemm"].problem.dtype == "float8_e4m3fnuz_float8_e4m3fnuz_bfloat16"
    assert found["scaled_gemm"].problem["more"] == "rw_0_bias_None"


GOOD = "GemmTunableOp_float_NN,nn_8_16_4,Default,1\n"


@pytest.mark.parametrize(
    ("rows", "head", "message"),
    [
        ("", HEAD, "holds no measurement"),
        (GOOD, "", "line 1: it has no Validator line"),
        (GOOD, "Validator,PT\n", "line 1: a Validator line"),
        (GOOD + "nonsense\n", HEAD, "line 5: the line has 1 fields"),
        (
            GOOD + "\nGemmTunableOp_float_NN,nn_8_16_4,Default\n",
            HEAD,
            "line 6: it gives no time for 'Default'",
        ),
        (GOOD + "ConvTunableOp_float_NN,nn_8_16_4,Default,1\n", HEAD, "line 5: the operator is 'Conv"),
        (GOOD + "GemmTunableOp_float_NN,nt_8_16_4,Default,1\n", HEAD, "line 5: the parameters are 'nt_"),
        (GOOD + "GemmTunableOp_float_NN,nn_8_16,Default,1\n", HEAD, "line 5: the parameters are"),
        (GOOD + "GemmTunableOp_float_NN,nn_0_16_4,Default,1\n", HEAD, "line 5: .*a size is 0"),
        (GOOD + "GemmTunableOp_float_NN,nn_8_16_4_ld_7_4_8,Default,1\n", HEAD, "line 5: .*shorter than"),
        (GOOD + "GemmTunableOp_float_NN,nn_8_16_4,Default,fast\n", HEAD, "line 5: .*positive number of"),
        (GOOD + "GemmTunableOp_float_NN,nn_8_16_4,Default,-1\n", HEAD, "line 5: .*positive number of"),
        (GOOD + "GemmTunableOp_float_NN,nn_8_16_4,Default,nan\n", HEAD, "line 5: .*positive number of"),
        (GOOD + "GemmTunableOp_float_NN,nn_8_16_4,,1\n", HEAD, "line 5: the solution is ''"),
        (GOOD + "GemmTunableOp_float_NN,nn_9999999999999_16_4,Default,1\n", HEAD, "line 5: gemm: n is 9999"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, rows: str, head: str, message: str) -> None:
    with pytest.raises(ImportFileError, match=message):
        run(tmp_path / "store", tmp_path / "a.csv", rows, head)
    assert not (tmp_path / "store").exists()
