"""Files of tile sizes that vLLM and SGLang read for their fused mixture-of-experts kernel.

Such a file is named for the layer and the GPU, ``E=8,N=14336,device_name=NVIDIA_H100_80GB_HBM3.json``, and maps a number of
tokens M to the config that the kernel runs with for about so many::

    {"triton_version": "3.6.0", "16": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1,
                                       "num_warps": 4, "num_stages": 3}, ...}

Source: ``get_config_file_name``, ``get_moe_configs`` and ``try_get_optimal_moe_config`` of vLLM (fused_moe), and SGLang's of
the same names, as of 2026. N is the size of an expert's hidden layer on one GPU: E and N are those of the second weight
[E, hidden, N]. What a dtype is called is left out of the name where it is float16 or bfloat16. Older vLLM (before 0.11)
does not know ``triton_version``.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelcast.errors import IllegalCandidateError, ImportFileError, InvalidRecordError
from kernelcast.kernels import Candidate

#: The variant that a config describes.
VARIANT = "triton_grouped"
#: Their names of its parameters, in the order in which vLLM writes them.
PARAMETERS = {
    "BLOCK_SIZE_M": "block_m",
    "BLOCK_SIZE_N": "block_n",
    "BLOCK_SIZE_K": "block_k",
    "GROUP_SIZE_M": "group_m",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
#: Hints for AMD's compiler. The variant has none, and leaves them out.
_HINTS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")

#: Far more than files have: a few kilobytes and 18 entries.
MAX_BYTES = 2**20
_MAX_ENTRIES = 4096
#: Tokens, experts and sizes of a layer are counted in 32 bits by these kernels.
_MAX_NUMBER = 2**31 - 1
#: The largest value of each parameter; Triton holds at most 2**20 elements in a tile.
_MOST = {
    "block_m": 1024,
    "block_n": 1024,
    "block_k": 1024,
    "group_m": 1024,
    "num_warps": 32,
    "num_stages": 16,
}
_POWERS_OF_TWO = ("block_m", "block_n", "block_k", "num_warps")

#: SGLang has a second file for the second product, ``..._down.json``: no config of it is for both, so it is none here.
_NAME = re.compile(
    r"E=(?P<experts>\d{1,10}),N=(?P<intermediate>\d{1,10}),device_name=(?P<device>[^,/\\\x00-\x1f]{1,120}?)"
    r"(,dtype=(?P<dtype>[a-z0-9_]{1,40}))?(,block_shape=\[(?P<block_n>\d{1,6}), ?(?P<block_k>\d{1,6})\])?(?<!_down)\.json"
)
_WHY_NOT = {
    "triton_grouped_split_k": "the kernel sums all of k in one program, and has no split factor",
    "triton_grouped_persistent": "the kernel makes one tile a program, and has no number of programs for each core",
}


@dataclass(frozen=True)
class FileName:
    """What the name of a file says.

    Attributes:
        experts: E, on one GPU.
        intermediate: N, the size of an expert's hidden layer on one GPU.
        device_name: as ``torch.cuda.get_device_name`` says it, with underscores for spaces.
        dtype: of the weights, where it is neither float16 nor bfloat16: ``"float32"``, ``"fp8_w8a8"``, ...
        block_shape: rows and columns of the blocks that weights of 8 bits are scaled by.

    Raises:
        InvalidRecordError: a part that no name can hold.
    """

    experts: int
    intermediate: int
    device_name: str
    dtype: str = ""
    block_shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("experts", "intermediate"):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= _MAX_NUMBER:
                raise InvalidRecordError(
                    f"{name} is {value!r}; it must be an integer from 1 to {_MAX_NUMBER}."
                )
        if _NAME.fullmatch(str(self)) is None:
            raise InvalidRecordError(
                f"{str(self)!r} is no name that vLLM forms. The name of the device must have no comma and no slash."
            )

    def __str__(self) -> str:
        dtype = f",dtype={self.dtype}" if self.dtype else ""
        block = "" if self.block_shape is None else ",block_shape=[{},{}]".format(*self.block_shape)
        return f"E={self.experts},N={self.intermediate},device_name={self.device_name}{dtype}{block}.json"

    @classmethod
    def parse(cls, path: Path) -> FileName:
        """What the name of a file says.

        Raises:
            ImportFileError: it is none that vLLM or SGLang form.
        """
        found = _NAME.fullmatch(path.name)
        if found is None:
            raise ImportFileError(
                path,
                "the name is none of a fused-MoE config. It must be as E=8,N=14336,device_name=NVIDIA_H200.json, with "
                ",dtype=... and ,block_shape=[...] after it where the weights are not of 16 bits.",
            )
        try:
            return cls(
                int(found["experts"]),
                int(found["intermediate"]),
                found["device"],
                found["dtype"] or "",
                (int(found["block_n"]), int(found["block_k"])) if found["block_n"] else None,
            )
        except InvalidRecordError as error:
            raise ImportFileError(path, str(error)) from error


def device_label(name: str) -> str:
    """A GPU's name as files have it: underscores for spaces, and one name for all cards of the H200 family, as in vLLM."""
    label = name.strip().replace(" ", "_")
    return "NVIDIA_H200" if "H200" in label.split("_") else label


def config_of(candidate: Candidate) -> dict[str, int]:
    """A candidate's config in their words.

    Raises:
        IllegalCandidateError: their kernel cannot run so; the message says why.
    """
    if candidate.variant != VARIANT:
        why = _WHY_NOT.get(
            candidate.variant, f"the kernel works as {VARIANT} does, and {candidate.variant} does not"
        )
        raise IllegalCandidateError(f"{candidate} cannot be written to a fused-MoE config: {why}.")
    config = candidate.parameters
    if sorted(config) != sorted(PARAMETERS.values()):
        raise IllegalCandidateError(
            f"{candidate} cannot be written to a fused-MoE config: a config has {', '.join(PARAMETERS.values())}."
        )
    values = {}
    for theirs, ours in PARAMETERS.items():
        value = config[ours]
        fault = _fault(ours, value)
        if fault:
            raise IllegalCandidateError(
                f"{candidate} cannot be written to a fused-MoE config: {ours} {fault}."
            )
        values[theirs] = int(value)
    return values


def candidate_of(config: Mapping[str, Any]) -> Candidate:
    """The candidate that one of their configs describes.

    Raises:
        InvalidRecordError: a key is missing, unknown or has a value that cannot be; or it splits k, which
            ``triton_grouped`` does not do.
    """
    for name in PARAMETERS:
        if name not in config:
            raise InvalidRecordError(f"it has no {name}; it needs {', '.join(PARAMETERS)}")
    values = {}
    for name, value in config.items():
        if name in PARAMETERS:
            fault = _fault(PARAMETERS[name], value)
            if fault:
                raise InvalidRecordError(f"{name} {fault}")
            values[PARAMETERS[name]] = value
        elif name == "SPLIT_K":
            if type(value) is not int or value != 1:
                raise InvalidRecordError(
                    f"SPLIT_K is {_shown(value)}; {VARIANT} sums all of k in one program"
                )
        elif name in _HINTS:
            if type(value) is not int or not 0 <= value <= 1024:
                raise InvalidRecordError(f"{name} is {_shown(value)}; it must be an integer from 0 to 1024")
        else:
            known = ", ".join((*PARAMETERS, "SPLIT_K", *_HINTS))
            raise InvalidRecordError(f"the key {_shown(name)} is not known; known are {known}")
    return Candidate.of(VARIANT, values)


def _fault(name: str, value: Any) -> str:
    """What is wrong with a parameter's value; empty if nothing is."""
    if type(value) is not int or not 1 <= value <= _MOST[name]:
        return f"is {_shown(value)}; it must be an integer from 1 to {_MOST[name]}"
    if name in _POWERS_OF_TWO and value & (value - 1):
        return f"is {value}; it must be a power of two"
    return ""


def write_file(
    folder: Path, name: FileName, configs: Mapping[int, Candidate], triton_version: str = ""
) -> Path:
    """Write a file under its name, as vLLM does; one that is there is replaced in one step.

    Raises:
        IllegalCandidateError: a candidate that their kernel cannot run.
        InvalidRecordError: a number of tokens that is no positive integer, or none at all.
        ImportFileError: the folder cannot be written.
    """
    if not configs:
        raise InvalidRecordError("There is no config to write; name some numbers of tokens.")
    content: dict[str, Any] = {"triton_version": triton_version} if triton_version else {}
    for tokens in sorted(configs):
        if type(tokens) is not int or not 0 < tokens <= _MAX_NUMBER:
            raise InvalidRecordError(f"{tokens!r} tokens; it must be an integer from 1 to {_MAX_NUMBER}.")
        content[str(tokens)] = config_of(configs[tokens])
    path = folder / str(name)
    temporary = folder / f".{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ImportFileError(
            path, f"it cannot be written ({error.strerror or error}). Name another folder."
        ) from error
    return path


def read_file(path: Path) -> tuple[FileName, dict[int, Candidate], str]:
    """Read a file: what its name says, the configs by their number of tokens in the file's order, and Triton's version.

    Raises:
        ImportFileError: it cannot be read, is too large, or something in it cannot be; the message names the key.
    """
    name = FileName.parse(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ImportFileError(path, f"it cannot be read ({error.strerror or error}).") from error
    if len(raw) > MAX_BYTES:
        raise ImportFileError(path, f"it is larger than {MAX_BYTES} bytes, and no such file is.")
    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse)
    except InvalidRecordError as error:
        raise ImportFileError(path, str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ImportFileError(path, f"it is no JSON ({_shown(error)}).") from error
    if not isinstance(content, dict):
        raise ImportFileError(path, f"it holds {type(content).__name__}; it must be an object of configs.")
    version = content.pop("triton_version", "")
    if type(version) is not str or len(version) > 80:
        raise ImportFileError(path, f"triton_version is {_shown(version)}; it must be a short text.")
    if not 0 < len(content) <= _MAX_ENTRIES:
        raise ImportFileError(path, f"it has {len(content)} configs; it must have 1 to {_MAX_ENTRIES}.")
    configs = {}
    for key, config in content.items():
        if not re.fullmatch(r"[1-9]\d{0,9}", key, re.ASCII) or int(key) > _MAX_NUMBER:
            raise ImportFileError(path, f"the key {_shown(key)} is no number of tokens.")
        if not isinstance(config, dict):
            raise ImportFileError(
                path, f"the config of {key} tokens is {_shown(config)}; it must be an object."
            )
        try:
            configs[int(key)] = candidate_of(config)
        except InvalidRecordError as error:
            raise ImportFileError(path, f"the config of {key} tokens cannot be used: {error}.") from error
    return name, configs, version


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which no key comes twice: which of the two counts is for nobody to guess."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InvalidRecordError(f"the key {_shown(key)} comes twice.")
        found[key] = value
    return found


def _refuse(constant: str) -> None:
    raise InvalidRecordError(f"{constant} is no number that a config can have.")


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, Exception) else str(value)
    text = "".join(char if char.isprintable() else "?" for char in text[:80])
    return text
