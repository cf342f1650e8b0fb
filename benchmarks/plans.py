"""Plans on this CPU: how many intervals, how much is measured over 1,000 random lengths, and what is lost to them.

Each case is planned twice on one thread: with no model (the roofline proposes), and with a model fitted on a few sizes whose
candidates were all measured. Then at sizes drawn at random, on which no plan was measured and no model fitted, every candidate
is raced; the fastest, the plans' choices and the default are timed once more, in rounds of their own, and the regret is of
these: what was fastest by luck in the first race has none of it in the second.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kernelcast.kernels import Candidate, Device, Problem
    from kernelcast.runtime import Selector
    from kernelcast.runtime.plan import Plan

#: One dynamic dimension each, at sizes where a call takes at most some tens of milliseconds.
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attention", {"q_len": range(1, 513), "kv_len": "q_len", "batch": 1, "heads": 8, "head_dim": 64}),
    ("attention", {"kv_len": range(16, 4097), "q_len": 1, "batch": 1, "heads": 8, "head_dim": 64}),
    ("softmax", {"columns": range(16, 16385), "rows": 64}),
    ("gemm", {"m": range(1, 513), "n": 512, "k": 2048}),
    ("conv2d", {"r": range(1, 32), "s": "r", "n": 1, "c": 4, "k": 4, "h": 64, "w": 64}),
)
LENGTHS = 1000
HELD_OUT, QUICK_HELD_OUT = 6, 2
#: Sizes of each case that the model is fitted on.
FITTED, QUICK_FITTED = 6, 4


def main(quick: bool) -> dict[str, Any]:
    """Run every case. Quick: one case, few sizes."""
    import torch

    torch.set_num_threads(1)
    cases = CASES[:1] if quick else CASES
    figures = []
    for number, (name, values) in enumerate(cases):
        with tempfile.TemporaryDirectory() as folder:
            figures.append(case(name, values, Path(folder), quick=quick, seed=number))
    return page(figures)


def case(name: str, values: dict[str, Any], folder: Path, *, quick: bool, seed: int) -> dict[str, Any]:
    """One operation over one range of sizes: the two plans' figures and their regrets."""
    from kernelcast.kernels.detect import detect
    from kernelcast.runtime import Selector
    from kernelcast.runtime.plan import plan

    device = detect("cpu")
    values = {**values, "threads": 1}
    dynamic, sizes = next((each, span) for each, span in values.items() if isinstance(span, range))
    roofline = Selector(device, models=folder / "none", cache=False, store=False, mode="verify")
    began = time.perf_counter()
    plans: dict[str, Plan] = {"roofline": plan(name, selector=roofline, **values)}
    seconds = {"roofline": time.perf_counter() - began}

    fitted_at = spread(sizes, QUICK_FITTED if quick else FITTED)
    began = time.perf_counter()
    modelled = fitted(
        name, [plans["roofline"].problem(**{dynamic: size}) for size in fitted_at], device, folder
    )
    fitting_s = time.perf_counter() - began
    began = time.perf_counter()
    plans["model"] = plan(name, selector=modelled, **values)
    seconds["model"] = time.perf_counter() - began

    held_out = drawn(sizes, QUICK_HELD_OUT if quick else HELD_OUT, seed, without=fitted_at)
    problems = [plans["roofline"].problem(**{dynamic: size}) for size in held_out]
    regrets = [regret(each, plans, device) for each in problems]
    lengths = random.Random(seed).choices(sizes, k=LENGTHS)
    return {
        "case": plans["roofline"].title,
        "held_out": held_out,
        "fitting_s": fitting_s,
        "different_lengths": len(set(lengths)),
        "default": regret_row([each["default"] for each in regrets]),
        "plans": {
            kind: {
                "intervals": len(each.intervals),
                "proposed": each.proposed,
                "verifications": each.verifications,
                "probes": each.probes,
                "later_verifications": verifications_over(each, dynamic, lengths, folder / kind),
                "seconds": seconds[kind],
                "lookup_us": lookup_us(each, dynamic, lengths),
                "table": str(each),
                **regret_row([found[kind] for found in regrets]),
            }
            for kind, each in plans.items()
        },
    }


def spread(sizes: range, count: int) -> list[int]:
    """Sizes even in their logarithm, both ends among them."""
    ratio = sizes[-1] / sizes[0]
    return sorted({round(sizes[0] * ratio ** (place / (count - 1))) for place in range(count)})


def drawn(sizes: range, count: int, seed: int, *, without: Sequence[int]) -> list[int]:
    """Random sizes, the nearest that are left to one drawn in each of as many equal shares of the range, in logarithms."""
    source = random.Random(seed)
    left = [size for size in sizes if size not in without]
    ratio = sizes[-1] / sizes[0]
    found: list[int] = []
    for place in range(min(count, len(left))):
        wanted = sizes[0] * ratio ** ((place + source.random()) / count)
        size = min(left, key=lambda each: abs(math.log(each / wanted)))
        left.remove(size)
        found.append(size)
    return found


def fitted(name: str, problems: Sequence[Problem], device: Device, folder: Path) -> Selector:
    """A selector whose model was fitted on every candidate of some problems."""
    from kernelcast.costmodel import CostModel, ProblemData, RankingModel
    from kernelcast.datasets.timing import TimingPlan, measure
    from kernelcast.kernels import CandidateTable, candidates
    from kernelcast.runtime import Ranking, Selector

    data = []
    for each in problems:
        table = list(candidates(each, device))
        trial = measure(each, table, device, plan=TimingPlan(rounds=10, seconds=2.0))
        worked = [m for m in trial.measurements if m.outcome == "ok"]
        data.append(
            ProblemData(
                problem=each,
                device=device,
                table=CandidateTable.of([m.candidate for m in worked]),
                log_latency=np.log([m.latency_us for m in worked]),
                error_log=np.full(len(worked), np.nan),
            )
        )
    model = RankingModel.fit(data, CostModel(n_estimators=200, max_depth=4, min_child_weight=1, n_jobs=1))

    class Modelled(Selector):
        def rank(self, problem: Problem, *, whole: bool = False) -> Ranking:
            table = candidates(problem, device)
            prediction = model.predict(problem, table, device)
            return Ranking(
                table, prediction, "predicted", "0001-00000000", "ranked by the model of this benchmark"
            )

    return Modelled(device, models=folder / "none", cache=False, store=False, mode="verify")


def regret(problem: Problem, plans: dict[str, Plan], device: Device) -> dict[str, float]:
    """How much slower than the fastest, as a log ratio, the default and each plan's choice are at one problem."""
    from kernelcast.datasets.timing import TimingPlan, measure
    from kernelcast.kernels import candidates, operation

    default = operation(problem.operation).default
    first = measure(problem, candidates(problem, device), device, plan=TimingPlan(rounds=20, seconds=3.0))
    fastest = first.measurements[int(np.nanargmin(first.paired_log))].candidate
    picks: dict[str, Candidate] = {kind: each.select(problem).candidate for kind, each in plans.items()}
    wanted = list(dict.fromkeys([default, fastest, *picks.values()]))
    again = measure(
        problem,
        wanted,
        device,
        plan=TimingPlan(rounds=30, least_rounds=30, race_margin=1e9, hopeless=1e9, seconds=3.0, seed=1),
    )
    logs = dict(zip(wanted, again.paired_log, strict=True))
    best = min(value for value in logs.values() if math.isfinite(value))
    return {"default": logs[default] - best, **{kind: logs[pick] - best for kind, pick in picks.items()}}


def regret_row(logs: Sequence[float]) -> dict[str, float]:
    """Geometric mean and worst regret as shares of the fastest's time."""
    return {
        "mean_regret": math.expm1(float(np.mean(logs))),
        "worst_regret": math.expm1(float(np.max(logs))),
        "problems": len(logs),
    }


def verifications_over(table: Plan, dynamic: str, lengths: Sequence[int], store: Path) -> int:
    """Problems that a verifying selector measures for some lengths, when the plan is its own."""
    from kernelcast.datasets.store import Store
    from kernelcast.runtime import Selector

    selector = Selector(table.device, cache=False, store=store, mode="verify", plans=[table])
    for length in lengths:
        selector.select(table.problem(**{dynamic: length}))
    return len({record.problem for record in Store(store).measurements()}) if store.exists() else 0


def lookup_us(table: Plan, dynamic: str, lengths: Sequence[int]) -> float:
    """Time of one ``Plan.candidate``, the least of several passes."""
    questions = [{dynamic: length} for length in lengths]
    passes = []
    for _ in range(7):
        began = time.perf_counter()
        for question in questions:
            table.candidate(**question)
        passes.append((time.perf_counter() - began) / len(questions) * 1e6)
    return min(passes)


def page(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The page of some cases' figures."""
    rows = []
    for each in figures:
        rows.append(
            [
                each["case"],
                "default alone",
                *[""] * 5,
                each["default"]["mean_regret"],
                each["default"]["worst_regret"],
            ]
        )
        for kind, found in each["plans"].items():
            rows.append(
                [
                    each["case"], f"plan, {kind}", found["intervals"],
                    f"{found['verifications']} of {found['proposed']}", found["probes"], found["later_verifications"],
                    found["lookup_us"], found["mean_regret"], found["worst_regret"],
                ]
            )  # fmt: skip
    for row in rows:
        row[-2:] = [f"{share:.1%}" for share in row[-2:]]
    lines = [
        f"{each['case']}: {each['different_lengths']} of {LENGTHS} random lengths differ, and would each be verified without a "
        f"plan; held-out sizes {', '.join(map(str, each['held_out']))}; the plans took "
        + " and ".join(f"{found['seconds']:.1f} s ({kind})" for kind, found in each["plans"].items())
        + f", the model's measurements and fit {each['fitting_s']:.1f} s."
        for each in figures
    ]
    return {
        "title": "Plans of one dynamic dimension on this CPU",
        "figures": list(figures),
        "tables": [
            {
                "title": "Intervals, measurements, and regret at held-out sizes",
                "columns": [
                    "case", "choice", "intervals", "verified of proposed", "of these probes",
                    f"verified later, over {LENGTHS} lengths", "look-up us", "mean regret", "worst",
                ],
                "rows": rows,
            }
        ],
        "notes": [
            *lines,
            "Probes: measurements beyond one an interval, in wide intervals or of such as became one with a neighbour by them.",
            "Regret is against the fastest of all candidates at the size, geometric mean over the held-out sizes. One thread.",
        ],
    }  # fmt: skip
