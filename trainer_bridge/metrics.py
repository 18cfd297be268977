"""Metrics of one training step, gathered over micro-batches and minibatches."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor


class StepMetrics:
    """Sums, means over tokens, extremes and plain values by name."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._means: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # sum, count
        self._max: dict[str, float] = {}
        self._min: dict[str, float] = {}

    def set(self, name: str, value: float) -> None:
        self._sums[name] = value

    def add(self, name: str, value: float) -> None:
        self._sums[name] += value

    def mean(self, name: str, value: float) -> None:
        """One value of a mean over minibatches."""
        total = self._means[name]
        total[0] += value
        total[1] += 1

    def mean_of(self, name: str, values: Tensor) -> None:
        """Values of a mean over tokens."""
        total = self._means[name]
        total[0] += float(values.sum())
        total[1] += values.numel()

    def extremes(self, name: str, values: Tensor) -> None:
        """name/mean, name/max and name/min over tokens."""
        if not values.numel():
            return
        self.mean_of(f"{name}/mean", values)
        high, low = float(values.max()), float(values.min())
        self._max[f"{name}/max"] = max(high, self._max.get(f"{name}/max", high))
        self._min[f"{name}/min"] = min(low, self._min.get(f"{name}/min", low))

    def result(self) -> dict[str, float]:
        means = {name: total / max(count, 1) for name, (total, count) in self._means.items()}
        return {**self._sums, **means, **self._max, **self._min}
