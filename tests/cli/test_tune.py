"""``kernelcast tune``: searching among records, with and without another device's, and what is refused."""

from __future__ import annotations

import json
from itertools import product

import pytest
import typer

from kernelcast.cli import app as application
from kernelcast.cli import select, tune
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--measurements", 5], "--measurements goes with --replay"),
        (["--replay", "STORE", "--budget", "5s"], "leave --budget out"),
        (["--replay", "STORE", "--device", "a100", "m=3"], "holds 0 such problems"),
        (["--replay", "STORE", "--device", "a100", "--prior-device", "l4"], "holds no records of l4"),
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
