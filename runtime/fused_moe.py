"""Tile sizes for the fused mixture-of-experts kernel of vLLM and SGLang: chosen by the model, and written as their files.

A layer of experts is two grouped products: rows x [hidden, 2 N], an activation, and rows x [N, hidden]. Their kernel runs both
with one config, so a config is judged by the sum of both. With M tokens, each sent to k experts, there are M k rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernelcast.errors import IllegalCandidateError, InvalidProblemError, KernelcastError, SettingsError, warn
from kernelcast.kernels import Block, Candidate, Device, Problem
from kernelcast.kernels.detect import detect, torch_device
from kernelcast.kernels.ops.grouped_gemm.schema import GROUPED_GEMM
from kernelcast.runtime.compile_ahead import compile_ahead
from kernelcast.runtime.fused_moe_file import VARIANT, FileName, device_label, write_file
from kernelcast.runtime.ranking import Ranking
from kernelcast.runtime.selector import Selector
from kernelcast.runtime.verify import decide, verify

#: Written into the records as the set of problems that they come from.
WORKLOAD = "fused-moe"

#: Numbers of tokens that vLLM's own tuning takes.
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)

#: What ``torch.cuda.get_device_name`` says of the known cards, for a plan made without one.
_NAMES = {
    "a100-sxm4-40gb": "NVIDIA A100-SXM4-40GB",
    "a100-sxm4-80gb": "NVIDIA A100-SXM4-80GB",
    "a100-pcie-80gb": "NVIDIA A100 80GB PCIe",
    "h100-sxm5-80gb": "NVIDIA H100 80GB HBM3",
    "h100-pcie-80gb": "NVIDIA H100 PCIe",
    "h200-sxm-141gb": "NVIDIA H200",
    "b200-sxm-180gb": "NVIDIA B200",
    "l4-24gb": "NVIDIA L4",
    "l40s-48gb": "NVIDIA L40S",
    "t4-16gb": "Tesla T4",
    "v100-sxm2-32gb": "Tesla V100-SXM2-32GB",
    "a10-24gb": "NVIDIA A10",
    "rtx-a4000-16gb": "NVIDIA RTX A4000",
    "rtx-3090-24gb": "NVIDIA GeForce RTX 3090",
    "rtx-4090-24gb": "NVIDIA GeForce RTX 4090",
    "rtx-5090-32gb": "NVIDIA GeForce RTX 5090",
    "mi300x-192gb": "AMD Instinct MI300X",
    "mi355x-288gb": "AMD Instinct MI355X",
}
#: Each parameter of a tile takes this many bits of a row's code.
_BITS = 10


class PlanWarning(UserWarning):
    """A file was written of configs that nothing stands behind but the roofline, or that were to be verified and are not."""


@dataclass(frozen=True)
class Layer:
    """A layer of experts, as one GPU has it.

    Attributes:
        experts: on this GPU.
        intermediate: N, the size of an expert's hidden layer: with tensor parallelism its share on one GPU.
        hidden: the size of a token.
        dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``.
        experts_per_token: experts that each token is sent to.
        distribution: of rows over experts, as in grouped_gemm.
    """

    experts: int
    intermediate: int
    hidden: int
    dtype: str
    experts_per_token: int
    distribution: str = "random"

    def problems(self, tokens: int) -> tuple[Problem, Problem]:
        """The two grouped products for so many tokens. Weights are stored [experts, n, k], and float32 is rounded to TF32.

        Raises:
            InvalidProblemError: a size or dtype that grouped_gemm does not have.
        """
        if type(self.experts_per_token) is not int or self.experts_per_token < 1:
            raise InvalidProblemError(
                f"experts_per_token is {self.experts_per_token!r}; it must be an integer of at least 1."
            )
        shapes = ((2 * self.intermediate, self.hidden), (self.hidden, self.intermediate))
        first, second = (
            GROUPED_GEMM.problem(
                groups=self.experts,
                m=tokens * self.experts_per_token,
                n=n,
                k=k,
                dtype=self.dtype,
                layout="nt",
                distribution=self.distribution,
                allow_tf32=self.dtype == "float32",
            )
            for n, k in shapes
        )
        return first, second


@dataclass(frozen=True)
class Choice:
    """The config for one number of tokens.

    Attributes:
        tokens: M.
        candidate: of ``triton_grouped``.
        source: ``"verified"`` (measured here), ``"predicted"`` (by the device's model) or ``"analytic"`` (by the roofline).
        predicted_us: predicted latency of both products.
        measured_us: measured latency of both; NaN if not measured.
        reason: one sentence.
    """

    tokens: int
    candidate: Candidate
    source: str
    predicted_us: float
    measured_us: float = math.nan
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """Configs of one layer on one device.

    Attributes:
        layer: what they are for.
        name: of the file.
        choices: one a number of tokens, ascending.
        triton_version: written into the file; empty leaves it out.
        hindrance: why nothing could be verified, where that was wanted; else empty.
    """

    layer: Layer
    name: FileName
    choices: tuple[Choice, ...]
    triton_version: str = ""
    hindrance: str = ""

    @property
    def configs(self) -> dict[int, Candidate]:
        """Number of tokens -> candidate."""
        return {choice.tokens: choice.candidate for choice in self.choices}

    def save(self, folder: str | Path) -> Path:
        """Write the file into a folder, under the name that vLLM and SGLang look for; returns its path.

        Raises:
            ImportFileError: it cannot be written.
        """
        return write_file(Path(folder), self.name, self.configs, self.triton_version)


def write(
    path: str | Path,
    experts: int,
    intermediate: int,
    hidden: int,
    dtype: str = "bfloat16",
    *,
    experts_per_token: int,
    device: Device | None = None,
    ms: Iterable[int] = TOKENS,
    distribution: str = "random",
    mode: str | None = None,
    top_k: int = 3,
    device_name: str | None = None,
    triton_version: str | None = None,
    selector: Selector | None = None,
) -> Path:
    """Plan (see :func:`plan`) and write the file into the folder ``path``; returns the file's path.

    Raises:
        KernelcastError: as :func:`plan`; or the file cannot be written.
    """
    made = plan(
        experts,
        intermediate,
        hidden,
        dtype,
        experts_per_token=experts_per_token,
        device=device,
        ms=ms,
        distribution=distribution,
        mode=mode,
        top_k=top_k,
        device_name=device_name,
        triton_version=triton_version,
        selector=selector,
    )
    if mode == "verify" and made.hindrance:
        warn(made.hindrance, PlanWarning)
    warn_of_guesses(made)
    return made.save(path)


def warn_of_guesses(made: Plan) -> None:
    """Warn of configs that nothing stands behind but the roofline."""
    guessed = [choice for choice in made.choices if choice.source == "analytic"]
    if guessed:
        warn(
            f"{len(guessed)} of {len(made.choices)} configs of {made.name} come from the roofline, which hardly tells tile sizes "
            f"apart ({guessed[0].reason.rstrip('.')}). Compare them with the server's own before you use them.",
            PlanWarning,
        )


def plan(
    experts: int,
    intermediate: int,
    hidden: int,
    dtype: str = "bfloat16",
    *,
    experts_per_token: int,
    device: Device | None = None,
    ms: Iterable[int] = TOKENS,
    distribution: str = "random",
    mode: str | None = None,
    top_k: int = 3,
    device_name: str | None = None,
    triton_version: str | None = None,
    selector: Selector | None = None,
) -> Plan:
    """Choose a config for each number of tokens: the model's first, or the fastest of its first few where the GPU is here.

    Args:
        experts: on one GPU (E).
        intermediate: the size of an expert's hidden layer on one GPU (N).
        hidden: the size of a token.
        dtype: of tokens and weights: ``"bfloat16"``, ``"float16"`` or ``"float32"``. grouped_gemm has no 8-bit weights.
        experts_per_token: experts that each token is sent to; at most ``experts``.
        device: the GPU; this machine's where None.
        ms: numbers of tokens.
        distribution: of rows over experts, as in grouped_gemm.
        mode: ``predict`` measures nothing, ``verify`` measures the first ``top_k`` where the GPU is here. Where None the
            configured mode: a plan is verified in ``verify`` and ``tune``, and predicted in the others.
        top_k: configs that are measured for each number of tokens.
        device_name: as torch names the GPU, for the file's name; known cards need none.
        triton_version: for the file; the installed one where None, ``""`` to leave it out.
        selector: ranks with its models, and measures by its plan; one for the device where None.

    Raises:
        InvalidProblemError: a size, dtype or distribution that grouped_gemm does not have.
        IllegalCandidateError: no config is legal there, or the device is a CPU.
        SettingsError: another mode, a ``top_k`` below 1, or the name of the device is not known.
    """
    if mode not in (None, "predict", "verify"):
        raise SettingsError(f"The mode is {mode!r}; a plan is made in predict or verify.")
    tokens = list(ms)
    if not tokens or not all(type(each) is int and each > 0 for each in tokens):
        raise InvalidProblemError(
            f"The numbers of tokens are {tokens}; there must be some, each an integer above 0."
        )
    if type(experts_per_token) is int and type(experts) is int and experts_per_token > experts:
        raise InvalidProblemError(
            f"experts_per_token is {experts_per_token} of {experts} experts; a token is sent to each at most once."
        )
    if selector is None:
        selector = Selector(device, mode=mode, top_k=top_k)
    elif device is not None and device.fingerprint != selector.device.fingerprint:
        raise SettingsError(f"The device is {device.name}, and the selector is of {selector.device.name}.")
    if selector.device.kind != "gpu":
        raise IllegalCandidateError(
            f"The kernel runs on GPUs, and {selector.device.name} is none. Name one: device=kernelcast.device('h100')."
        )
    measures = (mode or selector.mode) in ("verify", "tune")
    layer = Layer(experts, intermediate, hidden, dtype, experts_per_token, distribution)
    name = file_name(experts, intermediate, dtype, selector.device, device_name)
    here = is_here(selector.device)
    planner = Planner(selector, layer, top_k if measures and here else 0)
    choices = tuple(planner.choose(each) for each in sorted(set(tokens)))
    hindrance = ""
    if measures and not here:
        hindrance = (
            f"{selector.device.name} is not in this machine, so nothing can be verified here: all {len(choices)} configs are "
            f"{' or '.join(sorted({each.source for each in choices}))}. Run it on the GPU itself to verify."
        )
    version = _triton_version() if triton_version is None else triton_version
    return Plan(layer, name, choices, version, hindrance)


def file_name(
    experts: int, intermediate: int, dtype: str, device: Device, device_name: str | None = None
) -> FileName:
    """The name of the file that :func:`plan` with these arguments is saved under.

    Raises:
        SettingsError: the name of the device is not known.
    """
    label = device_label(device_name or torch_name(device))
    # What dtype a name mentions: vLLM's files for 16 bits mention none.
    return FileName(experts, intermediate, label, "float32" if dtype == "float32" else "")


class Planner:
    """Chooses the configs of one layer on one device.

    Args:
        selector: ranks, and says how to measure.
        layer: the layer.
        top_k: how many to measure; 0 measures nothing.
    """

    def __init__(self, selector: Selector, layer: Layer, top_k: int) -> None:
        self.selector = selector
        self.layer = layer
        self.top_k = top_k

    def choose(self, tokens: int) -> Choice:
        """The config for one number of tokens.

        Raises:
            IllegalCandidateError: none is legal.
        """
        problems = self.layer.problems(tokens)
        rankings = [self.selector.rank(problem) for problem in problems]
        block, latency_us = _both(rankings)
        if not block.length:
            device = self.selector.device
            raise IllegalCandidateError(
                f"No config of {VARIANT} is legal on {device.name} for both {problems[0]} and {problems[1]}. "
                "kernelcast.kernels.refusals(problem, device) says why."
            )
        order = np.argsort(latency_us, kind="stable")
        analytic = any(ranking.source == "analytic" for ranking in rankings)
        reason = "; ".join(dict.fromkeys(ranking.reason for ranking in rankings if ranking.reason))
        first = int(order[0])
        predicted = Choice(
            tokens=tokens,
            candidate=block.at(first),
            source="analytic" if analytic else "predicted",
            predicted_us=float(latency_us[first]),
            reason=f"The first of {block.length} for both products; {reason}.",
        )
        if not self.top_k:
            return predicted
        rows = [int(row) for row in order[: self.top_k]]
        candidates = [block.at(row) for row in rows]
        try:
            measured = [self.measure(problem, candidates) for problem in problems]
        except KernelcastError as error:
            return _because(predicted, str(error))
        total_us = measured[0][0] + measured[1][0]
        error_us = np.hypot(measured[0][0] * measured[0][1], measured[1][0] * measured[1][1])
        winner, _ = decide(np.log(total_us), error_us / total_us)
        if winner is None:
            return _because(predicted, f"none of the {len(rows)} measured worked for both products")
        return Choice(
            tokens=tokens,
            candidate=candidates[winner],
            source="verified",
            predicted_us=float(latency_us[rows[winner]]),
            measured_us=float(total_us[winner]),
            reason=f"The fastest of {len(rows)} measured for both products; {reason}.",
        )

    def measure(self, problem: Problem, candidates: Sequence[Candidate]) -> tuple[np.ndarray, np.ndarray]:
        """(latency in microseconds, standard error of its logarithm) of each candidate; NaN for a failure.

        Raises:
            KernelcastError: nothing of this problem can be measured here.
        """
        measurer, device = self.selector.measurer, self.selector.device
        harmful = compile_ahead(problem, candidates, device, time_limit_s=measurer.budget_seconds)
        sound = [row for row, candidate in enumerate(candidates) if candidate not in harmful]
        latency_us, error_log = np.full((2, len(candidates)), np.nan)
        if sound:
            verdict = verify(
                problem, [candidates[row] for row in sound], device, plan=measurer.plan, workload=WORKLOAD
            )
            taken = verdict.trial.measurements
            measurer.record(taken)
            latency_us[sound] = [each.latency_us for each in taken]
            error_log[sound] = [each.protocol.error_log for each in taken]
        return latency_us, error_log


def _because(choice: Choice, why: str) -> Choice:
    return Choice(
        choice.tokens,
        choice.candidate,
        choice.source,
        choice.predicted_us,
        reason=f"{why.rstrip('.')}, so not verified. {choice.reason}",
    )


def _both(rankings: Sequence[Ranking]) -> tuple[Block, np.ndarray]:
    """The configs that both rankings have and know, in the first one's order, and the latency of both in microseconds."""
    found = []
    for ranking in rankings:
        start = 0
        for block in ranking.table.blocks:
            rows = slice(start, start + block.length)
            start += block.length
            if block.variant == VARIANT:
                covered = ranking.prediction.covered[rows]
                latency_us = np.exp(ranking.prediction.log_latency[rows])[covered]
                found.append((block.take(covered), latency_us))
    if len(found) < len(rankings):
        return Block(VARIANT, {}, 0), np.zeros(0)
    (first, first_us), (second, second_us) = found
    _, in_first, in_second = np.intersect1d(_codes(first), _codes(second), return_indices=True)
    order = np.argsort(in_first, kind="stable")
    in_first, in_second = in_first[order], in_second[order]
    return first.take(in_first), first_us[in_first] + second_us[in_second]


def _codes(block: Block) -> np.ndarray:
    """One number a row, equal exactly where the configs are."""
    codes = np.zeros(block.length, dtype=np.int64)
    for name in sorted(block.columns):
        codes = (codes << _BITS) + block.columns[name].astype(np.int64)
    return codes


def torch_name(device: Device) -> str:
    """What ``torch.cuda.get_device_name`` says of a device: asked where it is here, else of the known cards.

    Raises:
        SettingsError: it is neither here nor known.
    """
    if is_here(device):
        import torch

        return str(torch.cuda.get_device_name(torch.device(torch_device(device))))
    if device.name not in _NAMES:
        raise SettingsError(
            f"What torch calls {device.name} is not known, and it is not here to be asked. Say device_name=..., as "
            "torch.cuda.get_device_name() says it there."
        )
    return _NAMES[device.name]


def is_here(device: Device) -> bool:
    """Whether this machine has a GPU of these hardware facts."""
    if device.kind != "gpu" or detect().kind != "gpu":
        return False
    try:
        torch_device(device)
    except KernelcastError:
        return False
    return True


def _triton_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
