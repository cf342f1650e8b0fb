"""How hypothesis runs here: the same examples each time, and no deadline, which a busy machine would miss.

The quick set (``-m "not slow"``) tries 30% of the examples, a full run all of them, and
``pytest --hypothesis-profile=explore`` three times as many, which no run has tried before.
"""

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
