"""The fast selection API: candidates -> rank -> verify the top k -> select -> remember -> dispatch."""

from kernelcast.runtime.cache import CacheKey, CacheWarning, SelectionCache
from kernelcast.runtime.selection import SOURCES, Selection
from kernelcast.runtime.selector import ModelWarning, Ranking, Selector

__all__ = [
    "SOURCES",
    "CacheKey",
    "CacheWarning",
    "ModelWarning",
    "Ranking",
    "Selection",
    "SelectionCache",
    "Selector",
]
