"""How hypothesis runs here: the same examples each time, and no deadline, which a busy machine would miss.

The quick set (``-m "not slow"``) tries 30% of the examples, a full run all of them, and
``pytest --hypothesis-profile=explore`` three times as many, which no run has tried before.
"""

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("kernelcast", deadline=None, derandomize=True)
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("explore", deadline=None, max_examples=300)
settings.load_profile("kernelcast")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the profile before any test module is imported."""
    if config.getoption("--hypothesis-profile") is None and "not slow" in config.option.markexpr:
        settings.load_profile("quick")


@pytest.fixture(scope="session", autouse=True)
def _a_busy_machine_was_warned_of() -> Iterator[None]:
    """Tests run beside one another: that a machine is busy is what tests/runtime/test_busy.py is about, and noise elsewhere."""
    from kernelcast.runtime import verify

    verify._warned.add(True)
    yield
    verify._warned.clear()
