"""Steps of the GPU check: timing the quick subset of the space, and fitting a model on what was timed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_problems import Timing, timing_problems
from gpu_steps import DETAIL_CHARACTERS, Broken, device_of, require_sound
from gpu_tasks import Reporter

if TYPE_CHECKING:
    import numpy as np

    from kernelcast.kernels import Candidate, Device, Problem


def timing(spec: Mapping[str, Any], report: Reporter) -> None:
    """Time the quick subset against the default: lines ``measurement`` and then ``problem`` for each problem."""
    from kernelcast.datasets.timing import TimingPlan

    device = device_of(spec)
    plan = TimingPlan(
        rounds=12, least_rounds=4, seconds=2.0, candidate_seconds=1.0, sample_us=1000, repeats=10
    )
    done = {line["problem"] for line in report.earlier if line["kind"] in ("problem", "skipped")}
    finished = report.finished()
    longest_s = 2.0
    for each in timing_problems(device, quick=spec["quick"], operations=spec["operations"]):
        key = each.problem.key
        if key in done or (key, "race") in finished:
            continue
        # One that cannot be finished would cost its time and leave nothing.
        if time.time() + longest_s > spec["end_at"]:
            report("late", problem=key)
            continue
        began = time.time()
        failed = {
            item[1]: (line["outcome"], line["detail"]) for item, line in finished.items() if item[0] == key
        }
        _time_problem(each, device, plan, failed, report)
        longest_s = max(longest_s, time.time() - began)


def _time_problem(
    each: Timing, device: Device, plan: Any, failed: Mapping[str, tuple[str, str]], report: Reporter
) -> None:
    """Time one problem's candidates but those that broke an earlier life of this process."""
    from kernelcast.datasets.timing import measure
    from kernelcast.errors import KernelcastError
    from kernelcast.kernels import candidates

    problem = each.problem
    table = list(candidates(problem, device, subset="default"))
    left = [candidate for candidate in table if candidate.key not in failed]

    def begin(number: int) -> None:
        report("start", item=[problem.key, left[number].key if number < len(left) else "race"])

    def checked(count: int) -> None:
        try:
            require_sound(device)
        except Broken:
            report(
                "result",
                item=[problem.key, left[count - 1].key],
                outcome="crash",
                detail="the device's context broke: an illegal access",
            )
            raise
        begin(count)

    begin(0)
    try:
        trial = measure(problem, left, device, plan=plan, workload="gpu-check", on_candidate=checked)
    except KernelcastError as error:
        report("skipped", problem=problem.key, label=each.label, detail=str(error)[:DETAIL_CHARACTERS])
        return
    try:
        require_sound(device)
    except Broken:
        report(
            "result",
            item=[problem.key, "race"],
            outcome="crash",
            detail="the device's context broke in the rounds",
        )
        raise
    measured = [measurement.to_dict() for measurement in trial.measurements]
    measured += [
        _failure(problem, candidate, device, *failed[candidate.key])
        for candidate in table
        if candidate.key in failed
    ]
    for record in measured:
        report("measurement", record=record)
    report(
        "problem",
        item=[problem.key, "race"],
        problem=problem.key,
        label=each.label,
        **compare(problem, measured),
    )


def compare(problem: Problem, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The best of ours beside the default, from the records of one problem.

    Of many candidates the one that looks fastest was also lucky. So even rounds choose it, and odd ones say how fast it
    is: the median over rounds of the ratio of two samples of one round. Samples are in the order of the rounds, and who
    leaves a race does not come back, so samples of one place belong together.

    Returns:
        ``best`` (None if nothing of ours worked), ``speedup`` (default / best, above 1 ours is faster), ``default_us``
        and ``best_us`` (medians), ``candidates``, ``failures`` (outcome -> count) and ``failed`` (texts).
    """
    import numpy as np

    from kernelcast.kernels import Candidate, operation

    default = operation(problem.operation).default.key
    samples: dict[str, np.ndarray] = {}
    outcomes: dict[str, int] = {}
    failed = []
    for record in records:
        candidate = Candidate.of(record["candidate"]["variant"], record["candidate"]["config"])
        if record["outcome"] == "ok":
            samples[candidate.key] = np.array(record["samples_us"])
        else:
            outcomes[record["outcome"]] = outcomes.get(record["outcome"], 0) + 1
            failed.append(
                {"candidate": candidate.key, "outcome": record["outcome"], "detail": record["detail"]}
            )
    found: dict[str, Any] = {
        "best": None,
        "speedup": None,
        "default_us": float(np.median(samples[default])) if default in samples else None,
        "best_us": None,
        "candidates": len(records),
        "failures": outcomes,
        "failed": failed,
    }
    ratios = {}
    for key, values in samples.items():
        if key != default and default in samples:
            both = min(len(values), len(samples[default]))
            ratios[key] = samples[default][:both] / values[:both]
    if ratios:
        best = max(ratios, key=lambda key: float(np.median(ratios[key][::2])))
        judged = ratios[best][1::2] if len(ratios[best]) > 1 else ratios[best]
        found |= {
            "best": str(Candidate.from_key(best)),
            "speedup": float(np.median(judged)),
            "best_us": float(np.median(samples[best])),
        }
    return found


def fit(spec: Mapping[str, Any], report: Reporter) -> None:
    """Fit a model on what was just measured, and judge it on shapes that it did not see: a line ``fit``."""
    from kernelcast.datasets import Store
    from kernelcast.errors import KernelcastError
    from kernelcast.training.data import load_problems
    from kernelcast.training.evaluate import evaluate_folds

    device = device_of(spec)
    for name in spec["operations"]:
        report("start", item=[name])
        try:
            data = load_problems(Store(Path(spec["store"])), name, device=device)
            result = evaluate_folds(data, 3, seeds=1)
        except KernelcastError as error:
            report("fit", item=[name], operation=name, detail=str(error))
            continue
        default = result.baselines["default"]
        report(
            "fit",
            item=[name],
            operation=name,
            problems=result.test_problems,
            candidates=result.candidates_per_problem,
            model={k: result.efficiency_with_default[k]["geomean"] for k in ("1", "3", "5")},
            default=None if default is None else default["1"]["geomean"],
        )


def _failure(
    problem: Problem, candidate: Candidate, device: Device, outcome: str, detail: str
) -> dict[str, Any]:
    """The record of a candidate that took a process with it."""
    from kernelcast.datasets.record import Environment, Measurement, Protocol
    from kernelcast.datasets.timing import PROTOCOL
    from kernelcast.kernels import variant

    source_hash = variant(problem.operation, candidate.variant).source_hash()
    return Measurement(
        problem=problem,
        candidate=candidate,
        device=device.name,
        device_fingerprint=device.fingerprint,
        environment=Environment.current(source_hash, device_kind=device.kind),
        protocol=Protocol(PROTOCOL),
        outcome=outcome,
        detail=detail[:DETAIL_CHARACTERS],
        workload="gpu-check",
        created_at=time.time(),
    ).to_dict()
