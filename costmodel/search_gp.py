"""A Gaussian process over the coordinates of candidates: what a search knows after a few dozen measurements.

The covariance of two candidates is ``amplitude * (1 + sqrt(3) r) * exp(-sqrt(3) r)`` (Matérn, smoothness 3/2), with
``r**2 = sum(weight[d] * (x[d] - y[d])**2)``: latencies change with a parameter by steps and not smoothly. The weights, the
amplitude and the noise are those of the largest posterior density, under log-normal priors: with fewer measurements
than weights the likelihood alone would be sure of what it cannot know. Formulas: Rasmussen and Williams, Gaussian
Processes for Machine Learning (2006), chapters 2 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_SQRT3 = np.sqrt(3.0)
#: Added to the diagonal, so that equal candidates do no harm.
_JITTER = 1e-8
#: Logarithms of weights, amplitude and noise are kept within.
_LEAST_LOG, _MOST_LOG = -12.0, 8.0
#: Resilient backpropagation: first, least and largest step, and what a step is multiplied by when the slope keeps or
#: changes its sign. Riedmiller and Braun (1993).
_STEP, _LEAST_STEP, _MOST_STEP, _LONGER, _SHORTER = 0.2, 1e-3, 1.0, 1.3, 0.5


@dataclass(frozen=True, eq=False)
class Scales:
    """What shapes a process, or the centre of the prior over that.

    Attributes:
        log_weights: of the axes, float64 [axes].
        log_amplitude: of the variance of a value.
        log_noise: of the variance of a measurement's error.
    """

    log_weights: np.ndarray
    log_amplitude: float = 0.0
    log_noise: float = float(np.log(1e-3))

    @classmethod
    def even(cls, axes: int, *, log_amplitude: float = 0.0) -> Scales:
        """All axes alike: two candidates that are one standard deviation apart on each have r = 1."""
        return cls(np.full(axes, -np.log(max(axes, 1))), log_amplitude)

    def vector(self) -> np.ndarray:
        """All of them: [axes + 2]."""
        return np.append(self.log_weights, [self.log_amplitude, self.log_noise])


@dataclass(frozen=True)
class Doubt:
    """Standard deviations of the log-normal priors over :class:`Scales`."""

    weights: float = 1.0
    amplitude: float = 1.0
    noise: float = 1.0

    def vector(self, axes: int) -> np.ndarray:
        """One a scale: [axes + 2]."""
        return np.append(np.full(axes, self.weights), [self.amplitude, self.noise])


class Posterior:
    """What a process says of many candidates.

    Attributes:
        mean: of each, float64.
        variance: of each, float64; smaller after :meth:`expect`.
    """

    def __init__(self, process: GaussianProcess, at: np.ndarray) -> None:
        self._process, self._at = process, at
        covariance = process.covariance(at, process.at)
        self.mean = process.mean + covariance @ process.pull
        self._known = covariance @ process.whitener.T
        self.variance = np.maximum(process.amplitude - (self._known**2).sum(axis=1), 1e-10)
        self._expected: list[np.ndarray] = []

    def expect(self, row: int) -> None:
        """Count on a measurement of one candidate that will give its mean: its neighbours are surer then."""
        covariance = self._process.covariance(self._at, self._at[row : row + 1])[:, 0]
        covariance -= self._known @ self._known[row]
        for each in self._expected:
            covariance -= each * each[row]
        self._expected.append(covariance / np.sqrt(self.variance[row] + self._process.noise))
        self.variance = np.maximum(self.variance - self._expected[-1] ** 2, 1e-10)


class GaussianProcess:
    """A process that has seen some measurements.

    Args:
        at: coordinates of what was measured, float64 [measured, axes].
        values: what was found, float64 [measured], with a standard deviation of about 1 before.
        centre: of the priors.
        doubt: widths of the priors.
        start: where the fit begins; at the centre where None.
        steps: of the fit.
    """

    def __init__(
        self,
        at: np.ndarray,
        values: np.ndarray,
        centre: Scales,
        doubt: Doubt,
        *,
        start: Scales | None = None,
        steps: int = 30,
    ) -> None:
        self.at = at
        self._values = values
        self._centre, self._doubt = centre.vector(), doubt.vector(at.shape[1])
        if not self._solve(self._fitted((start or centre).vector(), steps)):
            self._solve(self._centre)

    @property
    def scales(self) -> Scales:
        """As fitted."""
        return Scales(self._scales[:-2], float(self._scales[-2]), float(self._scales[-1]))

    def covariance(self, at: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Between two sets of candidates: [candidates, others]."""
        return self.amplitude * _matern(_squares(at, others, np.exp(self._scales[:-2])))[0]

    def predict(self, at: np.ndarray) -> Posterior:
        """What is known of candidates at some coordinates."""
        return Posterior(self, at)

    def _fitted(self, scales: np.ndarray, steps: int) -> np.ndarray:
        """The scales of least negative log posterior density, by resilient backpropagation."""
        best, least = scales, np.inf
        step, before = np.full(len(scales), _STEP), np.zeros(len(scales))
        for _ in range(steps):
            value, slope = self._density(scales)
            if not np.isfinite(value):
                scales, step, before = best.copy(), step * _SHORTER, np.zeros(len(scales))
                continue
            if value < least:
                best, least = scales.copy(), value
            turned = np.sign(slope * before)
            step = np.clip(
                step * np.where(turned > 0, _LONGER, np.where(turned < 0, _SHORTER, 1.0)),
                _LEAST_STEP,
                _MOST_STEP,
            )
            before = np.where(turned < 0, 0.0, slope)
            scales = np.clip(scales - np.sign(before) * step, _LEAST_LOG, _MOST_LOG)
        return best

    def _solve(self, scales: np.ndarray) -> bool:
        """Condition on the measurements. Returns whether the matrix could be factored."""
        self._scales = scales
        self.amplitude, self.noise = float(np.exp(scales[-2])), float(np.exp(scales[-1]))
        self._shape, self._shape_slope = _matern(_squares(self.at, self.at, np.exp(scales[:-2])))
        matrix = self.amplitude * self._shape
        matrix[np.diag_indices(len(matrix))] += self.noise + _JITTER
        try:
            factor = np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:
            return False
        self.whitener = np.linalg.inv(factor)
        self._inverse = self.whitener.T @ self.whitener
        weights = self._inverse.sum(axis=0)
        self.mean = float(weights @ self._values / weights.sum())
        self.pull = self._inverse @ (self._values - self.mean)
        self._half_log_determinant = float(np.log(np.diag(factor)).sum())
        return True

    def _density(self, scales: np.ndarray) -> tuple[float, np.ndarray]:
        """(negative log posterior density up to a constant, its gradient)."""
        if not self._solve(scales):
            return np.inf, np.zeros(len(scales))
        off = (scales - self._centre) / self._doubt
        value = 0.5 * float((self._values - self.mean) @ self.pull) + self._half_log_determinant
        value += 0.5 * float(off @ off)
        slope = off / self._doubt
        # Twice the derivative by the matrix; each scale's own derivative of the matrix is multiplied in below.
        outer = self._inverse - np.outer(self.pull, self.pull)
        by_square = outer * (self.amplitude * self._shape_slope)
        rows = by_square.sum(axis=1)
        per_axis = (self.at**2 * rows[:, None]).sum(axis=0) - (self.at * (by_square @ self.at)).sum(axis=0)
        slope[:-2] += np.exp(scales[:-2]) * per_axis
        slope[-2] += 0.5 * float((outer * self._shape).sum()) * self.amplitude
        slope[-1] += 0.5 * float(np.trace(outer)) * self.noise
        return value, slope


def _squares(at: np.ndarray, others: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted squared distances: [candidates, others]."""
    left, right = at * np.sqrt(weights), others * np.sqrt(weights)
    found = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None] - 2.0 * (left @ right.T)
    return np.maximum(found, 0.0)


def _matern(squares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the correlation at some squared distances, its derivative by the squared distance)."""
    scaled = _SQRT3 * np.sqrt(squares)
    fall = np.exp(-scaled)
    return (1.0 + scaled) * fall, -1.5 * fall
