"""The options that say where ``kernelcast collect`` measures."""

from __future__ import annotations

import json
import math
import sys

import pytest
from cases import for_each

from kernelcast.cli import app as application
from kernelcast.cli.executors import ExecutorChoice, parse_bytes
from kernelcast.datasets.isolation import Isolated, Limits
from kernelcast.datasets.jobs import InProcess
from kernelcast.datasets.pool import ProcessPool
from kernelcast.errors import MissingExtraError, SettingsError
from kernelcast.kernels.detect import detect


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("8GiB", 8 * 2**30),
        ("500MB", 5e8),
        ("2G", 2**31),
        ("1.5kib", 1536),
        ("4096", 4096),
        (" 1 TB", 1e12),
    ],
)
def test_an_amount_of_memory(text, expected):
    assert parse_bytes(text) == expected


@for_each("text", ["", "GiB", "-1GB", "0", "nan", "inf", "8XB", "8 giga"])
def test_what_is_no_amount_of_memory(text):
    with pytest.raises(SettingsError, match="such as 8GiB"):
        parse_bytes(text)


@for_each(
    ("options", "said"),
    [
        ({"executor": "remote"}, "--executor is 'remote'; it must be local, processes or ray"),
        ({"isolate": "yes"}, "--isolate is 'yes'; it must be auto, always or never"),
        ({"isolate": "never", "executor": "processes"}, "--isolate never goes with local"),
        ({"isolate": "never", "max_memory": "1GiB"}, "--max-memory limits a child process"),
        ({"isolate": "never", "time_limit": "1s"}, "--time-limit limits a child process"),
        ({"ray_address": "auto"}, "--ray-address goes with --executor ray"),
        ({"device": "h100"}, "--device goes with --executor ray"),
        ({"max_memory": "much"}, "such as 8GiB"),
        ({"time_limit": "soon"}, "such as 10m"),
    ],
)
def test_options_that_contradict_one_another_are_refused(options, said):
    with pytest.raises(SettingsError) as raised:
        ExecutorChoice(**options)
    assert said in str(raised.value)


def test_limits_are_those_given():
    assert ExecutorChoice().limits() == Limits()
    assert ExecutorChoice(max_memory="1KiB", time_limit="2m").limits() == Limits(120.0, 1024.0)
    assert Limits().memory_bytes == math.inf


@pytest.mark.parametrize(
    ("options", "kind", "only_untrusted"),
    [
        ({}, Isolated, True),
        ({"isolate": "always"}, Isolated, False),
        ({"max_memory": "1GiB"}, Isolated, False),  # a limit holds for every job
        ({"time_limit": "5s"}, Isolated, False),
        ({"isolate": "never"}, InProcess, None),
        ({"executor": "processes"}, ProcessPool, None),
    ],
)
def test_the_executor_is_as_the_options_say(options, kind, only_untrusted):
    with ExecutorChoice(**options).open() as (executor, device, idle):
        assert type(executor) is kind
        assert device == detect()
        assert idle == []
        if only_untrusted is not None:
            assert executor._only_untrusted is only_untrusted


def test_ray_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"kernelcast\[ray\]"), ExecutorChoice(executor="ray").open():
        pass


@pytest.fixture
def collect(monkeypatch, capsys, tmp_path):
    """Runs the command on a small problem and a store of the test's: (exit status, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("kernelcast.cli.common.warn_if_noisy", lambda device: True)

    def call(*options):
        words = ["softmax", "rows=4", "columns=8", "threads=1", "--rounds", "1", "--seconds", "0.05"]
        status = application._run(["collect", *words, "--store", str(tmp_path / "store"), *options])
        return (status, *capsys.readouterr())

    return call


def test_a_wrong_option_is_refused_before_anything_is_measured(tmp_path, collect):
    status, _, said = collect("--isolate", "never", "--max-memory", "1GiB")
    assert status == 2
    assert "--max-memory limits a child process" in said
    assert not (tmp_path / "store").exists()


def test_a_budget_that_ends_says_what_is_incomplete_and_the_best_so_far(collect):
    status, out, _ = collect("--budget", "0.000001s", "--json")
    assert status == 0
    assert json.loads(out)["unfinished"] == []
    assert json.loads(out)["complete"] is False

    from kernelcast.datasets import collect as module

    summary = module.CollectSummary(
        problems=1,
        measured=2,
        complete=False,
        unfinished=[
            module.Unfinished("softmax(rows=4)", 2, 9, "vendor", 12.34),
            module.Unfinished("b", 0, 3, None, None),
        ],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "collect", lambda *_, **__: summary)
        text = collect()[1]
        data = json.loads(collect("--json")[1])
    assert "Incomplete: softmax(rows=4): 2 of 9 candidates; best so far: vendor, 12.3 us" in text
    assert "Incomplete: b: 0 of 3 candidates; none worked" in text
    assert data["unfinished"][0] == {
        "problem": "softmax(rows=4)",
        "measured": 2,
        "candidates": 9,
        "best": "vendor",
        "latency_us": 12.34,
    }


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--isolate", "always"), ("--executor", "processes")])
def test_measuring_in_child_processes_gives_the_same_records(collect, options):
    outside = json.loads(collect(*options, "--json")[1])
    assert outside["outcomes"] == {"ok": outside["measured"]}
    assert outside["measured"] > 1
    inside = json.loads(collect("--isolate", "never", "--json")[1])
    assert (inside["measured"], inside["known"]) == (0, outside["measured"])
