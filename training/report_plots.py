"""Plots of a training's held-out record, as SVG that stands inside an HTML page and follows its colours."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.errors import MissingExtraError
from kernelcast.training.metrics import geometric_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

#: Colour, marker and line of each ranker: told apart in light and dark, and without colours.
_STYLES = {
    "model": ("#2f7de1", "o", "-"),
    "default": ("#d9822b", "s", "--"),
    "best_fixed": ("#0d9f6e", "^", "-."),
    "analytic": ("#a463f2", "D", ":"),
    "random": ("#e0475b", "x", "--"),
}
#: Stands for the page's own text colour, which it is replaced by.
_INK = "#010203"
#: In inches: small enough that a narrow screen need not shrink the text.
_SIZE = (4.7, 3.2)
_FEATURES = 12
#: Colour and marker of the most frequent winners of a map.
_MAP_STYLES = (
    ("#2f7de1", "o"), ("#d9822b", "s"), ("#0d9f6e", "^"), ("#a463f2", "D"), ("#e0475b", "x"), ("#12a5b8", "v"), ("#b58900", "P"),
)  # fmt: skip
_LEGEND_LETTERS = 62
#: In log2: a dimension that spreads less across the other makes no map.
_LEAST_SPREAD = 0.1

_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kernelcast",
    "font.family": "sans-serif",
    "font.size": 9,
    # Names from recorded data may hold a dollar sign.
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": "#8888884d",
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def plots_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Name -> SVG of every plot that a record (:func:`kernelcast.training.held_out.read_record`) has data for.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    drawn: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {}
    if record["points"]["measured_us"]:
        drawn["predicted_against_measured"] = _predicted_against_measured
    if record["curves_with_default"].get("model"):
        drawn["efficiency_over_k"] = _efficiency_over_k
        drawn["regret_by_size"] = _regret_by_size
        if map_dimensions(record["problems"]) is not None:
            drawn["winner_map"] = _winner_map
    if any(share for share in record["importance"].values()):
        drawn["feature_importance"] = _feature_importance
    return {name: _draw(draw, record, rows=2 if name == "winner_map" else 1) for name, draw in drawn.items()}


def map_dimensions(problems: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """The two dimensions that spread the problems of a record most, one across the other; None where fewer than two vary.

    The first has the largest standard deviation of log2; the second the largest of what is left when the share that goes
    along with the first is taken out.
    """
    sizes: list[Mapping[str, int]] = [item.get("sizes") or {} for item in problems]
    if not sizes or any(set(each) != set(sizes[0]) for each in sizes):
        return None  # a record of an older version says no sizes
    columns = {name: np.log2(np.maximum([each[name] for each in sizes], 1)) for name in sizes[0]}
    spread = {name: float(column.std()) for name, column in columns.items() if column.std() > 0}
    if len(spread) < 2:
        return None
    first = max(spread, key=lambda name: spread[name])

    def across(name: str) -> float:
        along = float(np.corrcoef(columns[first], columns[name])[0, 1])
        return spread[name] * math.sqrt(max(1.0 - along**2, 0.0))

    second = max((name for name in spread if name != first), key=across)
    return (first, second) if across(second) > _LEAST_SPREAD else None


def inline(svg: str, prefix: str) -> str:
    """An SVG to stand inside a page: its ids made unique by a prefix, its ink the page's text colour.

    Declarations that only a file of its own needs are left out, addresses of name spaces among them.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style type=\"text/css\">.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    svg = svg.replace("url(#", f"url(#{prefix}-")
    return svg.replace(_INK, "currentColor")


def _draw(draw: Callable[[Any, Mapping[str, Any]], None], record: Mapping[str, Any], *, rows: int) -> str:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "train", "Drawing plots") from error
    with mpl.rc_context(_SETTINGS):
        # What has several rows has room for a legend below them.
        height = _SIZE[1] if rows == 1 else (0.8 * rows + 0.5) * _SIZE[1]
        figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.subplots(rows, 1, sharex=True, sharey=True)
        for each in np.atleast_1d(axes):
            each.patch.set_visible(False)
        draw(axes, record)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _predicted_against_measured(axes: Axes, record: Mapping[str, Any]) -> None:
    measured = np.array(record["points"]["measured_us"])
    predicted = np.array(record["points"]["predicted_us"])
    low, high = min(measured.min(), predicted.min()), max(measured.max(), predicted.max())
    axes.plot([low, high], [low, high], color=_INK, linewidth=0.8, linestyle="--", zorder=1)
    axes.plot(measured, predicted, "o", color=_STYLES["model"][0], markersize=2, alpha=0.5, markeredgewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="measured latency (us)", ylabel="predicted latency (us)")
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)


def _efficiency_over_k(axes: Axes, record: Mapping[str, Any]) -> None:
    for name, curves in record["curves_with_default"].items():
        colour, marker, line = _STYLES.get(name, (_INK, ".", "-"))
        values = [geometric_mean(column) for column in np.array(curves).T]
        axes.plot(
            record["ks"],
            values,
            color=colour,
            marker=marker,
            linestyle=line,
            markersize=4,
            label=name.replace("_", " "),
        )
    axes.set(xscale="log", xlabel="k: candidates measured, the default among them", ylabel="efficiency@k")
    axes.set_xticks(record["ks"], [str(k) for k in record["ks"]])
    axes.minorticks_off()
    axes.legend()


def _regret_by_size(axes: Axes, record: Mapping[str, Any]) -> None:
    flops = [item["flops"] for item in record["problems"]]
    known = all(value for value in flops)
    sizes = np.array(flops if known else [item["best_us"] for item in record["problems"]], dtype=np.float64)
    curves = np.array(record["curves_with_default"]["model"])
    for k, name, colour, marker in ((1, "first alone", "#e0475b", "x"), (3, "3 measured", "#2f7de1", "o")):
        regret = 100 * (1 - curves[:, record["ks"].index(k)])
        axes.plot(sizes, regret, marker, color=colour, markersize=3, alpha=0.7, label=name)
    axes.set(
        xscale="log",
        xlabel="size of the problem (FLOP)" if known else "best latency of the problem (us)",
        ylabel="regret (%)",
    )
    _plain_ticks(axes.xaxis)
    axes.set_ylim(bottom=-0.5)
    axes.legend()


def _winner_map(both: Sequence[Axes], record: Mapping[str, Any]) -> None:
    """Each held-out problem at two of its sizes, by the candidate that was fastest, and by the one that was ranked first."""
    names = map_dimensions(record["problems"])
    assert names is not None
    across, up = (
        np.array([max(item["sizes"][name], 1) for item in record["problems"]], dtype=np.float64)
        for name in names
    )
    winners = [[str(item[kind]) for item in record["problems"]] for kind in ("best", "first")]
    counts = Counter(winners[0]) + Counter(winners[1])
    shown = sorted(counts, key=lambda name: (-counts[name], name))[: len(_MAP_STYLES)]
    for axes, chosen, title in zip(
        both, winners, ("fastest as measured", "first of the ranking"), strict=True
    ):
        others = np.array([name not in shown for name in chosen])
        if others.any():
            axes.plot(
                across[others],
                up[others],
                ".",
                color="#8888887f",
                markersize=4,
                label=f"{len(counts) - len(shown)} others",
            )
        for name, (colour, marker) in zip(shown, _MAP_STYLES, strict=False):
            rows = np.array([each == name for each in chosen])
            axes.plot(
                across[rows],
                up[rows],
                marker,
                color=colour,
                markersize=4,
                alpha=0.8,
                linestyle="",
                label=_shorter(name),
            )
        axes.set(xscale="log", yscale="log", ylabel=names[1])
        axes.set_title(title, fontsize=9, loc="left")
        _plain_ticks(axes.xaxis)
        _plain_ticks(axes.yaxis)
    both[-1].set_xlabel(names[0])
    entries: dict[str, Any] = {}
    for axes in both:
        entries |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    both[-1].figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower left",
        fontsize=7,
        handletextpad=0.2,
        borderaxespad=0.2,
    )


def _shorter(candidate: str) -> str:
    """A candidate's text as far as a legend has room."""
    text = candidate.replace("block_", "").replace("num_", "")
    return text if len(text) <= _LEGEND_LETTERS else f"{text[: _LEGEND_LETTERS - 1]}…"


def _plain_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis as 10, 1 k, 1 M: the usual powers of ten are mathematical text."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(numticks=6))
    axis.set_major_formatter(EngFormatter())
    axis.set_minor_formatter(NullFormatter())


def _feature_importance(axes: Axes, record: Mapping[str, Any]) -> None:
    top = [(name, share) for name, share in record["importance"].items() if share][:_FEATURES]
    names, shares = [name for name, _ in reversed(top)], [100 * share for _, share in reversed(top)]
    axes.barh(range(len(top)), shares, color=_STYLES["model"][0], height=0.7)
    axes.set_yticks(range(len(top)), [name if len(name) <= 34 else f"{name[:33]}…" for name in names])
    axes.set_xlabel("share of the gain of all splits (%)")
    axes.grid(visible=False, axis="y")
