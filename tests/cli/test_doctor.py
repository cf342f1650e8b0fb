"""``kernelcast doctor``: facts, folders, and whether timings can be trusted."""

from __future__ import annotations

import json
import platform

import pytest
import torch

from kernelcast import __version__
from kernelcast.cli import app as application
from kernelcast.costmodel.walk import described_engine
from kernelcast.datasets.rounds import UNDISTURBED
from kernelcast.featurizer import tiles
from kernelcast.kernels.detect import default_threads, detect


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command: (exit status, standard output, standard error)."""
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments):
        status = application._run(["doctor", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_facts_of_the_machine_the_software_and_the_folders(run, tmp_path):
    status, out, err = run("--no-measure", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    device = detect()
    assert found["device"]["name"] == device.name
    assert found["device"]["fingerprint"] == device.fingerprint
    assert found["device"]["threads"] == default_threads()
    assert found["software"]["kernelcast"] == __version__
    assert found["software"]["python"] == platform.python_version()
    assert found["software"]["torch"] == torch.__version__
    assert found["software"]["tree walk"] == described_engine()
    assert found["software"]["tile features"] == tiles.described_engine()
    home = tmp_path / "home"
    assert found["folders"]["home"] == str(home)
    assert found["folders"]["store"] == str(home / "store")
    assert found["folders"]["mode"] == "verify"
    assert found["checks"] == [{"check": "the home can be written", "ok": True, "seen": str(home)}]
    assert list(home.iterdir()) == []


def test_text_holds_the_same(run):
    status, out, _ = run("--no-measure")
    assert status == 0
    assert detect().name in out
    assert torch.__version__ in out
    assert "ok  the home can be written" in out


def test_a_home_that_cannot_be_written_is_said_and_status_1(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "file" / "home"))
    status, out, err = run("--no-measure", "--json")
    assert (status, err) == (1, "")
    (check,) = json.loads(out)["checks"]
    assert check["ok"] is False
    assert "Set KERNELCAST_HOME to a folder that can be written" in check["seen"]
    status, out, _ = run("--no-measure")
    assert status == 1
    assert "no  the home can be written" in out


def test_a_setting_that_cannot_be_used_is_one_sentence(run, monkeypatch):
    monkeypatch.setenv("KERNELCAST_MODE", "guess")
    status, out, err = run("--no-measure")
    assert (status, out) == (2, "")
    assert err.startswith("Error: KERNELCAST_MODE is 'guess'")


class ScriptedClock:
    """Latencies of the three products of the calibration, the same in every round but for a drift."""

    cache = "warm"
    flush_bytes = 0
    disturbance = UNDISTURBED

    def __init__(self, *latencies_us, jitter=0.0):
        self.latencies_us = latencies_us
        self.jitter = jitter
        self.calls = {}
        self.visits = 0

    def _latency(self, call):
        place = self.calls.setdefault(call, len(self.calls))
        self.visits += 1
        level = 1.0 + 0.5 * (self.visits // 3 % 2)
        # Two visits of one call never have the same jitter, and no two calls have it in step.
        return (
            self.latencies_us[place] * level * (1.0 + self.jitter * ((self.visits * (7 + place)) % 11) / 11)
        )

    def single_us(self, call):
        return self._latency(call)

    def sample_us(self, call, repeats):
        return self._latency(call)

    def now_s(self):
        return 0.0


@pytest.mark.parametrize(
    ("latencies", "jitter", "passed"),
    [
        ((100.0, 200.0, 100.0), 0.0, [True, True]),
        ((100.0, 200.0, 101.0), 0.001, [True, True]),
        ((100.0, 100.0, 100.0), 0.0, [False, True]),
        ((100.0, 200.0, 130.0), 0.0, [True, False]),
        ((100.0, 200.0, 100.0), 8.0, [None, False]),
    ],
)
def test_calibration_tells_what_differs_from_what_does_not(run, monkeypatch, latencies, jitter, passed):
    from kernelcast.datasets import calibration

    monkeypatch.setattr(calibration, "clock_for", lambda device: ScriptedClock(*latencies, jitter=jitter))
    status, out, _ = run("--json")
    checks = json.loads(out)["checks"]
    assert [c["check"] for c in checks][1:] == [
        "a product of twice the work is slower",
        "two equal products tie",
    ]
    for check, expected in zip(checks[1:], passed, strict=True):
        assert expected is None or check["ok"] is expected
    assert status == (0 if all(c["ok"] for c in checks) else 1)


@pytest.mark.slow
def test_calibration_on_this_machine(run):
    status, out, _ = run("--json")
    checks = json.loads(out)["checks"]
    assert len(checks) == 3
    # Which way they go depends on what else runs; that they were made does not.
    assert "times as long" in checks[1]["seen"]
    assert "noise" in checks[2]["seen"]
    assert status in (0, 1)
