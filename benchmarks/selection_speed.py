"""How long a selection takes on the host: features, trees, rules, cold and remembered answers, the drop-in, the import."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench_rounds
import numpy as np
from bench_data import A100_FILE, DEVICE, recorded_store, synthetic_problems

if TYPE_CHECKING:
    from kernelcast.costmodel import ProblemData, RankingModel
    from kernelcast.kernels import CandidateTable, Problem
    from kernelcast.runtime import Selector

ROWS = (32, 512, 2000)
_PROBLEM: dict[str, Any] = {"m": 1024, "n": 4096, "k": 4096, "dtype": "float16", "layout": "nt"}
#: Problems fitted on: the trees' number and depth, which decide the speed, do not depend on it.
_FITTED_PROBLEMS = 300
_VERSION = "0001-00000000"
#: Problems that no call has seen are made beforehand; no benchmark asks for more.
_UNSEEN = 200_000


def main(quick: bool) -> dict[str, Any]:
    """Time everything. Quick: fewer rounds, and a model of fewer trees on made-up data."""
    from kernelcast.costmodel.heads import order_heads

    count = 15 if quick else 60
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, source = _model(folder, quick)
        calls, facts = _calls(model, folder)
        samples = bench_rounds.rounds(calls, count)
        overhead = samples[_DROP_IN] - samples[_TORCH]
        ready = samples[_READY] - samples[_LOOKUP]
        imports = import_times(5 if quick else 20)
        first = first_selection_ms(folder / "models", 5 if quick else 20)
    figures = bench_rounds.summarise(samples)
    forests = [model.forests[name] for name in order_heads(model.estimate)]
    trees, depth = sum(forest.trees for forest in forests), max(forest.depth for forest in forests)
    return {
        "title": "Speed of a selection on the host",
        "figures": figures,
        "drop_in_overhead_us": float(np.median(overhead)),
        "ready_over_lookup_us": float(np.median(ready)),
        "import": imports,
        "first_selection_ms": first,
        "model": {
            "trees": trees,
            "depth": depth,
            "features": len(model.feature_names),
            "fitted_on": source,
        },
        **facts,
        "tables": [
            speed_table(figures),
            {
                "title": "Import, in a new process",
                "columns": ["what", "ms"],
                "rows": [
                    ["python alone", imports["bare_ms"]],
                    ["import kernelcast, on top of it", imports["extra_ms"]],
                    [
                        "from import to the first predicted selection, numpy included",
                        statistics.median(first),
                    ],
                ],
            },
        ],
        "notes": [
            bench_rounds.noise_note(figures, count),
            f"Selecting for {DEVICE}, {facts['problem']} and its like (another m and n each time, so that nothing is remembered of "
            f"the problem): {trees} trees of depth {depth} for the order, and {len(model.feature_names)} "
            f"features, fitted on {source}. The candidates are of the variants that the model knows.",
            "A cold selection goes from a problem to a Selection in mode predict: legal candidates of a space of just these, "
            "features, prediction with its uncertainty, ranking. Nothing is written to disk.",
            "Without the uncertainty: the predicted latencies and the order, as mode verify needs them for a fixed number of "
            "candidates.",
            f"The drop-in adds {np.median(overhead):.2f} us to torch.mm (median over rounds of the difference; quartiles "
            f"{np.percentile(overhead, 25):.2f} and {np.percentile(overhead, 75):.2f}).",
            f"A selection that is ready takes {np.median(ready):.2f} us more than a dictionary lookup by the same problem.",
            f"The whole space has {facts['space']:,} configs, of which {facts['legal']:,} are legal here.",
            f"Import times are medians of {imports['pairs']} pairs of processes, one after the other; quartiles of the "
            f"difference: {imports['quartiles_ms'][0]:.1f} and {imports['quartiles_ms'][1]:.1f} ms. The first selection loads "
            f"the model from disk: medians of {len(first)} processes, the quickest {min(first):.0f} ms.",
        ],
    }


_DROP_IN = "kernelcast.matmul, 64 x 64 x 64, seen before"
_TORCH = "torch.mm, 64 x 64 x 64"
_READY = "Selector.select, ready"
_LOOKUP = "dictionary lookup by a problem"


def speed_table(figures: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The table of what :func:`bench_rounds.summarise` gave."""
    return {
        "title": "Median time of one call",
        "columns": ["what", "us", "in reference loops", "interquartile range"],
        "rows": [
            [name, each["us"], each["loops"], f"{each['spread']:.1%}"] for name, each in figures.items()
        ],
    }


def import_times(pairs: int) -> dict[str, Any]:
    """What ``import kernelcast`` adds to a Python that does nothing else, from processes in turn."""
    bare, full = [], []
    for _ in range(pairs):
        bare.append(_process_ms("pass"))
        full.append(_process_ms("import kernelcast"))
    extra = [one - other for one, other in zip(full, bare, strict=True)]
    return {
        "pairs": pairs,
        "bare_ms": statistics.median(bare),
        "extra_ms": statistics.median(extra),
        "quartiles_ms": [float(each) for each in np.percentile(extra, [25, 75])],
    }


def first_selection_ms(models: Path, processes: int) -> list[float]:
    """Milliseconds from the import to the first selection in mode predict, each in a process of its own."""
    code = f"""
        import time
        began = time.perf_counter()
        from pathlib import Path
        import kernelcast as kc
        from kernelcast.kernels import problem
        from kernelcast.kernels.devices import device
        selector = kc.Selector(device({DEVICE!r}), models=Path({str(models)!r}), cache=False, store=False, mode="predict")
        found = selector.select(problem("gemm", **{_PROBLEM!r}))
        took = time.perf_counter() - began
        assert found.source == "predicted", found
        print(took)
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    return [
        float(subprocess.run(run, check=True, capture_output=True, text=True).stdout) * 1e3
        for _ in range(processes)
    ]


def _process_ms(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - began) * 1e3


def _model(folder: Path, quick: bool) -> tuple[RankingModel, str]:
    """A model as selection uses it: saved, and loaded without the library that fitted it; and what it was fitted on."""
    from kernelcast.costmodel import CostModel, RankingModel
    from kernelcast.costmodel.locate import ALIAS_FILE, DEVICE_FILE
    from kernelcast.kernels.devices import device
    from kernelcast.training.data import load_problems

    data: list[ProblemData]
    if quick or not A100_FILE.is_file():
        count = 20 if quick else _FITTED_PROBLEMS
        data, source = synthetic_problems(count), f"{count} made-up problems"
    else:
        data = load_problems(recorded_store(folder / "store"), "gemm", device=DEVICE)[:_FITTED_PROBLEMS]
        source = f"{len(data)} recorded problems"
    # The default trees; the folds of the error cost time to fit and none to predict.
    estimator = CostModel(n_jobs=1, **({"error_folds": 0} if quick else {}))
    registered = folder / "models" / DEVICE
    artifact = registered / "gemm" / _VERSION
    RankingModel.fit(data, estimator).save(artifact)
    (registered / DEVICE_FILE).write_text(json.dumps(device(DEVICE).to_dict()))
    (artifact.parent / ALIAS_FILE).write_text(json.dumps({"version": _VERSION, "previous": []}))
    return RankingModel.load(artifact), source


def _calls(model: RankingModel, folder: Path) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    import torch

    import kernelcast as kc
    from kernelcast.kernels import candidates, problem, variant, variants
    from kernelcast.kernels.detect import detect
    from kernelcast.kernels.devices import device
    from kernelcast.kernels.registry import space_of
    from kernelcast.runtime import Selector

    torch.set_num_threads(1)
    where = device(DEVICE)
    described = problem("gemm", **_PROBLEM)
    known = {name: space_of(variant("gemm", name), "full") for name in model.spaces()}
    legal = candidates(described, where, spaces=known)
    unseen = unseen_problems()
    calls: dict[str, Callable[[], Any]] = {}
    for rows in ROWS:
        calls |= _calls_of_rows(model, folder / "models", some_rows(legal, rows), described, unseen)

    tiled = variant("gemm", "triton_tiled")
    space = tiled.space()
    some = space.take(np.linspace(0, space.length - 1, 2000).astype(int)).keep()
    calls["rules of triton_tiled, 2,000 configs"] = lambda: some.take(tiled.legal(next(unseen), where, some))
    calls["all legal candidates of the problem"] = lambda: candidates(next(unseen), where)
    calls["quick subset of the problem"] = lambda: candidates(next(unseen), where, subset="default")
    calls["candidates that the model knows"] = lambda: candidates(next(unseen), where, spaces=model.spaces())

    here = Selector(detect("cpu"), cache=folder / "cache", store=False, models=folder / "none", mode="verify")
    small = problem("gemm", m=64, n=64, k=64, threads=1)
    here.select(small)
    here.select(small)
    table = {small: here}
    calls[_READY] = lambda: here.select(small)
    calls[_LOOKUP] = lambda: table[small]

    # Mode off remembers torch's own for the key, so what is left of the difference is the drop-in itself.
    kc.configure(mode="off", cache=False, store=False)
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    kc.matmul(a, b)
    calls["kernelcast.select by keywords, seen before"] = lambda: kc.select("gemm", m=64, n=64, k=64)
    calls[_DROP_IN] = lambda: kc.matmul(a, b)
    calls[_TORCH] = lambda: torch.mm(a, b)
    whole = sum(each.size for each in variants("gemm").values())
    return calls, {"problem": str(described), "space": whole, "legal": len(candidates(described, where))}


def _calls_of_rows(
    model: RankingModel, models: Path, table: CandidateTable, described: Problem, unseen: Iterator[Problem]
) -> dict[str, Callable[[], Any]]:
    """What is done with the candidates of one table."""
    from kernelcast.costmodel.heads import OTHER_HEADS, order_heads
    from kernelcast.costmodel.walk import Walk
    from kernelcast.kernels.devices import device

    where = device(DEVICE)
    features = model.features(described, table, where)
    names = order_heads(model.estimate)
    order = Walk([model.forests[name] for name in names])
    heads = Walk([model.forests[name] for name in (*names, *OTHER_HEADS)])
    selector = _selector(models, table)
    chosen = selector.select(described)
    if chosen.source != "predicted" or chosen.candidates != len(table):
        raise ValueError(f"The selection is not of {len(table)} candidates by the model: {chosen}.")
    calls: dict[str, Callable[[], Any]] = {
        "features": lambda: model._featurizer.borrowed(next(unseen), table, where),
        "trees of the order": lambda: order.predict(features),
        "trees of all heads": lambda: heads.predict(features),
        "features + prediction + ranking": lambda: model.predict(
            next(unseen), table, where, uncertainty=False
        ).order(),
        "the same with the uncertainty": lambda: model.predict(next(unseen), table, where).order(),
        "Selector.select, cold, predict": lambda: selector.select(next(unseen)),
    }
    return {f"{name}, {len(table):,} candidates": call for name, call in calls.items()}


def unseen_problems() -> Iterator[Problem]:
    """Problems like the one that is timed, each another: nothing is remembered of any.

    Raises:
        StopIteration: more than :data:`_UNSEEN` were asked for.
    """
    from kernelcast.kernels import problem

    def made() -> Iterator[Problem]:
        for number in range(_UNSEEN):
            longer, wider = 16 * (number % 1024 + 1), 16 * (number // 1024)
            yield problem("gemm", **{**_PROBLEM, "m": _PROBLEM["m"] + longer, "n": _PROBLEM["n"] + wider})

    # Made some thousands at a time, so that what is timed is not how they are made.
    source = made()
    while batch := list(itertools.islice(source, 4096)):
        yield from batch


def _selector(models: Path, table: CandidateTable) -> Selector:
    """A selector in mode predict whose model knows the candidates of one table alone."""
    from kernelcast.kernels import variants
    from kernelcast.kernels.devices import device
    from kernelcast.runtime import Selector

    selector = Selector(device(DEVICE), models=models, cache=False, store=False, mode="predict")
    found, _ = selector.rankers.model("gemm")
    assert found is not None
    found._spaces = list(variants("gemm")), {block.variant: block.keep() for block in table.blocks}
    return selector


def some_rows(table: CandidateTable, count: int) -> CandidateTable:
    """``count`` candidates of a table at even distances.

    Raises:
        ValueError: the table has fewer.
    """
    from kernelcast.kernels import CandidateTable

    if len(table) < count:
        raise ValueError(f"There are {len(table)} legal candidates; {count} were asked for.")
    chosen = np.linspace(0, len(table) - 1, count).astype(int)
    blocks, start = [], 0
    for block in table.blocks:
        inside = chosen[(chosen >= start) & (chosen < start + block.length)] - start
        blocks.append(block.take(inside))
        start += block.length
    return CandidateTable(blocks)
