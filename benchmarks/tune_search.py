"""How near a search comes to the best of a whole recorded space, by measurements, with and without another device's records."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kernelcast.costmodel.search import PriorRecords
    from kernelcast.kernels import Candidate, CandidateTable

#: Beside the repository, as the records are not part of it.
FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "kernel_tuner"
ABSENT = (
    "the recorded spaces are absent: files of the FAIR benchmark hub for auto-tuning, such as "
    "convolution_milo_A100.json.gz, are looked for in ../shared/data/kernel_tuner, beside the repository"
)
SEEDS = 20
#: The first seed: the search was made with others.
FIRST_SEED = 1000
COUNTS = (40, 100, 200)
#: With another device's records a search ends earlier.
COUNTS_WITH_PRIOR = (40, 100)
#: Measured between two fits.
BATCH = 2


@dataclass(frozen=True)
class Recorded:
    """A file of one kernel on one device."""

    label: str
    file: str
    importer: str
    device: str


A100 = Recorded("convolution A100", "convolution_milo_A100.json.gz", "kernel-tuner", "a100-40gb")
A4000 = Recorded("convolution A4000", "convolution_milo_A4000_T4.json.gz", "t4", "a4000")
MI250X = Recorded("convolution MI250X", "convolution_milo_MI250X.json.gz", "kernel-tuner", "mi250x")
GEMM = Recorded("GEMM RTX 3090", "gemm_RTX_3090.json.gz", "kernel-tuner", "rtx-3090")
#: What is searched, and by which other devices' records.
SEARCHES: tuple[tuple[Recorded, tuple[Recorded, ...]], ...] = (
    (A100, ()), (MI250X, ()), (GEMM, ()), (A4000, ()),
    (A100, (A4000,)), (A100, (MI250X,)), (A100, (A4000, MI250X)), (MI250X, (A100,)), (MI250X, (A4000,)), (A4000, (A100,)),
)  # fmt: skip
#: The least mean share by measurements, of the spaces that it is promised of.
GOALS = {100: 0.95, 200: 0.99}
GOAL_WITH_PRIOR = {40: 0.97}
PROMISED = (A100, MI250X, GEMM)


def main(quick: bool) -> dict[str, Any]:
    """Search each space with each seed. Quick: two seeds, 40 measurements, the A100 alone."""
    title = "Search in whole recorded spaces"
    searches = [(target, prior) for target, prior in SEARCHES if not quick or target == A100]
    files = {each.file for target, prior in searches for each in (target, *prior)}
    if not all((FOLDER / file).is_file() for file in files):
        return {"title": title, "skipped": ABSENT}
    counts, seeds = (COUNTS[:1], 2) if quick else (COUNTS, SEEDS)
    with_prior = [n for n in COUNTS_WITH_PRIOR if n in counts]
    with tempfile.TemporaryDirectory() as folder:
        read = {
            each: latencies(each, Path(folder))
            for each in dict.fromkeys(e for t, p in searches for e in (t, *p))
        }
    runs = [
        run(target, prior, read, seed, with_prior if prior else counts)
        for target, prior in searches
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
    ]
    return {"title": title, **page(runs, counts)}


def latencies(recorded: Recorded, folder: Path) -> dict[Candidate, float]:
    """Candidate -> log latency of a file, NaN for a failure, in the order of their keys."""
    from kernelcast.datasets import Store, import_files
    from kernelcast.kernels import Candidate
    from kernelcast.kernels.devices import device

    store = folder / recorded.file
    import_files(
        recorded.importer,
        [str(FOLDER / recorded.file)],
        device=device(recorded.device),
        workload="hub",
        store=store,
    )
    # Under one name, whichever format a file has: the configs of one kernel are matched over devices.
    found = {
        Candidate("kernel", each.candidate.config): float(np.log(each.latency_us))
        if each.outcome == "ok"
        else float("nan")
        for each in Store(store).measurements()
    }
    return dict(sorted(found.items(), key=lambda item: item[0].key))


def run(
    target: Recorded,
    prior: Sequence[Recorded],
    read: Mapping[Recorded, Mapping[Candidate, float]],
    seed: int,
    counts: Sequence[int],
) -> dict[str, Any]:
    """One search with one seed, and as many candidates at random."""
    from kernelcast.kernels import CandidateTable

    table = CandidateTable.of(read[target])
    latency = np.array(list(read[target].values()))
    total = max(counts)
    rows, seconds = searched(table, latency, known(prior, read, list(read[target])), seed, total)
    random = np.random.default_rng([seed, 1]).permutation(len(latency))[:total]
    return {
        "space": target.label,
        "prior": [each.label for each in prior],
        "candidates": len(latency),
        "seed": seed,
        "share": shares(latency, rows, counts),
        "random": shares(latency, random, counts),
        "failures": int(np.isnan(latency[rows]).sum()),
        "random_failures": int(np.isnan(latency[random]).sum()),
        "mean_s": mean(seconds),
        "most_s": max(seconds),
    }


def searched(
    table: CandidateTable, latency: np.ndarray, prior: PriorRecords | None, seed: int, total: int
) -> tuple[list[int], list[float]]:
    """(the rows that a search measures, in order; CPU seconds of each proposal)."""
    from kernelcast.costmodel.search import Search

    search = Search(table, prior=prior, seed=seed, batch=BATCH)
    rows: list[int] = []
    seconds: list[float] = []
    while len(rows) < total:
        began = time.process_time()
        chosen = search.propose(min(BATCH, total - len(rows)))
        seconds.append(time.process_time() - began)
        search.tell(chosen, latency[chosen])
        rows += chosen
    return rows, seconds


def known(
    prior: Sequence[Recorded],
    read: Mapping[Recorded, Mapping[Candidate, float]],
    candidates: Sequence[Candidate],
) -> PriorRecords | None:
    """What other devices took for some candidates."""
    from kernelcast.costmodel.search import PriorRecords

    if not prior:
        return None
    values = np.array([[read[each].get(one, np.nan) for one in candidates] for each in prior])
    failed = np.array(
        [[one in read[each] and np.isnan(read[each][one]) for one in candidates] for each in prior]
    )
    return PriorRecords(values, failed)


def shares(latency: np.ndarray, rows: Sequence[int] | np.ndarray, counts: Sequence[int]) -> dict[str, float]:
    """Share of the optimum after so many measurements: the space's best latency over the best of the rows."""
    found = np.where(np.isnan(latency[rows]), np.inf, latency[rows])
    return {str(n): float(np.exp(np.nanmin(latency) - found[:n].min())) for n in counts}


def page(runs: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> dict[str, Any]:
    """Everything but the title."""
    groups: dict[tuple[str, tuple[str, ...]], list[Mapping[str, Any]]] = {}
    for each in runs:
        groups.setdefault((each["space"], tuple(each["prior"])), []).append(each)
    rows, goals = [], []
    for (space, prior), of_one in groups.items():
        label = f"{space}, from {' and '.join(prior)}" if prior else space
        means = {
            n: mean(each["share"][str(n)] for each in of_one) for n in counts if str(n) in of_one[0]["share"]
        }
        last = str(max(means))
        wanted = GOAL_WITH_PRIOR if prior else GOALS
        if space in {each.label for each in PROMISED}:
            goals += [
                {
                    "search": label,
                    "measurements": n,
                    "found": means[n],
                    "wanted": least,
                    "met": means[n] >= least,
                }
                for n, least in wanted.items()
                if n in means
            ]
        rows.append(
            [
                label,
                of_one[0]["candidates"],
                *(
                    f"{means[n]:.3f} ({sum(e['share'][str(n)] > 0.99 for e in of_one)})"
                    if n in means
                    else None
                    for n in counts
                ),
                *(
                    f"{mean(each['random'][str(n)] for each in of_one):.3f}" if n in means else None
                    for n in counts
                ),
                f"{min(each['share'][last] for each in of_one):.3f}",
                mean(each["failures"] for each in of_one),
                mean(each["random_failures"] for each in of_one),
                1e3 * mean(each["mean_s"] for each in of_one),
                1e3 * max(each["most_s"] for each in of_one),
            ]
        )
    seeds = len({each["seed"] for each in runs})
    return {
        "tables": [
            {
                "title": "Mean share of the optimum",
                "columns": [
                    "space", "candidates", *(f"@{n}" for n in counts), *(f"random @{n}" for n in counts),
                    "worst seed at the end", "failures", "of random", "ms a proposal", "at most",
                ],
                "rows": rows,
            },
            {
                "title": "Wanted",
                "columns": ["search", "measurements", "found", "wanted", "met"],
                "rows": [[g["search"], g["measurements"], f"{g['found']:.3f}", g["wanted"], g["met"]] for g in goals],
            },
        ],
        "goals": goals,
        "runs": list(runs),
        "notes": [
            "Share of the optimum: the best latency of the whole space over the best found after so many measurements; "
            f"mean over {seeds} seeds, in brackets how many of them came within 1% of the optimum. A failed candidate is a "
            "measurement.",
            f"The search knows the values of the parameters alone, and is told {BATCH} measurement at a time. No default is "
            "given, as the files name none.",
            "`from`: the records of the whole space on other devices are known before; the first candidates are their best.",
            "ms a proposal: CPU time of one fit and choice, on one thread.",
            "The spaces: FAIR benchmark hub for auto-tuning; the convolution on an image of 4096 x 4096 with a filter of "
            "15 x 15, and CLBlast's GEMM of 4096 x 4096 x 4096.",
        ],
    }  # fmt: skip


def mean(values: Any) -> float:
    """The arithmetic mean of some numbers."""
    found = list(values)
    return float(np.mean(found)) if found else float("nan")
