"""Files of vLLM's and SGLang's fused mixture-of-experts kernel as candidates that are worth measuring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from kernelcast.errors import IllegalCandidateError, InvalidRecordError
from kernelcast.kernels import Candidate, Device, Problem, require_legal, variant
from kernelcast.runtime.fused_moe_file import VARIANT, FileName, read_file


@dataclass(frozen=True)
class Priors:
    """Configs from a file, as candidates that are worth measuring. Give it to a selector as its ``priors``.

    Attributes:
        name: what the file's name says.
        configs: number of tokens -> candidate, exactly as the file has it, in its order.
        triton_version: that the file was tuned with; empty if it does not say.
        experts_per_token: experts that each token is sent to, which the file does not say.
    """

    name: FileName
    configs: Mapping[int, Candidate] = field(hash=False)
    triton_version: str = ""
    experts_per_token: int = 1

    def __post_init__(self) -> None:
        if type(self.experts_per_token) is not int or self.experts_per_token < 1:
            raise InvalidRecordError(
                f"experts_per_token is {self.experts_per_token!r}; it must be an integer of at least 1."
            )
        object.__setattr__(self, "configs", MappingProxyType(dict(self.configs)))

    def nearest(self, tokens: float) -> Candidate:
        """The config of the nearest number of tokens, the first of two that are equally near: vLLM's rule."""
        return self.configs[min(self.configs, key=lambda known: abs(known - tokens))]

    def serves(self, problem: Problem) -> bool:
        """Whether a problem is one of the two products of this layer, in the file's dtype."""
        if problem.operation != "grouped_gemm" or problem["groups"] != self.name.experts:
            return False
        n, k, size = problem["n"], problem["k"], self.name.intermediate
        of_dtype = problem.dtype == self.name.dtype if self.name.dtype else problem.element_bytes == 2
        return of_dtype and (n in (size, 2 * size) or k == size)

    def candidates(self, problem: Problem, device: Device | None = None) -> list[Candidate]:
        """What to measure for a problem beside the default: the nearest config, or none where it does not serve.

        A value that ``triton_grouped`` does not have (their groups of 32 and 64 rows of tiles, tiles of 256 along k)
        becomes the nearest that it has. Device: refuses a config that is not legal on it; with None all pass.
        """
        if not self.serves(problem):
            return []
        found = _in_space(self.nearest(problem["m"] / self.experts_per_token))
        if device is not None:
            try:
                require_legal(problem, device, found)
            except IllegalCandidateError:
                return []
        return [found]

    __call__ = candidates


def read(path: str | Path, *, experts_per_token: int) -> Priors:
    """Read a file of vLLM's or SGLang's.

    Args:
        path: the file, under its own name, which says the layer.
        experts_per_token: experts that each token is sent to: with it, rows of a product are numbers of tokens.

    Raises:
        ImportFileError: the name or the content cannot be; the message says what and where.
        InvalidRecordError: ``experts_per_token`` is no positive integer.
    """
    name, configs, version = read_file(Path(path))
    return Priors(name, configs, version, experts_per_token)


def _in_space(candidate: Candidate) -> Candidate:
    """The config with each value the nearest that the variant has, the smaller of two that are equally near."""
    config = candidate.parameters
    for parameter in variant("grouped_gemm", VARIANT).parameters:
        wanted = int(config[parameter.name])
        config[parameter.name] = min(
            (int(value) for value in parameter.values), key=lambda value: (abs(value - wanted), value)
        )
    return Candidate.of(candidate.variant, config)
