"""A fork while another thread measures: the child must be able to select all the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, threading, time, warnings
warnings.simplefilter("ignore")
import torch
import kernelcast as kc
kc.configure(cache=False, store=False, mode="verify")
torch.set_num_threads(1)
from kernelcast.datasets import timing

held = threading.Event()
def hold():
    with timing._measuring:
        held.set()
        time.sleep(30)
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    out = kc.matmul(torch.ones(8, 16), torch.ones(16, 8))
    os._exit(0 if bool((out == 16).all()) else 3)
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        os._exit(os.waitstatus_to_exitcode(status))
    time.sleep(0.05)
os.kill(child, 9)
os._exit(9)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.slow
def test_a_child_forked_while_another_thread_measures_can_select(tmp_path):
    environment = {
        **os.environ,
        "KERNELCAST_HOME": str(tmp_path),
        "KERNELCAST_DISABLE": "0",
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
