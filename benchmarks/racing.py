"""Racing against a fixed number of rounds, on the same candidates of the same problems: what is picked, and in what time.

Each problem's candidates are checked once and then timed twice on one thread, in a race and for 40 rounds each; which
comes first alternates. What the two would select is then timed again, in rounds of its own that neither has seen: these
say how much slower the race's choice is than that of the fixed rounds.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernelcast.kernels import Candidate, Problem

FIXED_ROUNDS = 40
#: What is promised of the race: the same choice but for so much, in at most such a share of the time.
MOST_REGRET, MOST_SHARE = 0.01, 1 / 3

#: Three problems of each operation of the demonstration: sizes of published networks at which no candidate takes more
#: than some tens of milliseconds, so that 40 rounds of all of them take seconds.
PROBLEMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gemm", {"m": 64, "n": 64, "k": 4096}),
    ("gemm", {"m": 16, "n": 2048, "k": 2048}),
    ("gemm", {"m": 256, "n": 512, "k": 512}),
    ("conv2d", {"n": 1, "c": 64, "h": 28, "w": 28, "k": 64, "r": 3, "s": 3, "pad_h": 1, "pad_w": 1}),
    ("conv2d", {"n": 1, "c": 128, "h": 14, "w": 14, "k": 256, "r": 1, "s": 1}),
    ("conv2d", {"n": 1, "c": 4, "h": 64, "w": 64, "k": 4, "r": 15, "s": 15, "pad_h": 7, "pad_w": 7}),
    ("attention", {"batch": 8, "heads": 8, "q_len": 32, "kv_len": 32, "head_dim": 64}),
    ("attention", {"batch": 1, "heads": 8, "q_len": 256, "kv_len": 256, "head_dim": 64}),
    ("attention", {"batch": 1, "heads": 8, "q_len": 1, "kv_len": 1024, "head_dim": 64}),
    ("softmax", {"rows": 256, "columns": 512}),
    ("softmax", {"rows": 64, "columns": 16384}),
    ("softmax", {"rows": 4096, "columns": 64}),
)


def main(quick: bool) -> dict[str, Any]:
    """Run every problem. Quick: one problem of two operations, and a quarter of the rounds."""
    wanted = [PROBLEMS[0], PROBLEMS[9]] if quick else PROBLEMS
    rounds = FIXED_ROUNDS // 4 if quick else FIXED_ROUNDS
    return page(
        [compare(name, dims, rounds, race_first=bool(i % 2)) for i, (name, dims) in enumerate(wanted)], rounds
    )


def compare(operation: str, dims: dict[str, Any], rounds: int, *, race_first: bool = False) -> dict[str, Any]:
    """One problem's figures: candidates, the two choices, the two times, and the regret of the race's choice."""
    from kernelcast.datasets.clocks import CpuClock
    from kernelcast.datasets.surroundings import cpu_threads
    from kernelcast.datasets.timing import TimingPlan, race
    from kernelcast.kernels import problem

    wanted = problem(operation, **dims, threads=1)
    # As many rounds as a collection has, where the fixed ones are as many as they should be.
    plans = {
        "fixed": fixed_plan(rounds),
        "race": TimingPlan(rounds=TimingPlan().rounds * rounds // FIXED_ROUNDS),
    }
    picks, seconds, ran = {}, {}, {}
    import torch

    with cpu_threads(1), torch.inference_mode():
        candidates, calls, estimates_us = prepared(wanted)
        for name in sorted(plans, reverse=race_first):
            began = time.perf_counter()
            result = race(calls, CpuClock(), plans[name], estimates_us=estimates_us)
            seconds[name] = time.perf_counter() - began
            picks[name] = pick(result)
            ran[name] = int(np.isfinite(result.samples_us).sum())
        regret, error = judged(calls, estimates_us, picks["race"], picks["fixed"], rounds)
    return {
        "problem": str(wanted),
        "candidates": len(calls),
        "fixed": str(candidates[picks["fixed"]]),
        "race": str(candidates[picks["race"]]),
        "regret": regret,
        "regret_error": error,
        "fixed_seconds": seconds["fixed"],
        "race_seconds": seconds["race"],
        "share": seconds["race"] / seconds["fixed"],
        "fixed_samples": ran["fixed"],
        "race_samples": ran["race"],
    }


def fixed_plan(rounds: int) -> Any:
    """Every candidate in every round, whatever it takes."""
    from kernelcast.datasets.timing import TimingPlan

    return TimingPlan(
        rounds=rounds, least_rounds=rounds, hopeless=1e9, race_margin=1e9, seconds=1e6, candidate_seconds=1e6
    )


def prepared(wanted: Problem) -> tuple[list[Candidate], list[Callable[[], Any]], list[float]]:
    """(the legal candidates of a problem that give the right result, what to time of each, a rough time of each)."""
    from kernelcast.datasets.clocks import CpuClock
    from kernelcast.kernels import candidates, operation, variant
    from kernelcast.kernels.detect import detect

    described = operation(wanted.operation)
    inputs = described.make_inputs(wanted, seed=0, device="cpu")
    expected = described.reference(wanted, *inputs)
    kept, calls, estimates_us = [], [], []
    for candidate in candidates(wanted, detect("cpu"), subset="full"):
        launch = variant(wanted.operation, candidate.variant).build(wanted, candidate.parameters)
        # What cannot run here would not be timed by any plan.
        with contextlib.suppress(Exception):
            if described.check(wanted, expected, launch(*inputs)) is None:
                calls.append(lambda launch=launch: launch(*inputs))
                estimates_us.append(CpuClock().single_us(calls[-1]))
                kept.append(candidate)
    return kept, calls, estimates_us


def pick(result: Any) -> int:
    """What a verification would select from these rounds."""
    from kernelcast.runtime.verify import decide

    winner, _ = decide(result.paired_log(), result.paired_error())
    if winner is None:
        raise RuntimeError("No candidate has a sample.")
    return winner


def judged(
    calls: Sequence[Callable[[], Any]], estimates_us: Sequence[float], chosen: int, other: int, rounds: int
) -> tuple[float, float]:
    """(how much slower a choice is than another one, the standard error of that), from rounds of these two alone."""
    from kernelcast.datasets.clocks import CpuClock
    from kernelcast.datasets.timing import race

    if chosen == other:
        return 0.0, 0.0
    both = [chosen, other]
    result = race(
        [calls[i] for i in both], CpuClock(), fixed_plan(rounds), estimates_us=[estimates_us[i] for i in both]
    )
    logs, errors = result.paired_log(), result.paired_error()
    return math.expm1(float(logs[0] - logs[1])), float(np.hypot(*errors))


def page(found: Sequence[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """The tables of some problems' figures."""
    share = sum(each["race_seconds"] for each in found) / sum(each["fixed_seconds"] for each in found)
    worst = max(each["regret"] for each in found)
    beyond = [each for each in found if each["regret"] - 2 * each["regret_error"] > MOST_REGRET]
    rows = [
        [
            each["problem"],
            each["candidates"],
            each["fixed"],
            each["race"],
            f"{max(each['regret'], 0.0):.2%} ± {each['regret_error']:.2%}"
            if each["race"] != each["fixed"]
            else "same",
            each["fixed_seconds"],
            each["race_seconds"],
            f"{each['share']:.0%}",
        ]
        for each in found
    ]
    return {
        "title": f"Racing against {rounds} fixed rounds",
        "tables": [
            {
                "title": "In all",
                "columns": ["what", "found", "wanted"],
                "rows": [
                    [
                        "time of the races over that of the fixed rounds",
                        f"{share:.1%}",
                        f"at most {MOST_SHARE:.1%}",
                    ],
                    ["largest regret of a race's choice", f"{worst:.2%}", f"at most {MOST_REGRET:.0%}"],
                    ["choices beyond that by more than two errors", len(beyond), 0],
                    [
                        "same choices",
                        sum(each["race"] == each["fixed"] for each in found),
                        f"of {len(found)}",
                    ],
                ],
            },
            {
                "title": "Each problem",
                "columns": [
                    "problem",
                    "candidates",
                    "fixed rounds choose",
                    "the race chooses",
                    "regret",
                    "fixed s",
                    "race s",
                    "share",
                ],
                "rows": rows,
            },
        ],
        "problems": list(found),
        "share": share,
        "largest_regret": worst,
        "notes": [
            "One thread. The same calls and repeats in both; the time is that of the rounds, without checking and compiling, "
            "which are the same.",
            "A race is that of a collection, `TimingPlan()`: at most half as many rounds. Which of the two runs first "
            "alternates.",
            "Regret: how much slower the race's choice is than that of the fixed rounds, in further rounds of these two "
            "alone, with its standard error. Candidates within noise are a tie, of which the first in the fixed order is "
            "chosen, so another choice need not be a worse one.",
        ],
    }
