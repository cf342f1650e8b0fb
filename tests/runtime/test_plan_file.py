"""Plans on disk and on paper: JSON that is checked, a function in plain Python, a table, and drawings."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kernelcast.errors import ArtifactError, InvalidRecordError, KernelcastError, SettingsError
from kernelcast.kernels import Candidate
from kernelcast.kernels.devices import device as known_device
from kernelcast.runtime.plan import Plan, PlanWarning, plan
from kernelcast.runtime.plan_build import environment_of
from kernelcast.runtime.plan_table import Interval


def load_lab():
    name = "kernelcast_plan_lab"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("plan_lab.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


lab = load_lab()
FIXED = (("k", 1), ("layout", "a"), ("dtype", "float32"), ("allow_tf32", False), ("threads", 1))
TILED = Candidate.of("low", {"chunk": 64, "flat": True, "kind": "it's"})


@pytest.fixture(autouse=True)
def _installed():
    with lab.installed():
        yield


def entry(first, last, candidate, alignment=(1, 0), **figures):
    return Interval((first,), (last,), (alignment,), candidate, "verified", (first,), **figures)


def by_hand(*, sizes=range(1, 65), intervals=None):
    """A plan of n with classes of alignment and a config."""
    vendor = Candidate.of("vendor")
    intervals = intervals or (
        entry(1, 7, vendor, predicted_us=4.0, measured_us=5.0, default_us=5.0, confidence=0.9),
        entry(8, 64, TILED, (8, 0), predicted_us=8.0, measured_us=10.0, default_us=25.0, confidence=0.99),
        entry(8, 64, Candidate.of("high"), (1, 8)),
    )
    environment, hashes = environment_of(lab.HERE, lab.NAME)
    return Plan(
        lab.NAME, (("m", 1), *FIXED), (("n", sizes),), (), intervals, lab.HERE, environment, hashes, "0001-3f2a9c1b",
        0.02, 5, 4, True, "Made by hand.",
    )  # fmt: skip


def of_two(tmp_path):
    lab.STATE.takes_us["low"] = lambda n, m: 50.0 if n < 16 and m < 20 else 150.0
    lab.STATE.takes_us["even"] = lambda n, m: 40.0
    lab.STATE.legal["even"] = lambda n, m: n % 8 == 0 and m > 16
    return plan(lab.NAME, mode="predict", selector=lab.oracle(tmp_path), n="1..64", m="4..64..4", threads=1)


# --- JSON ---


def test_a_plan_is_read_as_it_was_written(tmp_path):
    for found in (by_hand(), of_two(tmp_path), by_hand(sizes=range(1, 2), intervals=(entry(1, 1, TILED),))):
        again = Plan.from_json(found.to_json())
        assert again.to_json() == found.to_json()
        assert (again.digest, again.device, again.fixed) == (found.digest, found.device, found.fixed)
        assert [(e.first, e.last, e.alignment, e.candidate) for e in again.intervals] == [
            (e.first, e.last, e.alignment, e.candidate) for e in found.intervals
        ]
        path = tmp_path / "plan.json"
        found.save(path)
        assert Plan.load(path).to_json() == found.to_json()


def test_the_digest_is_of_what_it_answers():
    found = by_hand()
    assert replace(found, reason="Another.", proposed=9).digest == found.digest
    other = replace(found.intervals[0], candidate=Candidate.of("odd"))
    assert replace(found, intervals=(other, *found.intervals[1:])).digest != found.digest
    assert replace(found, fixed=(("m", 2), *FIXED)).digest != found.digest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(plan_version=2), "layout 2"),
        (lambda d: d.update(digest="0" * 16), "was changed"),
        (lambda d: d["intervals"].pop(), "exactly one"),
        (lambda d: d["intervals"][0]["candidate"].update(variant="no_such"), "no_such"),
        (lambda d: d["intervals"][0].update(source="guess"), "source"),
        (lambda d: d["intervals"][0].update(measured_us="fast"), "finite number"),
        (lambda d: d["intervals"][0]["sizes"].update(n=[1, 9]), "exactly one"),
        (lambda d: d["intervals"][0]["sizes"].update(m=[1, 9]), "dimensions"),
        (lambda d: d["dynamic"]["n"].update(step=0), "steps of 0"),
        (lambda d: d["dynamic"]["n"].update(last=2**60), "goes from"),
        (lambda d: d["fixed"].update(dtype="int4"), "int4"),
        (lambda d: d["fixed"].update(n=4), "contradict"),
        (lambda d: d["tied"].update(m="k"), "contradict"),
        (lambda d: d.update(operation="no_such"), "no_such"),
        (lambda d: d.update(operation=3), "operation is 3"),
        (lambda d: d.update(proposed=-1), "proposed is -1"),
        (lambda d: d.update(device={}), "device"),
        (lambda d: d.pop("intervals"), "intervals"),
    ],
)  # fmt: skip
def test_a_plan_with_a_fault_is_refused(change, said):
    data = json.loads(by_hand().to_json())
    change(data)
    with pytest.raises(InvalidRecordError, match=said):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000, '{"plan_version": 1}'])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(InvalidRecordError):
        Plan.from_json(text)


@hypothesis_settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_plan_is_refused_or_answers_alike(data):
    # Hypothesis calls this often within one test: the lab is installed once for all.
    found = by_hand()
    text = found.to_json()
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + data.draw(st.sampled_from(["", "0", '"', "}", "9,", "null"])) + text[at + 1 :]
    try:
        again = Plan.from_json(damaged)
    except InvalidRecordError:
        return
    assert [again.candidate(n=n) for n in range(65)] == [found.candidate(n=n) for n in range(65)]


# --- for which device ---


def test_a_plan_of_other_hardware_is_refused(tmp_path):
    found = by_hand()
    found.save(tmp_path / "plan.json")
    with pytest.raises(ArtifactError, match=r"was made for .* says nothing of a100"):
        Plan.load(tmp_path / "plan.json", known_device("a100-sxm4-80gb"))
    with pytest.raises(ArtifactError):
        Plan.from_json(found.to_json(), known_device("a100-sxm4-80gb"))


@pytest.mark.parametrize(
    "change",
    [
        {"environment": (("torch", "1.0"),)},
        {"variants": (("vendor", "0" * 16),)},
        {"device": replace(lab.HERE, memory_bandwidth=lab.HERE.memory_bandwidth + 1)},
    ],
)
def test_a_plan_of_another_environment_is_a_forecast(change):
    old = replace(by_hand(), **change)
    assert old.select(n=3).source == "cached"
    with pytest.warns(PlanWarning, match="another environment"):
        found = Plan.from_json(old.to_json(), lab.HERE)
    selection = found.select(n=3)
    assert (selection.source, selection.candidate) == ("predicted", Candidate.of("vendor"))
    assert "another environment" in selection.reason
    assert (found.verified, found.device) == (0, lab.HERE)
    assert "Stale" in str(found)


def test_the_same_environment_is_no_matter(recwarn):
    found = Plan.from_json(by_hand().to_json(), lab.HERE)
    assert found.stale == ""
    assert found.verified == 3
    renamed = replace(by_hand(), device=replace(lab.HERE, name="another"))
    assert Plan.from_json(renamed.to_json(), lab.HERE).device.name == lab.HERE.name
    assert [each for each in recwarn if issubclass(each.category, PlanWarning)] == []


@pytest.mark.parametrize("name", ["plan.txt", "plan", "json"])
def test_a_name_that_says_no_kind_is_refused(tmp_path, name):
    with pytest.raises(InvalidRecordError, match=r"must end in \.py or \.json"):
        by_hand().save(tmp_path / name)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRecordError, match="no text"):
        Plan.load(tmp_path / "plan.json")


def test_files_that_cannot_be_read_or_written_are_errors_of_the_project(tmp_path):
    found = by_hand()
    with pytest.raises(InvalidRecordError, match=r"none\.json cannot be read: No such file or directory"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(InvalidRecordError, match="cannot be read: Is a directory"):
        Plan.load(tmp_path)
    for call in (Plan.load, found.save):
        with pytest.raises(SettingsError, match="path is 1; it must be a path"):
            call(1)
    with pytest.raises(InvalidRecordError, match="it is of type int"):
        Plan.from_json(1)
    for call in (found.for_device, lambda name: Plan.from_json(found.to_json(), name)):
        with pytest.raises(SettingsError, match="device is 'cpu'; it must be a Device"):
            call("cpu")
    found.save(tmp_path / "new" / "folder" / "plan.json")
    assert (tmp_path / "new" / "folder" / "plan.json").read_text() == found.to_json()
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.json").mkdir()
    for path in (tmp_path / "file" / "plan.json", tmp_path / "folder.json"):
        with pytest.raises(KernelcastError, match=f"The plan {path} cannot be written: "):
            found.save(path)


# --- Python ---


def function_of(found):
    text = found.to_python()
    assert "import" not in text
    names = {"__builtins__": {}}
    exec(compile(text, "plan.py", "exec"), names)
    return names["select"]


def test_the_python_function_answers_alike_at_every_size(tmp_path):
    simple = by_hand(intervals=(entry(1, 7, TILED), entry(8, 40, Candidate.of("high")), entry(41, 64, TILED)))
    stepped = by_hand(
        sizes=range(6, 64, 3), intervals=(entry(6, 9, TILED), entry(12, 63, Candidate.of("high")))
    )
    for found in (by_hand(), simple, stepped):
        select = function_of(found)
        for n in range(0, 70):
            expected = found.candidate(n=n)
            assert select(n) == (expected.variant, expected.parameters), n
    two = of_two(tmp_path)
    assert len(two.intervals) > 3
    select = function_of(two)
    for n in range(0, 67):
        for m in range(0, 70):
            expected = two.candidate(n=n, m=m)
            assert select(n, m=m) == (expected.variant, expected.parameters)


def test_the_python_function_says_what_it_is(tmp_path):
    by_hand().save(tmp_path / "plan.py")
    text = (tmp_path / "plan.py").read_text()
    assert "def select(n):" in text
    assert "10 us measured, 2.50x the default's speed" in text
    assert f"Plan {by_hand().digest}." in text
    assert max(len(line) for line in by_hand().to_python().splitlines()) < 200


# --- table and drawings ---


def test_the_table_has_a_line_an_interval():
    title, head, rule, *rows, reason = str(by_hand()).splitlines()
    assert title.startswith("test_plan n=1..64 m=1 k=1")
    assert head.split() == ["sizes", "candidate", "at", "predicted", "us", "measured", "us", "default", "us", "gain", "source"]  # fmt: skip
    assert set(rule) == {"-", " "}
    assert [row.split("  ")[0] for row in rows] == [
        "n 1..7", "n 8..64 (multiples of 8)", "n 8..64 (no multiples of 8)",
    ]  # fmt: skip
    assert rows[1].split()[-5:] == ["8.0", "10.0", "25.0", "2.50x", "verified"]
    assert reason == f"Made by hand. Plan {by_hand().digest}."


def test_the_drawing_has_a_letter_a_candidate():
    lines = by_hand().draw(width=40).splitlines()
    assert lines[:3] == ["A  vendor", f"B  {TILED}", "C  high"]
    assert lines[4] == "n: no multiples of 8"
    # From 1 to 64 in 40 letters: 8 is half the way in logarithms.
    assert lines[5] == "A" * 19 + "C" * 21
    assert lines[6] == "1" + "64".rjust(39) + "  n"
    assert lines[8] == "n: multiples of 8"
    assert lines[9] == "A" * 19 + "B" * 21


def test_two_dimensions_are_a_field(tmp_path):
    found = of_two(tmp_path)
    lines = found.draw(width=24).splitlines()
    letters = {line[3:]: line[0] for line in lines if line[1:3] == "  "}
    field = [line.split() for line in lines if line[:1].isspace() or line[:1].isdigit()]
    assert {"low", "even", "vendor"} <= set(letters)
    bottom = next(row for row in field if row[0] == "4" and len(row) == 2)
    assert bottom[1].startswith(letters["low"])
    assert bottom[1].endswith(letters["vendor"])


def test_the_picture_has_a_rectangle_an_interval(tmp_path):
    for found in (by_hand(), of_two(tmp_path)):
        picture = ET.fromstring(found.to_svg())
        titles = {title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")}
        assert titles == {f"{found.describe(each)}: {each.candidate}" for each in found.intervals}
        assert str(found.device.name) in "".join(picture.itertext())
