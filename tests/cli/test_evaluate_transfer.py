"""``kernelcast evaluate --train-devices`` and ``train --from-devices`` on a small store of two devices."""

from __future__ import annotations

import json
import math

import pytest

from kernelcast.cli import main
from kernelcast.datasets import Environment, Measurement, Protocol, Store
from kernelcast.kernels import Candidate, Problem
from kernelcast.kernels.devices import device

OLD, NEW = device("a100"), device("h100")


def measurements(m, where, best):
    """The tile nearest to a device's own favourite is the fastest; the vendor's time lies between."""
    problem = Problem("toy", (("m", m),), "float32")
    latency_us = {Candidate.of("vendor"): m * 1.3}
    for tile in (16, 64, 256):
        latency_us[Candidate.of("triton_toy", {"tile": tile})] = m * 1.5 ** abs(math.log2(tile / best))
    return [
        Measurement(
            problem=problem, candidate=candidate, device=where.name, device_fingerprint=where.fingerprint,
            environment=Environment(source="test"), protocol=Protocol("test"), samples_us=(latency,), workload="w",
        )
        for candidate, latency in latency_us.items()
    ]  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("transfer") / "store"
    made = Store(root)
    made.add_device(OLD)
    made.add_device(NEW)
    made.add_many(
        each
        for number in range(12)
        for where, best in ((OLD, 16), (NEW, 256))
        for each in measurements(64 * (number + 1), where, best)
    )
    return root


def run(*words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


@pytest.mark.slow
def test_the_curve_is_printed_and_measured_problems_help(store, capsys):
    words = ("--train-devices", "a100", "--test-device", "h100", "--target-problems", "0,4", "--seeds", "1")
    assert run("evaluate", "--op", "toy", "--store", store, *words, "--json", "-") == 0
    figures = json.loads(capsys.readouterr().out)
    none, some = figures["points"]
    assert (none["measured"], some["measured"], figures["test_problems"]) == (0, 4, 8)
    # The old device's favourite is the new one's slowest tile.
    assert none["efficiency"]["1"]["geomean"] < 0.5
    assert some["efficiency"]["1"]["geomean"] > none["efficiency"]["1"]["geomean"]
    assert run("evaluate", "--op", "toy", "--store", store, *words) == 0
    shown = capsys.readouterr().out
    assert "0 measured there" in shown
    assert "4 measured, no other device" in shown


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--train-devices", "a100"), "both --train-devices and --test-device"),
        (("--test-device", "h100"), "both --train-devices and --test-device"),
        (("--target-problems", "3"), "belongs to --train-devices"),
        (("--train-devices", "a100", "--test-device", "h100", "--folds", "3"), "--folds cannot be used"),
        (
            ("--train-devices", "a100", "--test-device", "h100", "--target-problems", "few"),
            "numbers by commas",
        ),
        (("--train-devices", "a100", "--test-device", "h100", "--target-problems", "9"), "at most half"),
        (("--train-devices", "a100", "--test-device", "a100", "--target-problems", "1"), "both sides"),
        (("--train-devices", "mi300x", "--test-device", "h100"), "no records of toy"),
    ],
)
def test_what_cannot_be_evaluated_is_one_sentence(store, capsys, words, fault):
    assert run("evaluate", "--op", "toy", "--store", store, *words) == 2
    assert fault in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_a_device_without_records_is_trained_from_others(store, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path))
    words = ("--op", "toy", "--device", "h200", "--from-devices", "a100,h100", "--store", store, "--no-track")
    assert run("train", *words, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["problems"], result["promoted"]) == (0, False)
    assert "No problem was measured on h200" in result["reason"]
    assert run("train", "--op", "toy", "--device", "h200", "--store", store, "--no-track") == 2
