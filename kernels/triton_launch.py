"""How Triton variants launch: the compiler's options, and the architecture where a kernel depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelcast.kernels.problem import Problem


def launch_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the compiler. Fused multiply-add is asked for, as its default differs between Triton's versions."""
    stages = {"num_stages": int(config["num_stages"])} if "num_stages" in config else {}
    return {"num_warps": int(config["num_warps"]), **stages, "enable_fp_fusion": True}


def launch_architecture(problem: Problem) -> str:
    """The current GPU's architecture where the kernel depends on it (the precision of TF32), else ``""``."""
    import triton

    if not problem.allow_tf32 or triton.knobs.runtime.interpret:
        return ""
    target = triton.runtime.driver.active.get_current_target()
    return f"sm{target.arch}" if target.backend == "cuda" else str(target.arch)
