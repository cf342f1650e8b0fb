"""Keys of the cache: every fact that can change which candidate is fastest, and none of the tensors' values.

A key has two parts. Problem and device name a *place*; all entries of one place answer the same question. The environment
(software, variants, timing protocol) and how many were measured tell the entries of a place apart: what was verified in
another environment is no answer here, and a good guess (:meth:`kernelcast.runtime.cache.SelectionCache.priors`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from kernelcast.datasets.record import Environment
from kernelcast.datasets.timing import PROTOCOL
from kernelcast.errors import InvalidRecordError
from kernelcast.kernels import Device, Problem, variants
from kernelcast.kernels.registry import on_change

#: How candidates are called when they are timed: each call by Python, not replayed from a graph.
_DISPATCH = "eager"

#: Environment variables by which users choose other kernels inside the libraries that every variant calls. The libraries
#: read them when they load.
SWITCHES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_HIPBLASLT",
    "TORCH_CUDNN_V8_API_DISABLED",
)

#: Keys that are kept for their problems; beyond, all are built anew.
_MOST_KEYS = 100_000

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_AMD_DRIVER = Path("/sys/module/amdgpu/version")


def canonical(value: Any) -> str:
    """JSON without spaces, in ASCII. Names stay in the order of the record, which is fixed: a problem's is the schema's."""
    return _encoder.encode(value)


_encoder = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True)
class CacheEnvironment:
    """The software facts of a selection. A fact that is not known is ``"unknown"``.

    Attributes:
        kernelcast: its version: rules and launchers are shared by variants, and are in no variant's hash.
        python: major and minor version: variants made of several torch calls pay for each call.
        torch: its version, with the build tag.
        triton: its version.
        runtime: CUDA or ROCm version that torch was built for; ``"cpu"`` on a CPU.
        driver: version of the GPU's driver; ``"none"`` on a CPU.
        system: operating system and machine.
        protocol: the timing protocol and how it calls candidates (eager): launch overhead decides between short kernels.
        switches: (name, value) of those environment variables of :data:`SWITCHES` that are set.
        variants: (name, hash of source and space) of every variant of the operation: a new or changed one may be faster.

    Raises:
        InvalidRecordError: a field is of another type.
    """

    kernelcast: str
    python: str
    torch: str
    triton: str
    runtime: str
    driver: str
    system: str
    protocol: str
    switches: tuple[tuple[str, str], ...]
    variants: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("switches", "variants"):
                if type(value) is not str:
                    raise InvalidRecordError(f"{each.name} of a key is {value!r}; it must be a text.")
            elif type(value) is not tuple or not all(
                type(pair) is tuple and len(pair) == 2 and all(type(text) is str for text in pair)
                for pair in value
            ):
                raise InvalidRecordError(f"{each.name} of a key is {value!r}; it must be pairs of texts.")

    @classmethod
    def current(cls, operation: str, kind: str) -> CacheEnvironment:
        """The environment of this process for an operation on a kind of device: ``"cpu"`` or ``"gpu"``.

        Built once, and again when the operation gets a variant.

        Raises:
            UnknownNameError: no such operation.
        """
        found = _environments.get((operation, kind))
        if found is None:
            variants(operation)  # the first time this loads the operation, which registers them
            generation = _catalogue.generation
            registered = variants(operation)
            here = Environment.current("", device_kind=kind)
            found = cls(
                kernelcast=_installed("kernelcast"),
                python=f"{sys.version_info.major}.{sys.version_info.minor}",
                torch=here.torch,
                triton=here.triton,
                runtime=_gpu_runtime() if kind == "gpu" else here.runtime,
                driver=_gpu_driver() if kind == "gpu" else "none",
                system=here.system,
                protocol=f"{PROTOCOL} {_DISPATCH}",
                switches=tuple((name, os.environ[name]) for name in SWITCHES if name in os.environ),
                variants=tuple(sorted((name, _variant_hash(each)) for name, each in registered.items())),
            )
            with _catalogue.guard:
                if generation == _catalogue.generation:
                    found = _environments.setdefault((operation, kind), found)
        return found

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits over every fact."""
        return hashlib.sha256(canonical(self.to_dict()).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain JSON values; :meth:`from_dict` is its inverse."""
        facts = {each.name: getattr(self, each.name) for each in fields(self)}
        # As pairs, not as a mapping: the inverse must find a name that comes twice.
        return {
            **facts,
            "switches": [list(pair) for pair in self.switches],
            "variants": [list(pair) for pair in self.variants],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CacheEnvironment:
        """Read what :meth:`to_dict` wrote.

        Raises:
            InvalidRecordError: a field is missing, unknown, or of another type.
        """
        try:
            values = dict(data)
            for name in ("switches", "variants"):
                values[name] = tuple(tuple(pair) for pair in values[name])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRecordError(
                f"Not the environment of a key ({type(error).__name__}: {error})."
            ) from error


@dataclass(frozen=True)
class CacheKey:
    """Every fact that can change which candidate is fastest.

    Attributes:
        problem: :attr:`kernelcast.kernels.Problem.key`: operation, dimensions, dtypes, layouts, precision, threads.
        device: the hardware's fingerprint, over every hardware fact and not the name.
        environment: the software, the variants and the timing protocol.
        top_k: how many were measured at most; 0 for the whole space (mode ``tune``).
        target_regret: the expected regret down to which a verification measured; None where ``top_k`` alone decided.

    Raises:
        InvalidRecordError: a field is of another type, or a number is below 0.
    """

    problem: str
    device: str
    environment: CacheEnvironment
    top_k: int
    target_regret: float | None = None

    def __post_init__(self) -> None:
        for name in ("problem", "device"):
            if type(getattr(self, name)) is not str:
                raise InvalidRecordError(f"{name} of a key is {getattr(self, name)!r}; it must be a text.")
        if type(self.environment) is not CacheEnvironment:
            raise InvalidRecordError(f"The environment of a key is {self.environment!r}.")
        if type(self.top_k) is not int or self.top_k < 0:
            raise InvalidRecordError(
                f"top_k of a key is {self.top_k!r}; it must be an integer of at least 0."
            )
        regret = self.target_regret
        if regret is not None and not (type(regret) is float and 0.0 <= regret <= 1.0):
            raise InvalidRecordError(
                f"target_regret of a key is {regret!r}; it must be a number from 0 to 1, or None."
            )

    @classmethod
    def of(cls, problem: Problem, device: Device, top_k: int, target_regret: float | None = None) -> CacheKey:
        """The key of a problem on a device in this process's environment. Equal arguments give the same object.

        Raises:
            UnknownNameError: no such operation.
        """
        asked = (problem.key, device.fingerprint, top_k, target_regret)
        found = _keys.get(asked)
        if found is None:
            generation = _catalogue.generation
            environment = CacheEnvironment.current(problem.operation, device.kind)
            regret = None if target_regret is None else float(target_regret)
            found = cls(problem.key, device.fingerprint, environment, top_k, regret)
            with _catalogue.guard:
                if len(_keys) >= _MOST_KEYS:
                    _keys.clear()
                # What was built while a variant was registered may lack it.
                if generation == _catalogue.generation:
                    found = _keys.setdefault(asked, found)
        return found

    # Once, and not at each lookup: the fields hold some thirty texts.
    @cached_property
    def _hash(self) -> int:
        return hash(self.digest)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits over every fact: the entry's file name."""
        # The environment by its own digest, which is computed once for all problems.
        facts = [self.problem, self.device, self.environment.digest, self.top_k, self.target_regret]
        return hashlib.sha256(canonical(facts).encode()).hexdigest()

    @cached_property
    def place(self) -> str:
        """32 hexadecimal digits over problem and device: the entry's folder."""
        return place_of(self.problem, self.device)

    def to_dict(self) -> dict[str, Any]:
        """The key as plain JSON values; :meth:`from_dict` is its inverse."""
        return {
            "problem": self.problem,
            "device": self.device,
            "environment": self.environment.to_dict(),
            "top_k": self.top_k,
            "target_regret": self.target_regret,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CacheKey:
        """Read what :meth:`to_dict` wrote.

        Raises:
            InvalidRecordError: a field is missing, unknown, or of another type.
        """
        try:
            values = dict(data)
            values["environment"] = CacheEnvironment.from_dict(values["environment"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRecordError(f"Not a key ({type(error).__name__}: {error}).") from error


def place_of(problem: str, device: str) -> str:
    """The folder of a problem's key on a device's fingerprint: 32 hexadecimal digits."""
    return hashlib.sha256(canonical([problem, device]).encode()).hexdigest()[:32]


class _Catalogue:
    """How often the catalogue has changed, as far as keys are concerned."""

    def __init__(self) -> None:
        self.generation = 0
        self.guard = threading.Lock()


_catalogue = _Catalogue()
_environments: dict[tuple[str, str], CacheEnvironment] = {}
_keys: dict[tuple[str, str, int, float | None], CacheKey] = {}


def forget_keys(operation: str = "") -> None:
    """Build the environment of an operation anew when it is next asked for; of all operations where none is named.

    Called whenever the catalogue gets a variant. A program that changes a variant's source or an environment variable of
    :data:`SWITCHES` while it runs calls it itself.
    """
    with _catalogue.guard:
        _catalogue.generation += 1
        for asked in list(_environments):
            if not operation or asked[0] == operation:
                del _environments[asked]
        # All of them: the text of a problem does not say its operation without being read.
        _keys.clear()


def _after_fork() -> None:
    """A forked child has no thread that could release what another thread of its parent held."""
    _catalogue.guard = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
on_change(forget_keys)


def _variant_hash(variant: Any) -> str:
    """Over a variant's source and the values of its parameters: a user's space need not be part of the source."""
    space = [[each.name, [repr(value) for value in each.values]] for each in variant.parameters]
    return hashlib.sha256(canonical([variant.source_hash(), space]).encode()).hexdigest()[:16]


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def _gpu_runtime() -> str:
    """CUDA or ROCm version that torch was built for. From its file where torch is not imported: both must say the same."""
    torch = sys.modules.get("torch")
    if torch is not None:
        cuda, hip = torch.version.cuda, torch.version.hip
    else:
        try:
            text = _text(Path(str(distribution("torch").locate_file("torch/version.py"))))
        except PackageNotFoundError:
            text = ""
        if not text:
            return "unknown"
        cuda, hip = (_stated(name, text) for name in ("cuda", "hip"))
    return f"rocm-{hip}" if hip else f"cuda-{cuda}"


def _stated(name: str, text: str) -> str | None:
    """The text that a Python file assigns to a name; None if it assigns none."""
    found = re.search(rf"^{name}\b[^=]*= *['\"]([^'\"]*)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def _gpu_driver() -> str:
    """Version of the driver as the kernel tells it."""
    found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", _text(_NVIDIA_DRIVER))
    return found[1] if found else _text(_AMD_DRIVER).strip() or "unknown"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
