"""The report: one page that loads nothing, escapes everything, and says the figures of the record."""

from __future__ import annotations

import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kernelcast.errors import ModelError
from kernelcast.training.registry import RegisteredModel
from kernelcast.training.report import write_report
from kernelcast.training.report_plots import map_dimensions, plots_of

KS = [1, 2, 3, 5, 10]
VOID = {"meta", "br", "path", "use", "rect", "line"}


class Page(HTMLParser):
    """Checks that elements are closed in order, and gathers what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def values(self, attribute: str) -> list[str]:
        return [value for name, value in self.attributes if name == attribute]


def problem(number: int, **changes) -> dict:
    return {
        "evidence": f"e{number}",
        "problem": f"gemm(m={number}, float16)",
        "workload": "timm",
        "candidates": 13,
        "flops": 1e6 * 10**number,
        "best": "triton_tiled(block_m=64)",
        "best_us": 50.0 + number,
        "default_us": 100.0,
        "first": "triton_tiled(block_m=64)",
        "first_us": 60.0,
        "verified": "triton_tiled(block_m=64)",
        "verified_us": 50.0,
        **changes,
    }


def model(
    folder: Path,
    *,
    problems=None,
    curve=(0.81, 0.9, 0.95, 1.0, 1.0),
    plots=False,
    operation="gemm",
    device="a100",
) -> RegisteredModel:
    problems = [problem(0), problem(1)] if problems is None else problems
    default = (0.5, 0.5, 0.5, 0.5, 0.5)
    record = {
        "record_version": 1,
        "ks": KS,
        "trained_shapes": [],
        "importance": {"log2_m": 0.75, "a_$feature$_<b>": 0.25, "idle": 0.0} if plots else {},
        "problems": problems,
        "curves": {"model": [list(curve)] * len(problems), "default": [list(default)] * len(problems)},
        "curves_with_default": {
            "model": [list(curve)] * len(problems),
            "default": [list(default)] * len(problems),
        },
        "points": {"predicted_us": [1.0, 12.0, 90.0], "measured_us": [1.1, 10.0, 100.0]}
        if plots
        else {"predicted_us": [], "measured_us": []},
    }
    content = json.dumps(record).encode()
    folder.mkdir(parents=True)
    (folder / "held_out.json").write_bytes(content)
    facts = {
        "created_at": "2026-01-02T03:04:05+00:00",
        "device": {"name": device, "vendor": "nvidia", "architecture": "sm80", "cores": 108},
        "dataset_hash": "3f2a9c1b77aa0011",
        "problems": 915,
        "shapes": 900,
        "measurements": 27000,
        "failures": 3,
        "workloads": {"timm": 915},
        "dtypes": {"float16": 915},
        "seed": 4,
        "hyperparameters": {"n_estimators": 400, "max_depth": 8},
        "libraries": {"xgboost": "3.2.0"},
        "held_out": {"how": "180 of 900 shapes held out", "sha256": hashlib.sha256(content).hexdigest()},
        "gate": {"promoted": True, "reason": "Efficiency 0.81 at 1."},
    }
    return RegisteredModel(folder, device, operation, "0001-3f2a9c1b", True, {"facts": facts})


def written(tmp_path: Path, models, **options) -> tuple[str, Page]:
    text = write_report(tmp_path / "report.html", models, **options).read_text(encoding="utf-8")
    return text, Page(text)


def rows(page_text: str) -> list[list[str]]:
    found = re.findall(r"<tr[^>]*>(.*?)</tr>", page_text)
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in found]


def test_the_tables_say_the_figures_of_the_record(tmp_path):
    text, _ = written(tmp_path, [model(tmp_path / "m")])
    table = rows(text)
    assert ["gemm", "a100", "0001-3f2a9c1b", "2", "0.810", "0.950", "2.00×"] in table
    assert ["model", "geometric mean", "0.8100", "0.9000", "0.9500", "1.0000", "1.0000"] in table
    assert ["default", "geometric mean", "0.5000", "0.5000", "0.5000", "0.5000", "0.5000"] in table
    assert [
        "gemm(m=1, float16)", "timm", "triton_tiled(block_m=64)", "13", "100", "50.0", "51.0", "2.00×", "5.0%",
    ] in table  # fmt: skip
    assert "180 of 900 shapes held out" in text
    assert "915 problems of 900 shapes, 27000 measurements" in text


def test_a_failed_or_missing_default_has_no_speed_up(tmp_path):
    broken = [problem(0, default_us=None), problem(1, default_us=None, verified_us=None)]
    text, _ = written(tmp_path, [model(tmp_path / "m", problems=broken)])
    assert ["gemm", "a100", "0001-3f2a9c1b", "2", "0.810", "0.950", "–"] in rows(text)
    assert "NaN" not in text
    assert "None" not in text


def test_every_text_from_data_is_escaped(tmp_path):
    evil = '<script>alert("x")</script>&\'"'
    hostile = model(
        tmp_path / "m",
        problems=[problem(0, problem=evil, workload=evil, verified=evil)],
        device=evil,
        operation=f"op{evil}",
    )
    text, page = written(tmp_path, [hostile], title=evil, notes={tmp_path / "m": evil})
    assert "script" not in page.tags
    assert "<script" not in text
    # As text it is all there: heading, title, note, the table's three cells and the device.
    assert "".join(page.texts).count(evil) >= 7


def test_several_operations_have_a_table_of_contents_whose_links_lead_somewhere(tmp_path):
    models = [model(tmp_path / name, operation=name) for name in ("gemm", "conv2d", "softmax")]
    _, page = written(tmp_path, models)
    links = [value for value in page.values("href") if re.fullmatch(r"#model-\d+", value)]
    assert links == ["#model-1", "#model-2", "#model-3"]
    assert {link[1:] for link in links} <= set(page.values("id"))
    assert page.tags.count("section") == 3


def test_a_broken_or_unjudged_model_has_a_section_that_says_so(tmp_path):
    broken = RegisteredModel(
        tmp_path / "x", "a100", "conv2d", "0002-3f2a9c1b", False, {}, "the manifest was changed"
    )
    lost = model(tmp_path / "m")
    (tmp_path / "m" / "held_out.json").write_text("{}")
    unjudged = model(tmp_path / "n", problems=[])
    text, page = written(tmp_path, [broken, lost, unjudged])
    assert "the manifest was changed" in text
    assert "its digest does not match" in text
    assert page.tags.count("section") == 3


def test_a_long_table_is_cut_and_says_how_much_is_left_out(tmp_path):
    text, _ = written(tmp_path, [model(tmp_path / "m", problems=[problem(0)] * 450)])
    assert sum(row[:1] == ["gemm(m=0, float16)"] for row in rows(text)) == 400
    assert "50 problems of smaller regret are left out" in text


def test_no_model_is_an_error_and_writes_nothing(tmp_path):
    with pytest.raises(ModelError, match="kernelcast train"):
        write_report(tmp_path / "report.html", [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_page_with_plots_stands_alone(tmp_path):
    text, page = written(tmp_path, [model(tmp_path / name, plots=True) for name in ("one", "two")])
    assert page.tags.count("svg") == 8
    assert "http" not in text.replace("http-equiv", "").lower()
    assert {"script", "link", "img", "iframe"}.isdisjoint(page.tags)
    for attribute in ("src", "href", "xlink:href"):
        assert all(value.startswith("#") for value in page.values(attribute))
    assert "@import" not in text
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    for value in page.values("href"):
        assert value[1:] in ids
    for target in re.findall(r"url\(#([^)]*)\)", text):
        assert target in ids
    assert "a_$feature$_<b>" in "".join(page.texts)  # neither mathematics nor an element
    assert "currentColor" in text
    assert "#010203" not in text


@pytest.mark.slow
def test_the_same_models_give_the_same_page(tmp_path):
    found = [model(tmp_path / "m", plots=True)]
    first = write_report(tmp_path / "a.html", found).read_bytes()
    assert write_report(tmp_path / "b.html", found).read_bytes() == first


def sized(sizes, best="triton_tiled(block_m=64)", first=None):
    return [problem(i, sizes=each, best=best, first=first or best) for i, each in enumerate(sizes)]


def test_a_map_lies_across_the_two_dimensions_that_spread_most_and_differ():
    spread = [{"m": 2**i, "n": 64, "k": 2 ** (i // 2), "odd": 3 + 40 * (i % 2)} for i in range(8)]
    # m spreads most; k goes along with it, so that what k adds is less than what the alternating one does.
    assert map_dimensions(sized(spread)) == ("m", "odd")
    assert map_dimensions(sized([{"m": 2**i, "n": 2**i} for i in range(8)])) is None  # one line
    assert map_dimensions(sized([{"m": 2**i, "n": 7} for i in range(8)])) is None
    assert map_dimensions([problem(0), problem(1)]) is None  # a record that says no sizes
    assert map_dimensions([]) is None


@pytest.mark.slow
def test_the_map_names_the_frequent_winners_and_counts_the_others(tmp_path):
    sizes = [{"m": 2 ** (i % 5), "n": 2 ** (i // 5)} for i in range(25)]
    problems = sized(sizes)
    for number, item in enumerate(problems[:20]):
        item["best"] = f"rare(x={number})"
    svg = plots_of({**record_of(problems), "points": {"measured_us": []}})["winner_map"]
    assert "fastest as measured" in svg
    assert "first of the ranking" in svg
    assert "triton_tiled(m=64)" in svg
    assert "14 others" in svg  # 21 winners, of which seven have a colour


def record_of(problems):
    curves = {"model": [[1.0] * 5] * len(problems)}
    return {
        "ks": KS, "problems": problems, "curves": curves, "curves_with_default": curves, "importance": {},
    }  # fmt: skip


def test_a_report_that_cannot_be_written_is_named_itself(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelError) as caught:
        write_report(tmp_path / "folder", [model(tmp_path / "model")])
    assert str(caught.value) == (
        f"The report {tmp_path / 'folder'} cannot be written: Is a directory. Name another file with --output."
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "model"]
