"""Triton kernels described once, for two uses: to be launched, and to be compiled for a GPU that is not here.

A triton variant describes its main kernel with ``compile_spec(problem, config, architecture)``, which returns a
:class:`KernelSpec`. ``KernelSpec.bind`` launches it; :func:`compile_facts` compiles it offline, without a driver,
specialised as the launch would be, and reads the registers, spills and shared memory that decide occupancy.

triton is imported inside the functions that need it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError, UnknownNameError
from kernelcast.kernels.candidate import Candidate
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import variant

#: Architecture -> (Triton backend, its name for the architecture, threads of a warp).
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm80": ("cuda", 80, 32),
    "sm86": ("cuda", 86, 32),
    "sm89": ("cuda", 89, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "sm120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}

#: Triton's names of element types in signatures.
TRITON_DTYPES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "i8",
    "uint8": "u8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "bool": "i1",
}


@dataclass(frozen=True, slots=True)
class Pointer:
    """A tensor argument: its dtype, and the bytes of its storage. Torch's allocators align it to 16 bytes and more."""

    dtype: str
    storage_bytes: int


@dataclass(frozen=True)
class KernelSpec:
    """One Triton kernel with everything that its compilation depends on, but the target.

    The kernel's parameters come in this order: tensors, integers, constants.

    Attributes:
        kernel: the ``@triton.jit`` function.
        tensors: parameter -> pointer.
        integers: parameter -> value. Triton makes 1 a constant and notes which are multiples of 16. A user's kernel may
            have floats among them.
        constants: the ``tl.constexpr`` parameters.
        options: ``num_warps``, ``num_stages`` and further options of the compiler.
    """

    kernel: Any
    tensors: Mapping[str, Pointer]
    integers: Mapping[str, int]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    def bind(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """A callable over the tensors, in the kernel's order, that launches it on the device they are on."""
        import torch

        launch = self.kernel[grid]
        rest = (*self.integers.values(), *self.constants.values())
        options = dict(self.options)

        def run(*tensors: torch.Tensor) -> None:
            index = tensors[0].get_device()
            # Triton launches on the current device, and torch's own operations on the tensor's.
            if index >= 0 and index != torch.cuda.current_device():
                with torch.cuda.device(index):
                    launch(*tensors, *rest, **options)
            else:
                launch(*tensors, *rest, **options)

        return run

    def specialise(
        self, target: str
    ) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
        """(signature, constants, attributes) as Triton's launcher derives them from the arguments."""
        backend = TARGETS[target][0]
        signature: dict[str, str] = {}
        constants = dict(self.constants)
        attributes: dict[tuple[int], list[list[Any]]] = {}
        for index, name in enumerate(self.kernel.arg_names):
            if name in self.tensors:
                pointer = self.tensors[name]
                signature[name] = f"*{TRITON_DTYPES[pointer.dtype]}"
                attributes[(index,)] = [["tt.divisibility", 16]]
                if backend == "hip" and pointer.storage_bytes < 2**31:
                    attributes[(index,)].append(["tt.pointer_range", 32])
            elif isinstance(self.integers.get(name), float):
                signature[name] = "fp32"
            elif name in self.integers and self.integers[name] != 1:
                value = self.integers[name]
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                attributes[(index,)] = [["tt.divisibility", 16]] if value % 16 == 0 else []
            else:
                signature[name] = "constexpr"
                constants.setdefault(name, 1)
        return signature, constants, attributes


@dataclass(frozen=True, slots=True)
class CompileFacts:
    """What the compiler made of one candidate on one target. Numbers are 0 unless the outcome is ``"ok"``.

    Attributes:
        registers: 32-bit registers of one thread.
        spills: 32-bit registers of one thread that live in memory (its stack, as Triton counts them).
        shared_bytes: shared memory of one block; it may exceed what a device has, which only a launch reports.
        uses_tensor_cores: whether the code has matrix instructions.
        compile_seconds: from source to machine code, the cache bypassed.
        outcome: ``"ok"``, ``"compile_error"``, ``"timeout"`` or ``"crash"``.
        detail: the compiler's message, if it failed.
    """

    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    uses_tensor_cores: bool = False
    compile_seconds: float = 0.0
    outcome: str = "ok"
    detail: str = ""


def compile_facts(
    problem: Problem,
    candidate: Candidate,
    target: str,
    *,
    time_limit_s: float | None = None,
    fresh: bool = True,
) -> CompileFacts:
    """Compile a triton candidate's main kernel for a target; no GPU and no driver is needed.

    Args:
        problem: what it computes; its sizes decide the specialisation.
        candidate: of a variant that has ``compile_spec``.
        target: a key of :data:`TARGETS`.
        time_limit_s: compile in a child process that is ended after so many seconds; ``None`` compiles here.
        fresh: compile even what Triton's own cache holds, as the seconds are to be those of a compilation. If not, the
            machine code is left there for launches (see :func:`compile_as_launched`); it has no effect in a child process.

    Raises:
        UnknownNameError: no such target, or no such variant.
        KernelcastError: the variant has no Triton kernel, or ``TRITON_INTERPRET`` is set.
    """
    if target not in TARGETS:
        raise UnknownNameError("target", target, TARGETS)
    if time_limit_s is not None:
        return _facts_from_child(problem, candidate, target, time_limit_s)
    spec = candidate_spec(problem, candidate, target)
    started = time.perf_counter()
    try:
        compiled = compile_spec_for(spec, target) if fresh else compile_as_launched(spec, target)
    # The compiler's failures share no base class, and every one of them is this candidate's outcome.
    except Exception as error:  # noqa: BLE001
        seconds = time.perf_counter() - started
        return CompileFacts(
            outcome="compile_error", detail=f"{type(error).__name__}: {error}"[:2000], compile_seconds=seconds
        )
    seconds = time.perf_counter() - started
    registers, spills = _registers(compiled, target)
    return CompileFacts(
        registers=registers,
        spills=spills,
        shared_bytes=int(compiled.metadata.shared),
        uses_tensor_cores=_uses_tensor_cores(compiled, target),
        compile_seconds=seconds,
    )


def compile_spec_for(spec: KernelSpec, target: str) -> Any:
    """Triton's compiled kernel of a spec, with its ``asm`` and ``metadata``. The compiler's errors pass through."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = spec.specialise(target)
    source = ASTSource(spec.kernel, signature, constants, attributes)
    with triton.knobs.compilation.scope():
        # A kernel from the cache would take no time to compile.
        triton.knobs.compilation.always_compile = True
        return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=dict(spec.options))


def compile_as_launched(spec: KernelSpec, target: str) -> Any:
    """Triton's compiled kernel of a spec, from Triton's own cache or put into it, where a launch of the spec finds it.

    It goes the way of a launch on such a device, up to the device: the key of the cache holds what Triton's launcher makes of
    the arguments, which differs between its versions. This process launches on no device afterwards.
    """
    import torch
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    class Storage(MockTensor):
        """A tensor that is not there."""

        def __init__(self, pointer: Pointer) -> None:
            super().__init__(getattr(torch, pointer.dtype))
            self._storage_bytes = pointer.storage_bytes

        def ptr_range(self) -> int:
            return self._storage_bytes

    driver.set_active(_AbsentDevice(target))
    return spec.kernel.warmup(
        *map(Storage, spec.tensors.values()),
        *spec.integers.values(),
        *spec.constants.values(),
        grid=(1,),
        **spec.options,
    )


class _AbsentDevice:
    """What a launch asks of a driver before it has its machine code."""

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(*TARGETS[target])
        # Kernels keep what was compiled for a device's number.
        self._number = list(TARGETS).index(target)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0


def candidate_spec(problem: Problem, candidate: Candidate, target: str) -> KernelSpec:
    """The main kernel of a candidate, as its variant describes it.

    Raises:
        UnknownNameError: no such operation or variant.
        KernelcastError: the variant has no Triton kernel, or ``TRITON_INTERPRET`` is set.
    """
    found = variant(problem.operation, candidate.variant)
    describe = getattr(found, "compile_spec", None)
    if describe is None:
        raise KernelcastError(
            f"{candidate.variant} of {problem.operation} has no Triton kernel to compile (its backend is {found.backend})."
        )
    refuse_interpreter()
    spec: KernelSpec = describe(problem, candidate.parameters, target)
    return spec


def refuse_interpreter() -> None:
    """Raise a KernelcastError where ``TRITON_INTERPRET`` is set, as Triton reads it."""
    value = os.environ.get("TRITON_INTERPRET", "")
    if value.lower() in ("1", "true", "yes", "on", "y"):
        raise KernelcastError(f"TRITON_INTERPRET={value} replaces the compiler; unset it to compile kernels.")


def code_key(spec: KernelSpec, target: str) -> str:
    """32 hexadecimal digits over everything that decides the machine code of a kernel.

    That is the specialised signature, the constants, the attributes, the options, the kernel's source with that of the
    functions that it calls, the target, the versions of Triton and of its assembler, and the variables of the environment
    that change what they do.
    """
    signature, constants, attributes = spec.specialise(target)
    facts = (
        list(signature.items()),
        # With its type, as True equals 1 to Python.
        [(name, type(value).__name__, _constant(value)) for name, value in sorted(constants.items())],
        [(path, notes) for path, notes in sorted(attributes.items()) if notes],
        sorted((name, type(value).__name__, repr(value)) for name, value in spec.options.items()),
        spec.kernel.cache_key,
        target,
        compiler_key(target),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _constant(value: Any) -> str:
    # A function that is passed as a constant counts by its source; its repr holds an address.
    return str(getattr(value, "cache_key", None) or repr(value))


@lru_cache(maxsize=len(TARGETS))
def compiler_key(target: str) -> str:
    """The versions of Triton and of its assembler, and the variables of the environment that change what they do."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget(*TARGETS[target]))
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars as relevant
    except ImportError:  # not every version exports it
        relevant = dict
    return repr((triton.__version__, backend.hash(), sorted(relevant().items())))


def _registers(compiled: Any, target: str) -> tuple[int, int]:
    """(registers, spilled registers) of one thread."""
    if TARGETS[target][0] == "hip":
        code = compiled.asm["amdgcn"]
        counts = [re.search(rf"\.{name}:\s+(\d+)", code) for name in ("vgpr_count", "vgpr_spill_count")]
        return tuple(int(count[1]) if count else 0 for count in counts)  # type: ignore[return-value]
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise KernelcastError(f"cuobjdump reported no registers; it said: {usage[:500]!r}.")
    return int(found[1]), int(found[2]) // 4


def _uses_tensor_cores(compiled: Any, target: str) -> bool:
    if TARGETS[target][0] == "hip":
        return "v_mfma" in compiled.asm["amdgcn"]
    return any(mark in compiled.asm["ptx"] for mark in ("mma.sync", "wgmma.mma_async", "tcgen05.mma"))


def _facts_from_child(
    problem: Problem, candidate: Candidate, target: str, time_limit_s: float
) -> CompileFacts:
    request = json.dumps({"problem": problem.to_dict(), "candidate": candidate.key, "target": target})
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "facts.json"
        # A session of its own, so that the assembler that the compiler starts ends with it.
        child = subprocess.Popen(
            [sys.executable, "-m", "kernelcast.kernels.compile", str(answer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, errors = child.communicate(request, timeout=time_limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return CompileFacts(
                outcome="timeout",
                detail=f"over {time_limit_s:g} s",
                compile_seconds=time.perf_counter() - started,
            )
        if child.returncode != 0 or not answer.is_file():
            return CompileFacts(
                outcome="crash",
                detail=f"exit status {child.returncode}: {errors.strip()[-1500:]}",
                compile_seconds=time.perf_counter() - started,
            )
        return CompileFacts(**json.loads(answer.read_text()))


def _child_main() -> None:
    """Read a request from standard input and write its facts to the file named on the command line."""
    request = json.load(sys.stdin)
    facts = compile_facts(
        Problem.from_dict(request["problem"]), Candidate.from_key(request["candidate"]), request["target"]
    )
    # The compiler prints to both standard streams, so the answer takes a file.
    Path(sys.argv[1]).write_text(json.dumps(dataclasses.asdict(facts)))


if __name__ == "__main__":
    _child_main()
