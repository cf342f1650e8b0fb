"""The supervision of the GPU check's child processes, on children that crash and hang on purpose."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_tasks
from gpu_tasks import RESTART_STATUS, Task, TaskResult, run_tasks

BENCHMARKS = Path(gpu_tasks.__file__).parent

CHILD = """
import json, os, signal, sys, time
sys.path.insert(0, {benchmarks!r})
from pathlib import Path
from gpu_tasks import RESTART_STATUS, Reporter

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
spec = json.loads(Path(arguments["--spec"]).read_text())
report = Reporter(Path(arguments["--progress"]))
done = report.finished()
for name in spec["items"]:
    if (name,) in done:
        continue
    report("start", item=[name])
    if name == "segfault":
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang":
        time.sleep(60)
    report("result", item=[name], outcome="ok")
    if name == "broken":
        os._exit(RESTART_STATUS)
if "raise" in spec:
    raise SystemExit(3)
"""


def supervise(
    tmp_path: Path, *specs: dict[str, Any], seconds: float = 30.0, **limits: float
) -> list[TaskResult]:
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD.format(benchmarks=str(BENCHMARKS))))
    heard: list[str] = []
    tasks = [
        Task(f"task-{number}", "any", spec, **{"limit_s": 25.0, "silence_s": 20.0, **limits})
        for number, spec in enumerate(specs)
    ]
    results = run_tasks(
        tasks,
        [sys.executable, str(script)],
        tmp_path,
        deadline=time.monotonic() + seconds,
        workers=2,
        on_line=lambda task, line: heard.append(task.name),
    )
    assert len(heard) == sum(len(result.lines) for result in results)
    return results


def outcomes(result: TaskResult) -> dict[str, str]:
    return {line["item"][0]: line["outcome"] for line in result.lines if line["kind"] != "start"}


def test_a_crash_costs_one_item_and_the_child_goes_on_behind_it(tmp_path: Path) -> None:
    crashed, sound = supervise(tmp_path, {"items": ["a", "segfault", "b"]}, {"items": ["c"]})
    assert outcomes(crashed) == {"a": "ok", "segfault": "crash", "b": "ok"}
    assert (crashed.state, crashed.restarts) == ("done", 1)
    (died,) = [line for line in crashed.lines if line["kind"] == "died"]
    assert died["detail"] == "exit status -11: last words"
    assert (outcomes(sound), sound.restarts) == ({"c": "ok"}, 0)


@pytest.mark.slow
def test_a_hang_is_a_timeout_of_its_item(tmp_path: Path) -> None:
    (result,) = supervise(tmp_path, {"items": ["a", "hang", "b"]}, silence_s=2.0)
    assert outcomes(result) == {"a": "ok", "hang": "timeout", "b": "ok"}
    assert (result.state, result.restarts) == ("done", 1)


def test_a_broken_context_starts_a_new_process_with_what_was_found(tmp_path: Path) -> None:
    assert RESTART_STATUS not in (0, 1, 2)
    (result,) = supervise(tmp_path, {"items": ["broken", "b"]})
    assert outcomes(result) == {"broken": "ok", "b": "ok"}
    assert (result.state, result.restarts) == ("done", 1)


def test_a_child_that_fails_between_items_is_not_started_again(tmp_path: Path) -> None:
    (result,) = supervise(tmp_path, {"items": ["a"], "raise": True})
    assert (result.state, result.restarts) == ("failed", 0)
    assert result.detail == "exit status 3: it said nothing"


@pytest.mark.slow
def test_the_time_limit_ends_a_task_and_blames_no_item(tmp_path: Path) -> None:
    began = time.monotonic()
    (result,) = supervise(tmp_path, {"items": ["a", "hang"]}, limit_s=3.0)
    assert (result.state, outcomes(result)) == ("out of time", {"a": "ok"})
    assert time.monotonic() - began < 15


def test_past_the_deadline_nothing_is_started(tmp_path: Path) -> None:
    (result,) = supervise(tmp_path, {"items": ["a"]}, seconds=0.0)
    assert (result.state, result.lines) == ("not started", [])
