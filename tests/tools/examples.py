"""How many examples hypothesis tries: as many as a test names, in the share that the profile of the run takes."""

from __future__ import annotations

from hypothesis import settings

#: What hypothesis itself tries, and so what a test's own number is relative to.
STANDARD = 100
#: Fewer would try little but the simplest values.
LEAST = 5


def examples(number: int) -> int:
    """For ``settings(max_examples=...)``: the number itself in a full run, less in the quick set, more when exploring."""
    return max(min(number, LEAST), -(-number * settings.default.max_examples // STANDARD))
