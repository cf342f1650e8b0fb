"""The fake operation of ``lab.py``, in the catalogue for the length of one test."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

LAB_FILE = Path(__file__).with_name("lab.py")


def _load():
    name = "kernelcast_test_lab"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, LAB_FILE)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def lab():
    """The module ``lab.py``, its operation registered and its clock in place."""
    module = _load()
    module.STATE.reset()
    module.install()
    yield module
    module.remove()


@pytest.fixture
def lab_folder():
    """Where processes that a test starts find ``lab.py``."""
    return LAB_FILE.parent
