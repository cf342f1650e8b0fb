"""Steps of the GPU check: the clock, and the run time as a program uses it."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_steps import DETAIL_CHARACTERS, device_of, require_sound
from gpu_tasks import Reporter

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kernelcast.kernels import Device

#: A twofold call may look like this many calls.
_TWOFOLD = (1.7, 2.3)
#: Equal calls may be this far apart in log latency, however small the noise.
_EQUAL_LOG = 0.01


def calibrate(spec: Mapping[str, Any], report: Reporter) -> None:
    """The clock: two equal calls must tie, and a call that does the work twice must differ."""
    import torch

    from kernelcast.datasets.timing import TimingPlan, clock_for, race

    device = device_of(spec)
    where = "cuda" if device.kind == "gpu" else "cpu"
    big, dtype = (4096, torch.float16) if where == "cuda" else (384, torch.float32)
    a = torch.randn(big, big, dtype=torch.float32).to(where, dtype)
    rows = torch.randn(8 * big, big, dtype=torch.float32).to(where, dtype)
    small = a[:64, :64].contiguous()
    works: dict[str, Callable[[], Any]] = {
        f"mm {big}": lambda: torch.mm(a, a),
        "softmax": lambda: torch.softmax(rows, -1),
        "mm 64": lambda: torch.mm(small, small),
    }
    plan = TimingPlan(rounds=30, least_rounds=30, seconds=6.0, candidate_seconds=3.0, race_margin=10.0)
    clock = clock_for(device)
    for name, work in works.items():
        report("start", item=[name])
        for _ in range(3):
            work()
        calls = [work, lambda work=work: work(), lambda work=work: (work(), work())]  # type: ignore[misc]
        result = race(calls, clock, plan)
        report("calibration", item=[name], name=name, **judge_calibration(result.samples_us))


def judge_calibration(samples_us: np.ndarray) -> dict[str, Any]:
    """What the rounds say of two equal calls and a twofold one: float64 [rounds, 3].

    Returns:
        ``equal_ratio`` and ``twofold_ratio`` (medians over rounds, of the second and the third call to the first),
        ``tie`` (the equal pair is one to :func:`kernelcast.runtime.verify.decide`, whichever is named first, or within
        1%), ``differs`` (the twofold one is no tie, and between 1.7 and 2.3 times the first), and ``rounds``.
    """
    import numpy as np

    from kernelcast.datasets.timing import RaceResult
    from kernelcast.runtime.verify import decide

    def choice(first: int, second: int) -> int | None:
        pair = RaceResult(samples_us[:, [first, second]])
        return decide(pair.paired_log(), pair.paired_error())[0]

    equal = float(np.exp(np.median(np.log(samples_us[:, 1] / samples_us[:, 0]))))
    twofold = float(np.exp(np.median(np.log(samples_us[:, 2] / samples_us[:, 0]))))
    return {
        "equal_ratio": equal,
        "twofold_ratio": twofold,
        "tie": (choice(0, 1) == 0 and choice(1, 0) == 0) or abs(math.log(equal)) <= _EQUAL_LOG,
        "differs": choice(2, 0) == 1 and _TWOFOLD[0] <= twofold <= _TWOFOLD[1],
        "rounds": len(samples_us),
    }


def runtime(spec: Mapping[str, Any], report: Reporter) -> None:
    """The run time as a program uses it: a verified selection, the drop-ins, and a CUDA graph."""
    from kernelcast.runtime.verify import BusyWarning

    device = device_of(spec)
    finished = report.finished()
    for name, attempt in _runtime_checks(device, spec["has_filelock"]).items():
        if (name,) in finished:
            continue
        report("start", item=[name])
        try:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                detail = attempt()
            told = [each.message for each in heard if "kernelcast" in type(each.message).__module__]
            # That other programs run here too is no fault of the run time.
            held = all(isinstance(each, BusyWarning) for each in told)
            detail = "; ".join([detail, *map(str, told)])
        except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
            held, detail = False, f"{type(error).__name__}: {error}"
        report("runtime", item=[name], name=name, held=held, detail=detail[:DETAIL_CHARACTERS])
        require_sound(device)


def _runtime_checks(device: Device, has_filelock: bool) -> dict[str, Callable[[], str]]:
    import torch

    import kernelcast as kc
    from kernelcast.kernels import operation, problem
    from kernelcast.kernels.detect import default_threads
    from kernelcast.runtime import Selector
    from kernelcast.runtime.dispatch import configure

    on_gpu = device.kind == "gpu"
    where, dtype = ("cuda", "float16") if on_gpu else ("cpu", "float32")
    common = {"dtype": dtype, "threads": 0 if on_gpu else default_threads()}
    configure(cache=False, store=False, mode="verify")
    calls: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Any]]] = {
        "gemm": (kc.matmul, {"m": 64, "n": 64, "k": 4096}),
        "conv2d": (
            lambda x, w: kc.conv2d(x, w, padding=1),
            {"n": 1, "c": 16, "h": 20, "w": 20, "k": 16, "r": 3, "s": 3, "pad_h": 1, "pad_w": 1},
        ),
        "attention": (kc.attention, {"batch": 2, "heads": 4, "q_len": 64, "kv_len": 64, "head_dim": 64}),
        "softmax": (kc.softmax, {"rows": 64, "columns": 1024}),
    }

    def select() -> str:
        found = Selector(device, cache=False, store=False, mode="verify").select(
            problem("gemm", **common, **calls["gemm"][1])
        )
        if found.source != "verified":
            raise AssertionError(f"the source is {found.source}: {found.reason}")
        return f"{found.candidate}, {found.speedup:.2f} times the default, of {found.measured} measured"

    def remembered() -> str:
        described = problem("gemm", **common, **calls["gemm"][1])
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"cache": Path(folder), "store": False, "mode": "verify"}
            first = Selector(device, **options).select(described)
            again = Selector(device, **options).select(described)
        if (again.source, again.candidate) != ("cached", first.candidate):
            raise AssertionError(f"the second selection is {again.candidate}, {again.source}")
        return str(again.candidate)

    def drop_in(name: str) -> str:
        call, sizes = calls[name]
        described = problem(name, **common, **sizes)
        found = operation(name)
        inputs = found.make_inputs(described, seed=1, device=where)
        before = [tensor.clone() for tensor in inputs]
        output = call(*inputs)
        wrong = found.check(described, found.reference(described, *inputs), output)
        if wrong:
            raise AssertionError(wrong)
        if not all(map(torch.equal, before, inputs)):
            raise AssertionError("the caller's tensors were changed")
        return "as the reference, and the caller's tensors unchanged"

    def captured() -> str:
        described = problem("gemm", **common, **calls["gemm"][1])
        a, b = operation("gemm").make_inputs(described, seed=2, device=where)
        kc.matmul(a, b)
        other = torch.randn(96, 4096, device=where, dtype=a.dtype)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            seen, unseen = kc.matmul(a, b), kc.matmul(other, b)
        graph.replay()
        torch.cuda.synchronize()
        for left, output in ((a, seen), (other, unseen)):
            torch.testing.assert_close(output, torch.matmul(left, b), rtol=2e-2, atol=2.0)
        return "replayed with the selected candidate, and with a shape first met in the capture"

    checks: dict[str, Callable[[], str]] = {"verified selection": select}
    if has_filelock:
        checks["remembered selection"] = remembered
    checks |= {f"drop-in {name}": lambda name=name: drop_in(name) for name in calls}  # type: ignore[misc]
    if on_gpu:
        checks["CUDA graph"] = captured
    return checks
