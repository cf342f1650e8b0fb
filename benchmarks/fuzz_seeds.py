"""Sound files of every format that is imported, small, for mutation; and a sound store."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelcast.datasets import Environment, Journal, Measurement, Protocol, Store
from kernelcast.datasets.t4 import export_t4
from kernelcast.kernels import Candidate, problem
from kernelcast.kernels.devices import device

A100 = device("a100")

_STRIDES = ["mat1_stride_0", "mat1_stride_1", "mat2_stride_0", "mat2_stride_1"]
_DTYPES = ["mat1_dtype", "mat2_dtype"]
_CONTIGUOUS = ["mat1_iscontig", "mat2_iscontig"]
_TILE = "type=triton_BLOCK-M=16_BLOCK-K={k}_BLOCK-N=64_numstages=4_numwarps=2"
_HALF = "torch.float16"


@dataclass(frozen=True)
class Seed:
    """A file that an importer reads.

    Attributes:
        importer: its name.
        name: of the file.
        content: of the file.
        options: of the importer. The value ``"{beside}"`` is the path of ``beside``.
        beside: content of a second file that is mutated in the place of the first: a map, or a T1 file.
    """

    importer: str
    name: str
    content: bytes
    options: dict[str, str] = field(default_factory=dict)
    beside: bytes = b""


def _autoheuristic(kind: str, numerical: list[str], categorical: list[str], rows: list[str]) -> Seed:
    header = {
        "shared_memory": 166912,
        "device_capa": [8, 0],
        "name": kind,
        "numerical_features": numerical,
        "categorical_features": categorical,
    }
    lines = [json.dumps(header), ",".join([*numerical, *categorical, "choice", "feedback"]), *rows, ""]
    return Seed("autoheuristic", f"{kind}.txt", "\n".join(lines).encode())


def _autoheuristics() -> list[Seed]:
    sizes = ["m", "k", "n", *_STRIDES]
    tile = _TILE.format(k=32)
    mm = f"64,32,48,32,1,1,32,{_HALF},{_HALF},True,False,not_float_32"
    mixed = f"64,32,48,32,1,48,1,{_HALF},torch.int8,True,True"
    padding = ["m_padded_length", "k_padded_length", "n_padded_length", "mat1_align_size", "mat2_align_size"]
    pad = f"63,32,48,32,1,48,1,1,0,0,8,8,{_HALF},{_HALF},False,False,not_float_32"
    flex_sizes = ["b", "h", "m", "n", "kv_seq_length", "q_stride_0", "q_stride_1", "q_stride_2", "q_stride_3"]
    flex_sizes += ["subgraph_num_nodes", "subgraph_num_args_used"]
    flex = f"2,8,128,64,128,65536,8192,64,1,3,2,{_HALF}"
    flex_tile = _TILE.format(k=-1)
    return [
        _autoheuristic(
            "mm",
            sizes,
            [*_DTYPES, *_CONTIGUOUS, "using_tf32"],
            [
                f"{mm},extern_mm,0.25",
                f"{mm},extern_mm,0.75",
                f"{mm},{tile},inf",
                f"{mm.replace('64', '65', 1)},{tile},1.5",
            ],
        ),
        _autoheuristic(
            "mixed_mm",
            sizes,
            [*_DTYPES, *_CONTIGUOUS],
            [f"{mixed},extern_fallback_mixed_mm,0.25", f"{mixed},{tile},0.5"],
        ),
        _autoheuristic(
            "pad_mm",
            [*sizes, *padding],
            [*_DTYPES, "prepadded_mat1", "prepadded_mat2", "using_tf32"],
            [f"{pad},orig,0.25", f"{pad},pad,0.5"],
        ),
        _autoheuristic(
            "flex_attention", flex_sizes, ["dtype"], [f"{flex},{flex_tile},0.25", f"{flex},{flex_tile},inf"]
        ),
    ]


def _kernel_tuner() -> Seed:
    common = {"compile_time": 3.5, "timestamp": "2023-12-22 09:54:05.500000+00:00"}
    cache = {
        "16,0": {"block": 16, "pad": 0, "time": 2.5, "times": [2.0, 4.0, 1.5], **common},
        "16,1": {"block": 16, "pad": 1, "time": 0.5, **common},
        "32,0": {"block": 32, "pad": 0, "time": "CompilationFailedConfig"},
        "32,1": {"block": 32, "pad": 1, "time": "RuntimeFailedConfig"},
    }
    file = {
        "device_name": "NVIDIA A100-PCIE-40GB",
        "kernel_name": "convolution_kernel",
        "problem_size": [4096, 2048],
        "tune_params_keys": ["block", "pad"],
        "tune_params": {"block": [16, 32], "pad": [0, 1]},
        "objective": "time",
        "cache": cache,
    }
    return Seed("kernel-tuner", "conv.json", json.dumps(file, indent=1).encode())


def _t4() -> list[Seed]:
    def result(block: int, invalidity: str, **facts: Any) -> dict[str, Any]:
        return {
            "timestamp": "2023-12-22 09:54:05.500000+00:00",
            "configuration": {"block": block, "mode": "fast"},
            "times": {"compilation": 3.0},
            "invalidity": invalidity,
            "correctness": int(invalidity == "correct"),
            "measurements": [{"name": "time", "value": 1.5, "unit": ""}],
            **facts,
        }

    results = [
        result(1, "correct", times={"runtimes": [2.0, 4.0]}),
        result(2, "correct"),
        result(4, "runtime"),
        result(8, "constraints"),
    ]
    file = {"schema_version": "1.0.0", "metadata": {"timeunit": "milliseconds"}, "results": results}
    space = {
        "ConfigurationSpace": {
            "TuningParameters": [
                {"Name": "block", "Type": "int", "Values": "[1, 2, 4, 8]"},
                {"Name": "mode", "Type": "string", "Values": ["fast", "slow"]},
            ],
            "Conditions": [
                {"Expression": "block * 2 <= 8 or block % 3 == 1", "Parameters": ["block"]},
                {"Expression": "mode == 'fast' or block > 1", "Parameters": ["mode", "block"]},
            ],
        },
        "KernelSpecification": {"KernelName": "blur_kernel", "ProblemSize": [64, 32]},
    }
    content = json.dumps(file, indent=1).encode()
    return [
        Seed("t4", "blur_T4.json", content),
        Seed("t4", "blur_T4.json", content, {"space": "{beside}"}, json.dumps(space, indent=1).encode()),
    ]


def _triton() -> Seed:
    def config(block: int, **facts: Any) -> dict[str, Any]:
        return {
            "kwargs": {"BLOCK_M": block, "EVEN": True},
            "num_warps": 4,
            "num_ctas": 1,
            "num_stages": 3,
            "maxnreg": None,
            "pre_hook": None,
            "ir_override": None,
            **facts,
        }

    timings = [
        [config(16), [0.25, 0.24, 0.27]],
        [config(32), [float("inf")] * 3],
        [config(64, maxnreg=128), 0.5],
    ]
    file = {"key": [64, 48, 32, _HALF, _HALF], "configs_timings": timings}
    return Seed(
        "triton-autotune",
        "matmul_kernel.autotune.json",
        json.dumps(file).encode(),
        {"operation": "gemm", "key": "m,n,k"},
    )


def _tables(folder: Path) -> list[Seed]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    mapping = "m=M,n=N,k=K,dtype:=float16,layout=how,variant=lib,config.tile=T,latency_ms=time,outcome=state"
    text = (
        "lib,M,N,K,how,T,time,state,comment\n"
        'cutlass,64,48,32,nt,16,0.5,ok,"one, two"\n'
        "cutlass,64,48,32,nt,16,0.25,ok,\n"
        "cutlass,64,48,32,nt,32,,out_of_resources,\n"
    )
    options = {"operation": "gemm", "map": mapping}
    columns = dict(word.split("=") for word in mapping.split(",") if ":=" not in word)
    file = {"columns": columns, "constants": {"dtype": "float16"}}
    table = pa.table(
        {
            "lib": ["cutlass", "cutlass", "vendor"],
            "M": [64, 64, 128],
            "N": [48, 48, 48],
            "K": [32, 32, 32],
            "how": ["nt", "nt", "nn"],
            "T": [16, 32, 0],
            "time": [0.5, None, 0.125],
            "state": ["ok", "timeout", "ok"],
        }
    )
    pq.write_table(table, folder / "table.parquet")
    parquet = (folder / "table.parquet").read_bytes()
    beside = json.dumps(file, indent=1).encode()
    return [
        Seed("table", "times.csv", text.encode(), options),
        Seed("table", "times.parquet", parquet, options),
        Seed("table", "times.csv", text.encode(), {"operation": "gemm", "map": "{beside}"}, beside),
    ]


def _tunableop() -> Seed:
    rows = [
        "Validator,PT_VERSION,2.6.0",
        "Validator,ROCM_VERSION,6.0.0.0-12969",
        "GemmTunableOp_float_NT,nt_25088_4096_64_ld_25088_4096_25088,Gemm_Hipblaslt_1219,1.262",
        "GemmTunableOp_Half_NN,nn_8_16_4,Default,1",
        "GemmStridedBatchedTunableOp_Half_NN,nn_8_16_4_B_3_ld_8_4_8,Gemm_Rocblas_3,3",
        "",
    ]
    return Seed("tunableop", "tunableop_results0.csv", "\n".join(rows).encode())


def measurements(count: int = 12) -> list[Measurement]:
    """Records of two problems of one device, failures among them."""
    outcomes = ("ok", "ok", "out_of_resources", "compile_error")
    return [
        Measurement(
            problem=problem("gemm", m=64 + number % 2, n=48, k=32, dtype="float16"),
            candidate=Candidate.of("triton_tiled", {"block_m": 16 * (number + 1), "even": number % 3 == 0}),
            device=A100.name,
            device_fingerprint=A100.fingerprint,
            environment=Environment(torch="2.9.0", variant_hash="0123456789abcdef"),
            protocol=Protocol("interleaved-rounds-1", cache="warm", error_log=0.01 * number),
            samples_us=(10.0 + number, 11.5, 9.25) if outcomes[number % 4] == "ok" else (),
            outcome=outcomes[number % 4],
            detail='said "no",\nand left' if outcomes[number % 4] != "ok" else "",
            workload="fuzz",
            created_at=1.7e9 + number,
        )
        for number in range(count)
    ]


def make_store(root: Path) -> None:
    """A store with two segments, a journal and the facts of a device."""
    store, records = Store(root), measurements()
    store.add_device(A100)
    store.add_many(records[:5])
    store.add_many(records[5:8])
    with Journal(root) as journal:
        for record in records[8:]:
            journal.append(record)


def seeds(folder: Path) -> list[Seed]:
    """One file of every format. ``folder`` is for exports, which a store writes."""
    root = folder / "exported"
    store = Store(root)
    store.add_device(A100)
    store.add_many(measurements())
    store.export(folder / "own.csv")
    store.export(folder / "own.parquet")
    one = folder / "one"
    Store(one).add_many(measurements()[::2])
    export_t4(Store(one), folder / "own.json")
    own = [
        Seed(name, f"own.{kind}", (folder / f"own.{kind}").read_bytes())
        for name, kind in (("records", "csv"), ("records", "parquet"), ("t4", "json"))
    ]
    return [*_autoheuristics(), _kernel_tuner(), *_t4(), _triton(), *_tables(folder), _tunableop(), *own]
