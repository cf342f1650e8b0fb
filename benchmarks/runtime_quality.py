"""Selections that verify, on held-out problems of every operation on this CPU: against measuring everything, and the default.

A model is trained for each operation on problems measured here. For held-out ones the selector verifies as at a first
call; then everything is measured under the same protocol; then the default, the selection and the winner of everything
run against one another once more, in rounds that had no part in any choice.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from runtime_problems import DRAWS, draw

#: Training and held-out problems of each operation.
TRAINING, HELD_OUT = 24, 23
#: Time for measuring everything of one problem, at most.
WHOLE_SECONDS = 60.0
#: Its rounds: fewer than those of a collection.
WHOLE_ROUNDS = 16
#: Rounds of the last comparison.
JUDGED_ROUNDS = 31
#: How selections are made: options of the selector.
WAYS = {"top_k=3": {"top_k": 3}, "target_regret=0.01": {"target_regret": 0.01}}
_EVERYTHING = "everything"


@dataclass(frozen=True)
class Found:
    """One held-out problem under one way of selecting.

    Attributes:
        regret: share of the selection's time that the winner of everything would save, measured anew; below 0 where the
            selection was the faster one.
        over_default: log of the selection's time over the default's, measured anew; 0 where the default was selected.
        error: standard error of ``over_default``.
        time_share: time of the verification over that of measuring everything.
    """

    operation: str
    problem: str
    selected: str
    candidates: int
    measured: int
    regret: float
    over_default: float
    error: float
    time_share: float


def main(quick: bool) -> dict[str, Any]:
    """Every operation. Quick: softmax and gemm, a few problems each."""
    import torch

    from kernelcast.kernels.detect import detect

    torch.set_num_threads(1)
    device = detect("cpu")
    training, held_out = (8, 3) if quick else (TRAINING, HELD_OUT)
    found: dict[str, list[Found]] = {way: [] for way in WAYS}
    promoted = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("softmax", "gemm") if quick else DRAWS:
            trained = draw(name, training, seed=0, threads=1)
            judged = draw(
                name, held_out, seed=1, threads=1, without=frozenset(each.shape for each in trained)
            )
            promoted += [name] if _train(name, trained, device, Path(folder)) else []
            for way, rows in _judge(judged, device, Path(folder)).items():
                found[way] += rows
    return page(found, promoted)


def _train(name: str, problems: list[Any], device: Any, root: Path) -> bool:
    """Measure problems and train; whether the model passed the gate, and so ranks."""
    from kernelcast.datasets.collect import collect
    from kernelcast.datasets.store import Store
    from kernelcast.datasets.timing import TimingPlan
    from kernelcast.training.data import load_problems
    from kernelcast.training.train import train

    plan = TimingPlan(rounds=12, seconds=2.0, candidate_seconds=0.5)
    collect(problems, device, root / "store", workload="training", plan=plan)
    data = load_problems(Store(root / "store"), name, device=device)
    return train(data, device=device, models_dir=root / "models", tracking=False).promoted


def _judge(problems: list[Any], device: Any, root: Path) -> dict[str, list[Found]]:
    from kernelcast.datasets.timing import TimingPlan, measure
    from kernelcast.kernels import candidates
    from kernelcast.runtime import Selector
    from kernelcast.runtime.verify import decide

    selectors = {
        way: Selector(device, models=root / "models", cache=False, store=False, mode="verify", **options)
        for way, options in WAYS.items()
    }
    whole_plan = TimingPlan(rounds=WHOLE_ROUNDS, seconds=WHOLE_SECONDS, candidate_seconds=1.0)
    judge_plan = TimingPlan(rounds=JUDGED_ROUNDS, least_rounds=JUDGED_ROUNDS, seconds=10.0, hopeless=100.0)
    found: dict[str, list[Found]] = {way: [] for way in WAYS}
    for number, problem in enumerate(problems):
        table = list(candidates(problem, device, subset="auto"))
        selections, seconds = {}, {}
        # In turns: who measures a problem first pays for what torch prepares at a first call.
        for way in _turned([*WAYS, _EVERYTHING], number):
            if way != _EVERYTHING:
                selectors[way].rank(problem)  # loads the model: not a part of measuring
            begin = time.perf_counter()
            if way == _EVERYTHING:
                trial = measure(problem, table, device, plan=whole_plan)
            else:
                selections[way] = selectors[way].select(problem)
            seconds[way] = time.perf_counter() - begin
        winner, _ = decide(trial.paired_log, trial.error_log)
        chosen = [each.candidate for each in selections.values()]
        compared = list(dict.fromkeys([table[0], table[winner or 0], *chosen]))
        again = measure(problem, compared, device, plan=judge_plan)
        log, error = again.paired_log, again.error_log
        for way, selection in selections.items():
            at = compared.index(selection.candidate)
            found[way].append(
                Found(
                    operation=problem.operation,
                    problem=str(problem),
                    selected=str(selection.candidate),
                    candidates=len(table),
                    measured=selection.measured,
                    regret=1.0 - float(np.exp(log[compared.index(table[winner or 0])] - log[at])),
                    over_default=float(log[at] - log[0]),
                    error=0.0 if at == 0 else float(np.hypot(error[at], error[0])),
                    time_share=seconds[way] / seconds[_EVERYTHING],
                )
            )
    return found


def _turned(names: list[str], by: int) -> list[str]:
    return names[by % len(names) :] + names[: by % len(names)]


def page(found: dict[str, list[Found]], promoted: list[str]) -> dict[str, Any]:
    """The tables of the figures."""
    tables = []
    for way, rows in found.items():
        groups: dict[str, list[Found]] = {}
        for row in rows:
            groups.setdefault(row.operation, []).append(row)
            groups.setdefault("over 30 candidates" if row.candidates > 30 else "30 or fewer", []).append(row)
            groups.setdefault("all", []).append(row)
        tables.append(
            {
                "title": f"{way}: {len(rows)} held-out problems",
                "columns": [
                    "problems", "count", "candidates", "measured", "mean regret", "worst regret", "share of the time",
                    "5% slower than the default", "of these beyond noise", "faster than the default",
                ],
                "rows": [_row(name, groups[name]) for name in sorted(groups, key=_place)],
            }
        )  # fmt: skip
        slower = [row for row in rows if row.over_default > np.log(1.05)]
        if slower:
            tables.append(
                {
                    "title": f"{way}: more than 5% slower than the default",
                    "columns": ["problem", "selected", "slower by", "standard error"],
                    "rows": [
                        [row.problem, row.selected, _percent(np.expm1(row.over_default)), _percent(row.error)]
                        for row in slower
                    ],
                }
            )
    return {
        "title": "Selections that verify, against measuring everything and against the default",
        "tables": tables,
        "found": {way: [vars(row) for row in rows] for way, rows in found.items()},
        "notes": [
            "One thread. Regret and the comparison with the default are of rounds that had no part in any choice: the "
            f"default, the selections and the winner of everything in {JUDGED_ROUNDS} paired rounds. A regret below 0 says "
            "that the winner of everything did not win again.",
            "The time is that of the whole call: inputs, reference, checks and rounds. Measuring everything takes a "
            f"collection's protocol: {WHOLE_ROUNDS} rounds with racing, over all candidates. Which of them measures a problem "
            "first changes from one to the next. Where a problem has three candidates, verifying measures all of them.",
            "Beyond noise: slower than 5% by more than two standard errors.",
            f"Models that passed the gate: {', '.join(promoted) or 'none'}; the roofline ranks the others.",
        ],
    }


def _row(name: str, rows: list[Found]) -> list[Any]:
    regret = [row.regret for row in rows]
    slower = [row for row in rows if row.over_default > np.log(1.05)]
    return [
        name,
        len(rows),
        statistics.mean(row.candidates for row in rows),
        statistics.mean(row.measured for row in rows),
        _percent(statistics.mean(regret)),
        _percent(max(regret)),
        _percent(statistics.mean(row.time_share for row in rows)),
        len(slower),
        sum(row.over_default - 2 * row.error > np.log(1.05) for row in rows),
        f"{statistics.geometric_mean(np.exp(-row.over_default) for row in rows):.3f}",
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _place(name: str) -> tuple[bool, str]:
    return (name not in DRAWS, name)
