"""A test's own number of examples follows the profile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from examples import examples
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def profile():
    """Loads a profile for one test."""
    before = settings.get_current_profile_name()
    yield settings.load_profile
    settings.load_profile(before)


@pytest.mark.parametrize(
    ("name", "counts"),
    [("kernelcast", [1, 8, 40, 400]), ("quick", [1, 5, 12, 120]), ("explore", [3, 24, 120, 1200])],
)
def test_the_share_of_a_profile(profile, name, counts):
    profile(name)
    assert [examples(number) for number in (1, 8, 40, 400)] == counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "share"),
    [
        (["-m", "not slow"], 30),
        ([], 100),
        (["-m", "slow"], 100),
        (["-m", "not slow", "--hypothesis-profile=explore"], 300),
    ],
)
def test_the_quick_set_alone_has_the_quick_profile(tmp_path, options, share):
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(
        "import pytest\nfrom hypothesis import settings\nshare = settings.default.max_examples\n"
        "def test_quick(): assert not share\n"
        "@pytest.mark.slow\ndef test_slow(): assert not share\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, *options, str(tmp_path)], capture_output=True, text=True)
    assert f"assert not {share}" in done.stdout
