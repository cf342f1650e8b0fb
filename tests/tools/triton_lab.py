"""What tests of Triton variants share: GPUs to reason about, runs under Triton's interpreter, and offline compilation.

The interpreter is chosen when triton is imported, so :func:`interpret` runs in a process of its own, which serves all tests of
one pytest process, as it takes seconds to start.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from kernelcast.kernels import Candidate, CandidateTable, Device, Problem, memory, operation, problem, variant

#: One real card for each compilation target, with the facts that rules read.
DEVICES = {
    "sm80": Device(
        "a100", "gpu", "nvidia", "sm80", 108, shared_bytes_per_block=166_912, llc_bytes=40 * 2**20
    ),
    "sm86": Device("a10", "gpu", "nvidia", "sm86", 72, shared_bytes_per_block=101_376, llc_bytes=6 * 2**20),
    "sm89": Device(
        "l40s", "gpu", "nvidia", "sm89", 142, shared_bytes_per_block=101_376, llc_bytes=96 * 2**20
    ),
    "sm90": Device(
        "h100", "gpu", "nvidia", "sm90", 132, shared_bytes_per_block=232_448, llc_bytes=50 * 2**20
    ),
    "sm100": Device(
        "b200", "gpu", "nvidia", "sm100", 148, shared_bytes_per_block=232_448, llc_bytes=126 * 2**20
    ),
    "sm120": Device(
        "rtx5090", "gpu", "nvidia", "sm120", 170, shared_bytes_per_block=101_376, llc_bytes=96 * 2**20
    ),
    "gfx942": Device("mi300x", "gpu", "amd", "gfx942", 304, warp_size=64, shared_bytes_per_block=65_536),
    "gfx950": Device("mi355x", "gpu", "amd", "gfx950", 256, warp_size=64, shared_bytes_per_block=163_840),
}
T4 = Device("t4", "gpu", "nvidia", "sm75", 40, shared_bytes_per_block=65_536, llc_bytes=4 * 2**20)
#: A GPU of which nothing but the architecture is known.
UNKNOWN = Device("new", "gpu", "nvidia", "sm80", 1)
CPU = Device("cpu", "cpu", "intel", "x86_64-avx512", 2, warp_size=1)

#: Serves requests from standard input, a line each, until it is closed. What kernels print must not reach the answers.
_SERVER = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from kernelcast.kernels import Candidate
from triton_lab import fault

for line in sys.stdin:
    failures, request = [], json.loads(line)
    if isinstance(request, dict):
        exec(request["script"], {"__name__": "script", "cases": request["cases"], "failures": failures})
        request = []
    for operation, candidate, values in request:
        wrong = fault(operation, Candidate.from_key(candidate), values, "cpu")
        if wrong:
            failures.append([operation, candidate, values, wrong])
    print(json.dumps(failures), file=answers, flush=True)
"""

Case = tuple[Candidate, Mapping[str, Any]]


def fault(operation_name: str, candidate: Candidate, values: Mapping[str, Any], device: str) -> str | None:
    """Run a candidate twice into poisoned memory. Returns what is wrong with it, or None.

    Right is: within the operation's tolerance of the reference, the same bits in both runs, and inputs left as they were.
    """
    import torch

    described = problem(operation_name, **values)
    found = operation(operation_name)
    inputs = found.make_inputs(described, seed=7, device=device)
    originals = [tensor.clone() for tensor in inputs]
    launch = variant(operation_name, candidate.variant).build(described, candidate.parameters)
    with memory.poisoned():
        first, second = launch(*inputs), launch(*inputs)
    wrong = found.check(described, found.reference(described, *inputs), first)
    if wrong is None and not torch.equal(first.nan_to_num(), second.nan_to_num()):
        wrong = "two runs differ"
    if not all(torch.equal(*pair) for pair in zip(inputs, originals, strict=True)):
        wrong = "the inputs were changed"
    return wrong


class _Interpreter:
    """A process with ``TRITON_INTERPRET=1``, which imports torch and triton once for many tests."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def ask(self, request: object, timeout_s: float) -> object:
        """The answer to one request; a fault of the process is an error, and the next request gets a new one."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        line: list[str] = []
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            reader = threading.Thread(target=lambda: line.append(process.stdout.readline()), daemon=True)
            reader.start()
            reader.join(timeout_s)
            if line and line[0]:
                return json.loads(line[0])
            raise AssertionError(f"no answer within {timeout_s:g} s" if not line else self._said())
        except BrokenPipeError:
            raise AssertionError(self._said()) from None
        finally:
            if not line or not line[0]:
                self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        here = str(Path(__file__).resolve().parent)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={
                **os.environ,
                "TRITON_INTERPRET": "1",
                "PYTHONSAFEPATH": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")])),
            },
        )

    def _said(self) -> str:
        assert self._process is not None
        assert self._errors is not None
        status = self._process.wait(10)
        self._errors.seek(0)
        return f"the interpreter ended with status {status}: {self._errors.read()[-3000:]}"


_interpreter = _Interpreter()
atexit.register(_interpreter.close)


def interpret(operation_name: str, cases: Iterable[Case]) -> None:
    """Assert that every (candidate, values of its problem) is right under the interpreter, on the CPU."""
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    request = [[operation_name, candidate.key, dict(values)] for candidate, values in cases]
    assert _interpreter.ask(request, timeout_s=280) == []


def interpret_script(script: str, cases: Iterable[Any], *, alone: bool = False) -> None:
    """Assert that a script finds nothing wrong under the interpreter: it reads ``cases`` and adds to ``failures``, both lists.

    ``alone``: in a process of its own, for a script that changes what other tests would see.
    """
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    interpreter = _Interpreter() if alone else _interpreter
    try:
        assert interpreter.ask({"script": script, "cases": list(cases)}, timeout_s=280) == []
    finally:
        if alone:
            interpreter.close()


def on_gpu(operation_name: str, cases: Iterable[Case]) -> None:
    """Assert that every case is right on the GPU; skips where torch sees none."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    failures = [
        (candidate, values, wrong)
        for candidate, values in cases
        if (wrong := fault(operation_name, candidate, values, "cuda"))
    ]
    assert failures == []


def work_of(candidate: Candidate, described: Problem, device: Device) -> dict[str, float]:
    """The amounts of work that a variant states for one candidate."""
    block = CandidateTable.of([candidate]).blocks[0]
    work = variant(described.operation, candidate.variant).work(described, block.columns, device).columns(1)
    return {name: float(values[0]) for name, values in work.items()}


def refused_by(candidate: Candidate, described: Problem, device: Device) -> tuple[str, str]:
    """(rule, what it says) of the first rule that a candidate breaks; empty texts where it is legal."""
    block = CandidateTable.of([candidate]).blocks[0]
    refused = variant(described.operation, candidate.variant).refusals(described, device, block)
    return (refused[0].rule, str(refused[0])) if refused else ("", "")


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> Callable[..., Any]:
    """``compile_facts`` with a Triton cache of its own and without the interpreter."""
    pytest.importorskip("triton")
    from kernelcast.kernels.compile import compile_facts

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return compile_facts


def assert_compiles(compiler: Callable[..., Any], candidate: Candidate, described: Problem, target: str, *,
                    tensor_cores: bool | None = None, spills: int = 0) -> None:  # fmt: skip
    """Assert that a legal candidate compiles for a target as its variant's work says.

    Its shared memory fits the device, the estimate lies from 5% below to 25% above it (where there is one), at most so many
    registers spill, and tensor cores are used or not.
    """
    device = DEVICES[target]
    assert refused_by(candidate, described, device) == ("", "")
    facts = compiler(described, candidate, target)
    assert facts.outcome == "ok", facts.detail
    assert facts.spills <= spills, (candidate, facts)
    assert facts.shared_bytes <= device.shared_bytes_per_block, (candidate, facts)
    if tensor_cores is not None:
        assert facts.uses_tensor_cores is tensor_cores, (candidate, facts)
    estimate = work_of(candidate, described, device)["shared_bytes"]
    if estimate == estimate:  # not NaN
        assert 0.95 * facts.shared_bytes <= estimate <= 1.25 * facts.shared_bytes, (
            candidate,
            estimate,
            facts,
        )
