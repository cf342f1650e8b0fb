"""The recipe: which hyperparameters a dataset of some size is fitted with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernelcast.errors import ModelError

#: Below this many problems the trees are fewer and shallower.
SMALL_DATASET = 100

_SMALL = {
    "n_estimators": 200,
    "max_depth": 4,
    "learning_rate": 0.1,
    "min_child_weight": 0.2,
    "colsample_bytree": 1.0,
}


def hyperparameters(
    problems: int, changes: Mapping[str, Any] | None = None, *, seed: int = 0
) -> dict[str, Any]:
    """All parameters of the estimator for a dataset of some size.

    From :data:`SMALL_DATASET` problems on, the defaults of :class:`kernelcast.costmodel.CostModel`. Below, the shapes
    are too few to support deep interactions: trees of depth 4 that learn slowly; single candidates may have leaves of their own, and
    every tree sees every feature, of which few tell anything yet.

    Args:
        problems: number of problems in the dataset.
        changes: parameters that the caller sets, whatever the size.
        seed: the estimator's ``random_state``.

    Raises:
        ModelError: a parameter that the estimator does not have, or a value that it cannot be. ``random_state`` must be a
            whole number: what is fitted by a recipe can be repeated.
    """
    from kernelcast.costmodel.estimator import CostModel, check_parameters

    defaults = CostModel().get_params()
    unknown = sorted(set(changes or {}) - set(defaults))
    if unknown:
        raise ModelError(
            f"The cost model has no parameter {', '.join(unknown)}. It has: {', '.join(defaults)}."
        )
    by_size = _SMALL if problems < SMALL_DATASET else {}
    given = {**defaults, **by_size, "random_state": seed, **(changes or {})}
    # Python's own numbers: numpy's are no JSON, which a model's manifest is.
    found = {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}
    check_parameters(found)
    if not isinstance(found["random_state"], int):
        raise ModelError(
            f"random_state is {found['random_state']!r}; give a whole number, so that the training can be repeated."
        )
    return found
