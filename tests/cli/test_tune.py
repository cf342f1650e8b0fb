"""``kernelcast tune``: searching among records, with and without another device's, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import typer

from kernelcast.cli import app as application
from kernelcast.cli import prior, select, tune
from kernelcast.datasets import Environment, Measurement, Protocol, Store
from kernelcast.kernels import Candidate, Problem
from kernelcast.kernels.devices import device

DEVICES = {"a100": device("a100"), "h100": device("h100")}
PROBLEM = Problem("toy", (("m", 64),), "float16")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command: (exit status, standard output, standard error)."""
    app = typer.Typer()
    app.callback()(application._options)
    for module in (select, tune):
        module.attach(app)
    monkeypatch.setattr(application, "app", app)
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments):
        status = application._run([str(each) for each in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def recorded(tmp_path):
    """One problem on two devices that like other tiles; a tile of 256 by 256 fails on both."""
    store = Store(tmp_path / "recorded")
    for name, (x, y) in {"a100": (64, 32), "h100": (128, 32)}.items():
        store.add_device(DEVICES[name])
        rows = []
        for tile_x, tile_y, stages in product((16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (1, 2, 3, 4)):
            failed = tile_x == tile_y == 256
            us = 10.0 + abs(tile_x - x) / 8 + abs(tile_y - y) / 4 + 3 * abs(stages - 2)
            rows.append(
                Measurement(
                    problem=PROBLEM,
                    candidate=Candidate.of("tile", {"x": tile_x, "y": tile_y, "stages": stages}),
                    device=DEVICES[name].name,
                    device_fingerprint=DEVICES[name].fingerprint,
                    environment=Environment(source="elsewhere"),
                    protocol=Protocol("theirs"),
                    samples_us=() if failed else (us,),
                    outcome="out_of_resources" if failed else "ok",
                    detail="too large" if failed else "",
                )
            )
        store.add_many(rows)
    return store.root


def replayed(run, recorded, *options):
    status, out, err = run(
        "tune", "--op", "toy", "--replay", recorded, "--device", "a100", "--json", *options
    )
    assert status == 0, err
    return json.loads(out)


def test_a_search_among_records(run, recorded):
    report = replayed(run, recorded, "--measurements", 60)
    assert (report["candidates"], report["measured"], round(report["optimum_us"], 6)) == (100, 60, 10.0)
    assert [step["measurements"] for step in report["steps"]] == [10, 20, 40, 60]
    assert report["best_us"] == pytest.approx(10.0)
    assert report["best"] == "tile(stages=2, x=64, y=32)"
    assert report["steps"][-1]["share"] == pytest.approx(1.0)
    assert report == replayed(run, recorded, "--measurements", 60)


def test_another_devices_records_help(run, recorded):
    report = replayed(run, recorded, "--measurements", 20, "--prior-device", "h100")
    assert report["prior_devices"] == ["h100"]
    assert report["best_us"] == pytest.approx(10.0)
    # Its own best is looked up first: 8 us slower here.
    assert replayed(run, recorded, "--measurements", 1, "--prior-device", "h100")["best_us"] == pytest.approx(
        18.0
    )


@pytest.mark.slow
def test_a_space_smaller_than_what_is_asked_for(run, recorded):
    report = replayed(run, recorded, "--measurements", 1000)
    assert (report["measured"], report["failed"]) == (100, 4)
    assert report["steps"][-1] == pytest.approx({"measurements": 100, "best_us": 10.0, "share": 1.0})


def test_the_table_for_readers(run, recorded):
    status, out, _ = run(
        "tune", "--op", "toy", "--replay", recorded, "--device", "a100", "--measurements", 40
    )
    assert status == 0
    assert "share of the optimum" in out
    assert "Looked up 40 of 100 candidates" in out


def copied(recorded, device_name, *, variant="tile", problem=PROBLEM):
    """Puts what one device recorded into the store again, under the other device and another name or problem."""
    store = Store(recorded)
    other = DEVICES[device_name]
    of = {"a100": "h100", "h100": "a100"}[device_name]
    store.prune(device=other.fingerprint)
    store.add_many(
        [
            replace(
                each,
                problem=problem,
                candidate=Candidate(variant, each.candidate.config),
                device=other.name,
                device_fingerprint=other.fingerprint,
            )
            for each in store.measurements(device=DEVICES[of].fingerprint)
        ]
    )


def test_records_under_another_variants_name_are_matched_by_config(run, recorded):
    copied(recorded, "h100", variant="elsewhere")
    options = ("--measurements", 1, "--prior-device", "h100")
    report = replayed(run, recorded, *options)
    assert report["prior"] == [
        {"device": "h100", "candidates": 100, "matched": 100, "renamed": {"tile": "elsewhere"}}
    ]
    # The other device's best is looked up first, and is the best here.
    assert report["best_us"] == pytest.approx(10.0)
    status, out, _ = run("tune", "--op", "toy", "--replay", recorded, "--device", "a100", *options)
    assert status == 0
    assert "100 of 100 candidates were matched with the records of h100 by config" in out
    assert "tile with elsewhere" in out


def test_records_of_one_name_are_matched_by_name_alone(run, recorded):
    report = replayed(run, recorded, "--measurements", 1, "--prior-device", "h100")
    assert report["prior"] == [{"device": "h100", "candidates": 100, "matched": 100, "renamed": {}}]


def test_which_variants_count_as_one():
    def of(variant, **config):
        return Candidate.of(variant, config)

    ours = [of("a", x=1), of("a", x=2), of("b", x=1), of("default")]
    record = object()

    def found(*held):
        places, renamed = prior.matched(ours, dict.fromkeys(held, record))
        return sorted(places), renamed

    # A variant that the records have is matched by its name, though another has the config.
    assert found(of("a", x=1), of("other", x=2)) == ([0], {})
    assert found(of("a", x=2), of("b", x=2)) == ([1], {})
    # That which shares most configs; what the candidates have themselves is not taken for another.
    assert found(of("y", x=1), of("z", x=1), of("z", x=2)) == ([0, 1, 2], {"a": "z", "b": "y"})
    assert found(of("b", x=1), of("b", x=2)) == ([2], {})
    # Nothing to compare: no parameters, or other values.
    assert found(of("elsewhere")) == ([], {})
    assert found(of("elsewhere", x=3), of("elsewhere", y=1)) == ([], {})


def test_a_prior_that_matches_nothing_says_what_is_there(run, recorded):
    def refused():
        status, _, err = run(
            "tune", "--op", "toy", "--replay", recorded, "--device", "a100", "--prior-device", "h100", "m=64"
        )
        assert status == 2
        return err

    copied(recorded, "h100", problem=Problem("toy", (("m", 8),), "float16"))
    assert "it was recorded there on toy(m=8, float16). Leave it out of --prior-device." in refused()


def test_problems_that_differ_in_names_or_dtype_can_be_told_apart(run, recorded):
    more = Problem("toy", (("m", 64), ("n", 2)), "float16")
    store = Store(recorded)
    rows = list(store.measurements(device=DEVICES["a100"].fingerprint))
    for problem in (more, replace(more, dtype="float32")):
        store.add_many([replace(each, problem=problem) for each in rows])

    def meant(*words):
        return replayed(run, recorded, "--measurements", 1, *words)["problem"]

    assert meant("m=64") == "toy(m=64, float16)"
    assert meant("n=2", "dtype=float16") == "toy(m=64, n=2, float16)"
    assert meant("n=2", "dtype=float32") == "toy(m=64, n=2, float32)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--measurements", 5], "--measurements goes with --replay"),
        (["--replay", "STORE", "--budget", "5s"], "leave --budget out"),
        (["--replay", "STORE", "--device", "a100", "m=3"], "holds 0 such problems"),
        (["--replay", "STORE", "--device", "a100", "--prior-device", "l4"], "holds no records of l4"),
        (
            ["--replay", "STORE", "--device", "a100", "--prior-device", "a100"],
            "is the device that is replayed",
        ),
        (["--device", "h100"], "is not here to measure on"),
    ],
)
def test_what_is_refused(run, recorded, options, message):
    options = [str(recorded) if each == "STORE" else each for each in options]
    name = "toy" if "--replay" in options or "--measurements" in options else "softmax"
    words = [] if name == "toy" else ["rows=4", "columns=8"]
    status, _, err = run("tune", "--op", name, *words, *options)
    assert status == 2
    assert message in err
