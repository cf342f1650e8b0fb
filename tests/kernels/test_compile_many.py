"""Many compilations at once: workers that hang, die or end, requests that share a kernel, budgets, and the cache."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest

from kernelcast.errors import KernelcastError, SettingsError, UnknownNameError
from kernelcast.kernels import Candidate, compile_many, problem
from kernelcast.kernels.compile import CompileFacts, candidate_spec, code_key
from kernelcast.kernels.compile_cache import CompileCache, CompileCacheWarning
from kernelcast.kernels.compile_many import CompileRequest

pytest.importorskip("triton")

CONFIG = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 8, "num_warps": 1, "num_stages": 2}
FACTS = CompileFacts(
    registers=40, spills=2, shared_bytes=4096, uses_tensor_cores=True, compile_seconds=0.5, outcome="ok"
)


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def request_for(m=64, variant="triton_tiled", **changes):
    described = problem("gemm", m=m, n=64, k=64, dtype="float16")
    return CompileRequest(described, Candidate.of(variant, {**CONFIG, **changes}))


def key_of(request, target="sm80"):
    return code_key(candidate_spec(request.problem, request.candidate, target), target)


def compile_all(requests, target="sm80", *, workers=1, time_limit_s=60.0, **options):
    return list(
        compile_many.compile_many(requests, target, workers=workers, time_limit_s=time_limit_s, **options)
    )


#: What stands in for the compiler: a worker whose behaviour the candidate's group_m decides.
FAKE_WORKER = """
import dataclasses, json, os, sys, time
from kernelcast.kernels.compile import CompileFacts
answers = os.fdopen(int(sys.argv[1]), "w")
def say(**message):
    answers.write(json.dumps(message) + "\\n"); answers.flush()
say(ready=True)
for line in sys.stdin:
    group = json.loads(json.loads(line)["candidate"])[1]["group_m"]
    if group == 1:
        time.sleep(600)
    if group == 4:
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(7)
    outcome = "compile_error" if group == 2 else "ok"
    say(facts=dataclasses.asdict(CompileFacts(registers=group, outcome=outcome, detail=str(os.getpid()))))
"""


@pytest.fixture
def fake_worker(monkeypatch, tmp_path):
    """Workers that run :data:`FAKE_WORKER`; the list holds every process that was started."""
    script = tmp_path / "worker.py"
    script.write_text(FAKE_WORKER)
    started = []
    real = subprocess.Popen

    def start(command, *rest, **options):
        if "kernelcast.kernels.compile_many" not in command:
            return real(command, *rest, **options)
        process = real([command[0], str(script), *command[3:]], **options)
        started.append(process)
        return process

    monkeypatch.setattr(compile_many.subprocess, "Popen", start)
    return started


# --- the key ---


def test_sizes_of_one_specialisation_share_a_key():
    key = key_of(request_for())
    assert len(key) == 32
    assert key_of(request_for(m=128)) == key
    # Split factors are arguments of the kernel.
    split = [key_of(request_for(variant="triton_split_k", split_k=count)) for count in (2, 4)]
    assert split[0] == split[1] != key


@pytest.mark.parametrize(
    "other",
    [
        request_for(m=65),  # neither a multiple of 16 nor of the block
        request_for(m=1),
        request_for(block_m=32),
        request_for(num_warps=2),
        request_for(num_stages=3),
        request_for(group_m=4),
        CompileRequest(
            problem("gemm", m=64, n=64, k=64, dtype="bfloat16"), Candidate.of("triton_tiled", CONFIG)
        ),
        CompileRequest(
            problem("gemm", m=64, n=64, k=64, dtype="float16", layout="nt"),
            Candidate.of("triton_tiled", CONFIG),
        ),
    ],
    ids=["ragged", "one", "block", "warps", "stages", "group", "dtype", "layout"],
)
def test_what_decides_the_code_is_in_the_key(other):
    assert key_of(other) != key_of(request_for())


def test_the_target_the_source_the_compiler_and_its_environment_are_in_the_key(monkeypatch):
    from kernelcast.kernels import compile as compiling

    spec = candidate_spec(request_for().problem, request_for().candidate, "sm80")
    keys = [code_key(spec, target) for target in ("sm80", "sm90", "gfx942")]

    class Edited:
        arg_names = spec.kernel.arg_names
        cache_key = "another source"

    keys.append(code_key(dataclasses.replace(spec, kernel=Edited()), "sm80"))
    keys.append(code_key(dataclasses.replace(spec, constants={**spec.constants, "EVEN_M": 1}), "sm80"))
    monkeypatch.setattr(compiling, "compiler_key", lambda target: "another version")
    keys.append(code_key(spec, "sm80"))
    assert len(set(keys)) == len(keys)


# --- workers ---


def outcomes(found):
    return {request.candidate.parameters["group_m"]: facts.outcome for request, facts in found}


def test_a_worker_that_dies_is_replaced_and_its_candidate_is_tried_again_next_time(fake_worker, tmp_path):
    requests = [request_for(group_m=group) for group in (8, 4, 16)]
    found = compile_all(requests, cache=CompileCache(tmp_path / "cache"))
    assert outcomes(found) == {8: "ok", 4: "crash", 16: "ok"}
    by_group = {request.candidate.parameters["group_m"]: facts for request, facts in found}
    assert by_group[4].detail == "exit status 7: out of memory"
    assert (by_group[8].registers, by_group[16].registers) == (8, 16)
    assert by_group[8].detail != by_group[16].detail  # another process
    assert len(fake_worker) == 2
    assert all(process.poll() is not None for process in fake_worker)

    again = compile_all(requests, cache=CompileCache(tmp_path / "cache"))
    assert outcomes(again) == outcomes(found)
    assert len(fake_worker) == 3


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced_and_its_candidate_is_tried_again_by_who_waits_longer(
    fake_worker, tmp_path
):
    requests = [request_for(group_m=group) for group in (8, 1, 16)]
    found = compile_all(requests, time_limit_s=5, cache=CompileCache(tmp_path / "cache"))
    assert outcomes(found) == {8: "ok", 1: "timeout", 16: "ok"}
    assert {facts.detail for _, facts in found if facts.outcome == "timeout"} == {"over 5 s"}
    assert len(fake_worker) == 2
    assert all(process.poll() is not None for process in fake_worker)

    again = compile_all(requests, time_limit_s=4, cache=CompileCache(tmp_path / "cache"))
    assert (outcomes(again), len(fake_worker)) == (outcomes(found), 2)
    assert CompileCache(tmp_path / "cache").get("sm80", key_of(requests[1]), 6.0) is None


def test_requests_of_one_kernel_are_compiled_once(fake_worker):
    requests = [request_for(m=size, group_m=8) for size in (64, 128, 192)] + [request_for(m=1, group_m=8)]
    found = compile_all(requests, workers=2)
    assert len(found) == 4
    details = [facts.detail for request, facts in found if request.problem["m"] > 1]
    assert len(set(details)) == 1
    assert len(fake_worker) <= 2


def test_ending_the_iteration_ends_the_workers(fake_worker):
    answers = compile_many.compile_many(
        iter([request_for(group_m=8), *(request_for(m=m, group_m=1) for m in (1, 2, 64))]),
        "sm80",
        workers=3,
        time_limit_s=600,
    )
    next(answers)
    assert any(process.poll() is None for process in fake_worker)
    answers.close()
    assert all(process.poll() is not None for process in fake_worker)


def test_after_the_budget_only_known_facts_are_given(fake_worker, tmp_path):
    cache = CompileCache(tmp_path)
    cache.put("sm80", key_of(request_for()), FACTS)
    requests = [request_for(m=1), request_for(), request_for(group_m=16)]
    found = compile_all(requests, cache=cache, budget_s=1e-9)
    assert found == [(request_for(), FACTS)]
    assert fake_worker == []


def test_a_worker_that_cannot_start_is_an_error_with_its_reason(fake_worker, tmp_path):
    (tmp_path / "worker.py").write_text("raise SystemExit('no such compiler')")
    with pytest.raises(KernelcastError, match="cannot start: exit status 1: no such compiler"):
        compile_all([request_for()])
    assert all(process.poll() is not None for process in fake_worker)


def test_a_variant_that_cannot_describe_its_kernel_is_an_outcome(fake_worker, monkeypatch):
    from kernelcast.kernels import variant

    def broken(self, problem, config, architecture=""):
        raise ValueError("no kernel for this")

    monkeypatch.setattr(type(variant("gemm", "triton_tiled")), "compile_spec", broken)
    ((_, facts),) = compile_all([request_for()])
    assert (facts.outcome, facts.detail) == ("compile_error", "compile_spec: ValueError: no kernel for this")


def test_a_compiler_that_is_not_there_is_no_outcome_of_a_candidate(fake_worker, monkeypatch):
    def missing(target):
        raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(compile_many, "compiler_key", missing)
    with pytest.raises(KernelcastError, match=r"cannot compile for sm80 \(RuntimeError: Cannot find ptxas\)"):
        compile_many.compile_many([request_for()], "sm80", workers=1, time_limit_s=60)


def test_errors_of_the_compiler_are_tried_again(fake_worker, tmp_path):
    cache = CompileCache(tmp_path / "cache")
    ((_, facts),) = compile_all([request_for(group_m=2)], cache=cache)
    assert facts.outcome == "compile_error"
    assert CompileCache(tmp_path / "cache").get("sm80", key_of(request_for(group_m=2))) is None


def test_bad_input_is_refused_before_the_first_answer(monkeypatch):
    for options in (
        {"workers": 0},
        {"time_limit_s": 0.0},
        {"budget_s": -1.0},
        {"time_limit_s": float("nan")},
    ):
        with pytest.raises(SettingsError, match=next(iter(options))):
            compile_many.compile_many([], "sm80", **{"workers": 1, "time_limit_s": 1.0, **options})
    with pytest.raises(UnknownNameError, match="sm80"):
        compile_many.compile_many([], "sm81", workers=1, time_limit_s=1)
    with pytest.raises(KernelcastError, match="no Triton kernel"):
        compile_all([CompileRequest(request_for().problem, Candidate("vendor"))])
    monkeypatch.setenv("TRITON_INTERPRET", "true")
    with pytest.raises(KernelcastError, match="TRITON_INTERPRET=true"):
        compile_many.compile_many([], "sm80", workers=1, time_limit_s=1)


def test_numbers_of_the_time_limit_that_are_not_numbers_are_refused():
    with pytest.raises(SettingsError, match="time_limit_s is inf"):
        compile_many.compile_many([], "sm80", workers=1, time_limit_s=float("inf"))


# --- the cache ---


def test_facts_survive_on_disk_by_target(tmp_path):
    failed = CompileFacts(outcome="compile_error", detail="no 12 [rows]\n", compile_seconds=1.0)
    cache = CompileCache(tmp_path / "a" / "b")
    cache.put("sm80", "one", FACTS)
    cache.put("sm90", "one", failed)
    for reader in (cache, CompileCache(tmp_path / "a" / "b")):
        assert reader.get("sm80", "one") == FACTS
        assert reader.get("sm90", "one") == failed
        assert reader.get("sm80", "two") is None
        assert (reader.count("sm80"), reader.count("gfx942")) == (1, 0)


def test_the_newest_facts_count(tmp_path):
    CompileCache(tmp_path).put("sm80", "one", CompileFacts(outcome="timeout"), 5.0)
    CompileCache(tmp_path).put("sm80", "one", FACTS, 60.0)
    assert CompileCache(tmp_path).get("sm80", "one", 1e9) == FACTS


@pytest.mark.parametrize("cut", [9, 25, 80])
def test_a_line_that_a_killed_writer_left_harms_no_other(tmp_path, cut):
    CompileCache(tmp_path).put("sm80", "one", FACTS)
    path = tmp_path / "sm80.jsonl"
    path.write_bytes(path.read_bytes().strip()[:cut])
    CompileCache(tmp_path).put("sm80", "two", FACTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = CompileCache(tmp_path)
        assert read.get("sm80", "one") is None
        assert read.get("sm80", "two") == FACTS


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe rubbish",
        b"[1, 2]",
        b'{"key": 5}',
        json.dumps(
            {"key": "one", "time_limit_s": 0, **dataclasses.asdict(FACTS), "registers": "many"}
        ).encode(),
        json.dumps(
            {"key": "one", "time_limit_s": 0, **dataclasses.asdict(FACTS), "outcome": "magic"}
        ).encode(),
        json.dumps({"key": "one", "time_limit_s": 0, **dataclasses.asdict(FACTS), "more": 1}).encode(),
    ],
)
def test_a_corrupt_line_is_a_warning(tmp_path, line):
    CompileCache(tmp_path).put("sm80", "two", FACTS)
    with (tmp_path / "sm80.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.warns(CompileCacheWarning, match=r"sm80\.jsonl holds 1 .*compiled again"):
        assert CompileCache(tmp_path).get("sm80", "two") == FACTS


def test_a_cache_that_cannot_be_read_or_written_costs_compiles_and_no_more(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    cache = CompileCache(tmp_path / "file")
    with pytest.warns(CompileCacheWarning, match="cannot be read"):
        assert cache.get("sm80", "one") is None
    with pytest.warns(CompileCacheWarning, match="cannot be written"):
        cache.put("sm80", "one", FACTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        cache.put("sm80", "two", FACTS)
        assert cache.get("sm80", "two") == FACTS


def test_writers_at_once_lose_nothing(tmp_path):
    def write(writer):
        cache = CompileCache(tmp_path)
        for number in range(50):
            cache.put("sm80", f"{writer}-{number}", FACTS)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert CompileCache(tmp_path).count("sm80") == 200


# --- the compiler itself ---


@pytest.mark.slow
def test_real_compiles_agree_with_one_at_a_time_and_are_remembered(tmp_path, monkeypatch):
    from kernelcast.kernels.compile import compile_facts

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    requests = [request_for(), request_for(block_m=12), request_for(m=128)]
    found = dict(compile_all(requests, workers=2, cache=CompileCache(tmp_path)))
    alone = compile_facts(requests[0].problem, requests[0].candidate, "sm80")
    assert dataclasses.replace(found[requests[0]], compile_seconds=0.0) == dataclasses.replace(
        alone, compile_seconds=0.0
    )
    assert found[requests[1]].outcome == "compile_error"
    assert found[requests[2]] == found[requests[0]]
    monkeypatch.setattr(compile_many, "_Worker", None)  # nothing is started any more
    known = [requests[0], requests[2]]
    assert dict(compile_all(known, cache=CompileCache(tmp_path))) == {each: found[each] for each in known}


@pytest.mark.slow
def test_an_interrupt_ends_every_process(tmp_path):
    """Ctrl-C at the parent alone: the workers live in sessions of their own."""
    script = tmp_path / "run.py"
    script.write_text(
        # Where this process was started to ignore interrupts, so would its children.
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from kernelcast.kernels import Candidate, problem\n"
        "from kernelcast.kernels import compile_many as many\n"
        "start = many.subprocess.Popen\n"
        "def announced(command, *a, **k):\n"
        "    process = start(command, *a, **k)\n"
        "    if many.__name__ in command:\n"  # not the other programs that are asked for their version
        "        print(process.pid, flush=True)\n"
        "    return process\n"
        "many.subprocess.Popen = announced\n"
        f"config = {CONFIG!r}\n"
        "requests = [many.CompileRequest(problem('gemm', m=m, n=4096, k=4096, dtype='float32'),\n"
        "    Candidate.of('triton_tiled', {**config, 'block_m': 256, 'block_n': 256})) for m in (1, 3, 16, 64)]\n"
        "list(many.compile_many(requests, 'sm80', workers=1, time_limit_s=600))\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        worker = int(parent.stdout.readline())
        os.kill(worker, 0)
        parent.send_signal(signal.SIGINT)
        _, errors = parent.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    for _ in range(100):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("the worker lives on")
