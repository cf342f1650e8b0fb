"""Import of PyTorch TunableOp results: for each matrix product, the solution that was chosen and its mean time.

A file has ``Validator`` lines (versions of the software) and lines of operator, parameters, solution and milliseconds::

    GemmTunableOp_float_NT,nt_25088_4096_64_ld_25088_4096_25088,Gemm_Hipblaslt_1219,1.262

The operator ends in the dtype and whether BLAS transposes its operands; the parameters repeat that, then BLAS's m, n, k
and, since PyTorch 2.6, leading dimensions. BLAS is column-major and torch is not, so torch calls it with the operands
swapped: BLAS's first is torch's second. Source of the format: aten/src/ATen/cuda/tunable and torch/cuda/tunable.py.

Solutions that lost are not in the file, so it teaches which to choose, and not by how much.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from kernelcast.datasets.imported import MAX_US, Records, problem_of, shortened, slug
from kernelcast.datasets.importing import Importer, Parsed, read_content, register_importer
from kernelcast.datasets.record import Environment
from kernelcast.errors import ImportFileError, InvalidProblemError
from kernelcast.kernels import Device, Problem
from kernelcast.kernels.ops.gemm.schema import GEMM, matrix_layout

#: Operators and the operations that they are here.
_OPERATIONS = {
    "GemmTunableOp": "gemm",
    "GemmAndBiasTunableOp": "gemm_bias",
    "GemmStridedBatchedTunableOp": "batched_gemm",
    "ScaledGemmTunableOp": "scaled_gemm",
}

#: torch's words for dtypes of C++. Others are kept as they are, in lower case.
_DTYPES = {
    "float": "float32",
    "tf32": "float32",
    "double": "float64",
    "Half": "float16",
    "c10::Half": "float16",
    "BFloat16": "bfloat16",
    "c10::BFloat16": "bfloat16",
}

_OPERATOR = re.compile(r"(?P<name>[A-Za-z]+)_(?P<dtypes>.+)_(?P<letters>[NTnt]{2})")

_PARAMETERS = re.compile(
    r"(?P<letters>[NTnt]{2})_(?P<m>\d{1,13})_(?P<n>\d{1,13})_(?P<k>\d{1,13})(?:_B_(?P<batch>\d{1,13}))?"
    r"(?:_ld_(?P<lda>\d{1,13})_(?P<ldb>\d{1,13})_(?P<ldc>\d{1,13}))?(?P<rest>(?:_.*)?)"
)

_US_PER_MS = 1e3


@register_importer
class TunableOp(Importer):
    """Files that ``PYTORCH_TUNABLEOP_ENABLED=1`` wrote."""

    name = "tunableop"
    doc = "Results of PyTorch TunableOp (tunableop_results0.csv); plain, .gz or in a .zip. They hold winners alone."
    example = "tunableop_results0.csv --device mi250x --workload llm"
    #: A results file is a few hundred lines.
    max_bytes = 256 * 2**20

    def parse(self, file: str, *, device: Device, workload: str, on_bytes: Callable[[int], None]) -> Parsed:
        content = read_content(file, on_bytes=on_bytes, max_bytes=self.max_bytes)
        lines = content.data.split(b"\n")
        versions: dict[str, str] = {}
        rows: list[tuple[int, list[str]]] = []
        for number, line in enumerate(lines, start=1):
            try:
                fields = line.decode().strip().split(",")
            except UnicodeDecodeError as error:
                raise ImportFileError(file, "the line is not text.", line=number) from error
            if fields == [""]:
                continue
            if fields[0] == "Validator":
                if len(fields) < 3:
                    raise ImportFileError(file, "a Validator line has a name and a version.", line=number)
                versions[fields[1]] = ",".join(fields[2:])
            else:
                rows.append((number, fields))
        if not versions:
            raise ImportFileError(
                file, "it has no Validator line, with which TunableOp's results begin.", line=1
            )
        environment = Environment(
            source=f"{self.name}:{content.name}",
            torch=versions.get("PT_VERSION", "unknown"),
            runtime=f"rocm-{versions['ROCM_VERSION']}" if "ROCM_VERSION" in versions else "unknown",
        )
        records = Records(file, environment=environment, protocol=self.name, device=device, workload=workload)
        for number, fields in rows:
            _add(file, number, fields, records)
        return records.parsed()


def _add(file: str, line: int, fields: list[str], records: Records) -> None:
    if len(fields) < 3:
        raise ImportFileError(
            file,
            f"the line has {len(fields)} fields; it must have operator, parameters, solution and milliseconds.",
            line=line,
        )
    problem = _problem(file, line, fields[0], fields[1])
    solution = fields[2].strip()
    if len(fields) < 4:
        raise ImportFileError(
            file,
            f"it gives no time for {shortened(solution)}. It was written by hand, or cut short: delete the line.",
            line=line,
        )
    try:
        # Newer files have more fields after the time.
        latency_us = float(fields[3]) * _US_PER_MS
    except ValueError:
        latency_us = 0.0
    if not solution or not 0 < latency_us <= MAX_US:
        raise ImportFileError(
            file,
            f"the solution is {shortened(solution)} and the time {shortened(fields[3])}; they must be a name and a "
            f"positive number of milliseconds, at most {MAX_US / _US_PER_MS:.3g}.",
            line=line,
        )
    # The default solution is torch's own call.
    variant, config = ("vendor", {}) if solution == "Default" else ("tunableop", {"solution": solution})
    records.add(problem, variant, config, line=line, samples_us=[latency_us])


def _problem(file: str, line: int, operator: str, parameters: str) -> Problem:
    named, found = _OPERATOR.fullmatch(operator), _PARAMETERS.fullmatch(parameters)
    if named is None or named["name"] not in _OPERATIONS:
        raise ImportFileError(
            file,
            f"the operator is {shortened(operator)}; it must be one of {', '.join(_OPERATIONS)}, with dtype and NN to "
            "TT: GemmTunableOp_float_NT.",
            line=line,
        )
    if found is None or found["letters"].lower() != named["letters"].lower():
        raise ImportFileError(
            file,
            f"the parameters are {shortened(parameters)}; they must be those of {named['letters'].lower()}: "
            f"{named['letters'].lower()}_M_N_K.",
            line=line,
        )
    name, dtypes = _OPERATIONS[named["name"]], named["dtypes"]
    dtype = _DTYPES.get(dtypes, dtypes.lower())
    batch, rest = found["batch"], found["rest"].lstrip("_")
    catalogued = name == "gemm" or (name == "batched_gemm" and batch and not rest)
    if name in ("gemm", "batched_gemm") and (dtype not in GEMM.dtypes or not catalogued):
        # Double, complex and eight-bit products: measured all the same, and no problems of the catalogue.
        name, catalogued = f"{name}_{slug(dtype)}", False
    # BLAS's first operand is torch's second: m and n change places, and so do the letters and leading dimensions.
    m, n, k = int(found["n"]), int(found["m"]), int(found["k"])
    second, first = (letter == "t" for letter in found["letters"].lower())
    lda = int(found["ldb"] or (m if first else k))
    ldb = int(found["lda"] or (k if second else n))
    one = matrix_layout(m, k, *((1, lda) if first else (lda, 1)))
    two = matrix_layout(k, n, *((1, ldb) if second else (ldb, 1)))
    if min(m, n, k, int(batch or 1)) < 1 or one is None or two is None:
        raise ImportFileError(
            file,
            f"the parameters are {shortened(parameters)}: a size is 0, or a leading dimension is shorter than its row.",
            line=line,
        )
    dims = {"m": m, "n": n, "k": k}
    options: dict[str, int | str] = {"layout": one[0] + two[0], "lda": one[1], "ldb": two[1]}
    if batch:
        dims = {"batch": int(batch), **dims}
    if not catalogued:
        options |= {"dtypes": dtypes, "more": rest}
    try:
        return problem_of(name, dims, dtype, options, allow_tf32=dtypes == "tf32")
    except InvalidProblemError as error:
        raise ImportFileError(file, str(error), line=line) from error
