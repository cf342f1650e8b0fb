"""The pages are held to the code: links, commands, options, names, fields, defaults, and the examples that run."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import for_each

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
#: A command in running text: `kernelcast data check`. A dotted name is none.
INLINE_COMMAND = re.compile(r"`(kernelcast(?: [^`]+))`")
RUNNABLE = re.compile(r"python runnable=(?P<file>[\w.]+)")


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in LINK.findall(without_code(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    return broken


def command_lines(text: str) -> Iterator[tuple[str, bool]]:
    """Every kernelcast command of a page, and whether it is whole: in running text arguments may be left out."""
    for block in FENCE.finditer(text):
        if block["info"].strip() in ("console", "bash", "sh", "shell"):
            for line in block["body"].replace("\\\n", " ").splitlines():
                line = re.sub(r"^(\$ )?([A-Z_]+=\S* )*", "", line.strip())
                if re.match(r"kernelcast(\s|$)", line):
                    yield re.split(r" (?:#|\||>|&&) ?", line)[0].strip(), True
    for found in INLINE_COMMAND.findall(FENCE.sub("", text)):
        yield " ".join(found.split()), False


@functools.cache
def application() -> Any:
    """The command line, built once: parsing a command changes nothing in it."""
    import typer

    from kernelcast.cli import commands
    from kernelcast.cli.app import app

    commands.attach(app)
    return typer.main.get_command(app)


def leaves(command: Any, name: str = "kernelcast") -> dict[str, Any]:
    """Every command that is no group, by its full name."""
    groups = getattr(command, "commands", None)
    if groups is None:
        return {name: command}
    found: dict[str, Any] = {}
    for word, inner in groups.items():
        found |= leaves(inner, f"{name} {word}")
    return found


def fault_of(line: str, *, whole: bool) -> str:
    """What is wrong with a command line; empty if it parses."""
    command = application()
    words = shlex.split(line)[1:]
    name = "kernelcast"
    while words and hasattr(command, "commands"):
        word, *words = words
        if word in ("--help", "--debug"):
            continue
        if word == "--import":
            words = words[1:]
            continue
        # A group may have a command that need not be named.
        implied = getattr(command, "default_command", None)
        if word not in command.commands and implied is not None:
            word, words = implied, [word, *words]
        if word not in command.commands:
            return f"{name} has no command {word!r}"
        command, name = command.commands[word], f"{name} {word}"
    if hasattr(command, "commands") or "--help" in words:
        return ""
    if not whole:
        known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        unknown = [word for word in words if word.startswith("--") and word not in known]
        return f"{name} has no option {', '.join(unknown)}" if unknown else ""
    try:
        command.make_context(name, words)
    except Exception as error:
        # Newer versions of typer carry a click of their own: an error of arguments is known by what it can do.
        if not hasattr(error, "format_message"):
            raise
        return f"{line}: {error.format_message()}"
    return ""


COMMAND_LINES = sorted(
    {(label(page), *found) for page in PAGES for found in command_lines(page.read_text(encoding="utf-8"))}
)


def table_after(text: str, first_cell: str) -> dict[str, list[str]]:
    """A Markdown table by its first column, found by the first cell of its head."""
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, *rest = (cell.strip() for cell in line.strip("|").split("|"))
        rows[first.strip("`")] = rest
    return rows


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


# --- links, commands, names ---


@for_each("page", PAGES, ids=label)
def test_every_relative_link_resolves(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_a_broken_link_and_a_broken_anchor_are_found() -> None:
    text = "[a](no-such.md) [b](concepts.md#no-such) [c](concepts.md#efficiencyk) [d](https://example.org) `[e](f)`"
    assert broken_links(DOCS / "index.md", text) == ["no-such.md", "concepts.md#no-such"]


@for_each(("page", "line", "whole"), COMMAND_LINES)
def test_every_command_in_the_docs_parses(page: str, line: str, whole: bool) -> None:
    assert fault_of(line, whole=whole) == ""


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("kernelcast no-such", "has no command 'no-such'"),
        ("kernelcast data no-such", "has no command 'no-such'"),
        ("kernelcast select gemm m=1 --no-such 3", "--no-such"),
        ("kernelcast train --device a100", "--op"),
        ("kernelcast select gemm --top many", "many"),
    ],
)
def test_a_command_line_with_a_fault_is_found(line: str, fault: str) -> None:
    assert fault in fault_of(line, whole=True)


def test_every_command_has_a_section_with_an_example_and_its_options() -> None:
    sections = {
        section.partition("\n")[0].strip(): section
        for section in re.split(r"^## ", read("command-line.md"), flags=re.MULTILINE)[1:]
    }
    expected = leaves(application())
    assert sorted(sections) == sorted(expected)
    for name, command in expected.items():
        section = sections[name]
        assert any(line.startswith(name) and whole for line, whole in command_lines(section)), (
            f"{name} has no example"
        )
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                if option.startswith("--") and option != "--help":
                    assert f"`{option}`" in section, f"the section of {name} does not name {option}"


def test_every_command_module_is_documented() -> None:
    from kernelcast.cli.commands import MODULES

    words = {name.split()[1] for name in leaves(application())}
    assert {module.rstrip("_").replace("_", "-") for module in MODULES} == words


def test_every_public_name_is_mentioned() -> None:
    import kernelcast

    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    missing = [name for name in kernelcast.__all__ if not re.search(rf"\b(?:kernelcast|kc)\.{name}\b", text)]
    assert missing == []


def test_the_settings_in_the_docs_are_those_of_the_code() -> None:
    known = set(
        re.findall(r"KERNELCAST_[A-Z]+", (ROOT / "kernelcast/settings.py").read_text(encoding="utf-8"))
    )
    named = {
        name for page in PAGES for name in re.findall(r"KERNELCAST_[A-Z]+", page.read_text(encoding="utf-8"))
    }
    assert named == known


def test_the_list_of_decisions_is_complete() -> None:
    listed = set(re.findall(r"\((\d{4}-[\w-]+\.md)\)", read("adr/README.md")))
    assert listed == {page.name for page in (DOCS / "adr").glob("[0-9]*.md")}


# --- fields and defaults ---


def test_every_field_column_and_outcome_of_a_record_is_on_the_data_page() -> None:
    from kernelcast.datasets import OUTCOMES, SCHEMA_VERSION, Environment, Measurement, Protocol
    from kernelcast.datasets.segments import COLUMNS

    text = read("data.md")
    record = text.partition("## The record")[2].partition("## The columns")[0]
    columns = text.partition("## The columns")[2].partition("## Import")[0]
    fields = [
        field.name for kind in (Measurement, Environment, Protocol) for field in dataclasses.fields(kind)
    ]
    assert [name for name in ("schema", "id", *fields, *OUTCOMES) if f"`{name}`" not in record] == []
    assert [name for name in COLUMNS if f"`{name}`" not in columns] == []
    assert f"version of the fields: {SCHEMA_VERSION}." in record


def test_the_defaults_of_a_timing_plan_are_on_the_measuring_page() -> None:
    from kernelcast.datasets.timing import PROTOCOL, TimingPlan
    from kernelcast.runtime.verify import VERIFY_PLAN

    documented = table_after(read("measuring.md"), "`TimingPlan`")
    expected = {
        field.name: [str(getattr(plan, field.name)) for plan in (TimingPlan(), VERIFY_PLAN)]
        for field in dataclasses.fields(TimingPlan)
    }
    assert {name: cells[1:] for name, cells in documented.items()} == expected
    assert f"`{PROTOCOL}`" in read("measuring.md")


def test_the_modes_and_sources_are_documented() -> None:
    from kernelcast.runtime import SOURCES
    from kernelcast.settings import MODES

    modes = [name.split("`")[0] for name in table_after(read("measuring.md"), "mode")]
    assert modes == list(MODES)
    assert sorted(table_after(read("concepts.md"), "source")) == sorted(SOURCES)


def test_the_model_page_names_heads_features_and_hyperparameters() -> None:
    from kernelcast.costmodel.heads import ORDER_HEADS, OTHER_HEADS, SLOWDOWN_SCALE
    from kernelcast.featurizer.analytic import ANALYTIC_UNITS
    from kernelcast.featurizer.extra import extra_names, left_out
    from kernelcast.featurizer.featurizer import COMPILED_UNITS
    from kernelcast.training.compiled import LEAST_SHARE
    from kernelcast.training.gate import TIE
    from kernelcast.training.held_out import FEW_PROBLEMS
    from kernelcast.training.recipe import SMALL_DATASET

    text = read("models.md")
    assert list(table_after(text, "head")) == [*ORDER_HEADS, *OTHER_HEADS]
    assert f"log(1 + {SLOWDOWN_SCALE:g} s)" in text
    extra = [name for name in extra_names("gemm") if not name.startswith("library_tail_")]
    assert [name for name in (*ANALYTIC_UNITS, *extra, *COMPILED_UNITS) if f"`{name}`" not in text] == []
    assert f"at least {LEAST_SHARE:.0%} of the measured Triton candidates" in text
    assert {"option_lda", "option_ldb"} <= left_out("gemm")
    assert f"by more than {TIE:g} at 1" in text
    assert f"fewer than {FEW_PROBLEMS} problems, five folds" in text
    assert f"fewer than {SMALL_DATASET} problems `kernelcast train`" in text


def test_the_hyperparameters_are_on_the_model_page() -> None:
    estimator = pytest.importorskip("kernelcast.costmodel.estimator")

    parameters = inspect.signature(estimator.CostModel).parameters
    expected = {name: str(parameter.default) for name, parameter in parameters.items() if name != "n_jobs"}
    documented = table_after(read("models.md"), "`CostModel`")
    assert {name: cells[0] for name, cells in documented.items()} == expected


# --- examples that run ---


def runnable_blocks(page: Path) -> list[tuple[str, str, str | None]]:
    """(file name, code, the output that the page shows, if it shows one) of each runnable block."""
    text = page.read_text(encoding="utf-8")
    found = []
    blocks = list(FENCE.finditer(text))
    for at, block in enumerate(blocks):
        marked = RUNNABLE.fullmatch(block["info"].strip())
        if marked is None:
            continue
        following = blocks[at + 1] if at + 1 < len(blocks) else None
        shown = following is not None and following["info"].strip() == "text"
        between = text[block.end() : following.start()].strip() if following is not None else ""
        found.append(
            (marked["file"], block["body"], following["body"] if shown and between == "prints" else None)
        )
    return found


PAGES_THAT_RUN = [page for page in PAGES if runnable_blocks(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_THAT_RUN, ids=label)
def test_the_examples_run_and_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KERNELCAST_")}
    environment |= {
        "KERNELCAST_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(tmp_path),
        "PYTHONSAFEPATH": "1",
    }
    for name, code, shown in runnable_blocks(page):
        (tmp_path / name).write_text(code, encoding="utf-8")
        result = subprocess.run(
            [sys.executable, str(tmp_path / name)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert result.returncode == 0, f"{name}:\n{result.stderr}"
        if shown is not None:
            assert result.stdout == shown, name


def test_the_how_to_has_its_operation_and_three_steps_that_run() -> None:
    blocks = runnable_blocks(DOCS / "how-to-add-a-variant.md")
    assert [name for name, _, _ in blocks] == [
        "row_norm.py",
        "list_candidates.py",
        "measure_candidates.py",
        "select_candidate.py",
    ]
    assert [shown is not None for _, _, shown in blocks] == [False, True, True, True]


def test_the_how_to_of_operations_has_a_function_a_triton_kernel_and_a_variant_that_run() -> None:
    blocks = runnable_blocks(DOCS / "how-to-add-an-operation.md")
    assert [name for name, _, _ in blocks] == [
        "row_scale.py",
        "use_row_scale.py",
        "vector_add.py",
        "list_vector_add.py",
        "gemm_in_parts.py",
    ]
    assert [shown is not None for _, _, shown in blocks] == [False, True, False, True, True]


def test_the_catalogue_names_every_variant_of_every_operation() -> None:
    from kernelcast.kernels import operation_names, variants

    sections = re.split(r"^## ", (DOCS / "catalogue.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for name in operation_names():
        (section,) = [each for each in sections if name in each.splitlines()[0].split()]
        assert {*variants(name)} - set(re.findall(r"`(\w+)`", section)) == set(), name
