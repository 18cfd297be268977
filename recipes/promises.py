"""What the engine promises, held against what this run measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollout.exactness import Exactness, alike
from trainer_bridge import WeightsEcho

Record = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PromiseCheck:
    """One row of the report. `holds` is None where the run did not measure it."""

    promise: str
    measured: str
    expected: str
    holds: bool | None


def check_promises(history: Sequence[Record], overlap: bool = False) -> list[PromiseCheck]:
    """The rows, from the records of the run's training steps. Nothing is assumed: a promise whose
    metric is absent from every record is reported as not measured.

    overlap: rollouts are meant to be one step behind; then nothing is promised of the ratio, and
    the policy that is trained is compared with the one before it.
    """
    on_policy = [] if overlap else _on_policy(history)
    return [
        *on_policy,
        _behind(history, overlap),
        _versions_rise(history, overlap),
        _one_version_per_rollout(history),
    ]


def _on_policy(history: Sequence[Record]) -> list[PromiseCheck]:
    return [
        _exact(
            "ratio of the first minibatch: largest distance from 1",
            history,
            (
                "sampling/importance_sampling_ratio/max",
                "sampling/importance_sampling_ratio/min",
            ),
            ideal=1.0,
            show=lambda value: f"{value:.3g}",
        ),
        _exact(
            "engine log-prob against trainer log-prob: largest difference",
            history,
            ("sampling/sampling_logp_difference/max",),
            ideal=0.0,
            show=lambda value: f"{value:.3g}",
        ),
    ]


def _behind(history: Sequence[Record], overlap: bool) -> PromiseCheck:
    """Updates between the sampling of a token and the step that trains on it."""
    promise = "publications between a rollout and its own step (most)"
    seen = [r["rollout/versions_behind"] for r in history if "rollout/versions_behind" in r]
    expected = "one step's (overlap)" if overlap else "0"
    if not seen:
        return PromiseCheck(promise, "not measured", expected, None)
    versions = [r["rollout/policy_version"] for r in history if "rollout/policy_version" in r]
    per_step = max((later - earlier for earlier, later in pairwise(versions)), default=0.0)
    return PromiseCheck(
        promise, f"{max(seen):.0f}", expected, max(seen) <= (per_step if overlap else 0)
    )


def check_weights(weights: Mapping[str, WeightsEcho], nodes: int = 1) -> PromiseCheck:
    """The row of what every process says it reads, at the end of the run.

    nodes: machines the processes are on; the weights are to be on each of them once.
    """
    each = "" if nodes == 1 else " on each node"
    promise = f"one copy of the weights{each}, read by every process at the last version"
    expected = _copies(nodes)
    if not weights:
        return PromiseCheck(promise, "not measured", expected, None)
    copies = len({echo.memory for echo in weights.values()})
    seen = {(echo.version, echo.checksum) for echo in weights.values()}
    measured = (
        f"{_copies(copies)} in {len(weights)} processes, version "
        f"{' and '.join(str(version) for version in sorted({v for v, _ in seen}))}, "
        f"{len({checksum for _, checksum in seen})} checksum"
    )
    return PromiseCheck(promise, measured, expected, copies == nodes and len(seen) == 1)


def _copies(count: int) -> str:
    return "1 copy" if count == 1 else f"{count} copies"


def check_exactness(exactness: Mapping[str, Exactness]) -> PromiseCheck:
    """The row of the start-up probes, of all processes together."""
    promise = "start-up probe: engine and trainer compute the same bits"
    probes = [e.probe for e in exactness.values() if e.probe is not None]
    off = sorted({e.reason for e in exactness.values() if not e.on})
    if off or not probes:
        why = f"not promised: {'; '.join(off)}" if off else "not measured"
        return PromiseCheck(promise, why, "0 differ", None)
    failed = [f"{name}: {e.probe.reason}" for name, e in exactness.items()
              if e.probe is not None and not e.probe.held]  # fmt: skip
    if len(alike(exactness)) > 1:
        failed.append("the processes do not see the same bits")
    if failed:
        return PromiseCheck(promise, "; ".join(failed), "0 differ", False)
    numbers = sum(probe.comparisons for probe in probes)
    measured = (
        f"0 of {numbers:,} numbers differ in {len(probes)} processes "
        f"(at most {max(probe.seconds for probe in probes):.2f} s)"
    )
    return PromiseCheck(promise, measured, "0 differ", True)


def _exact(
    promise: str,
    history: Sequence[Record],
    names: Sequence[str],
    *,
    ideal: float,
    show: Callable[[float], str],
) -> PromiseCheck:
    """Largest distance of the named metrics from their ideal, which must be exactly 0."""
    seen = [abs(record[name] - ideal) for name in names for record in history if name in record]
    if not seen:
        return PromiseCheck(promise, "not measured", "0", None)
    worst = math.inf if any(math.isnan(value) for value in seen) else max(seen)
    return PromiseCheck(promise, show(worst), "0", worst == 0)


def _versions_rise(history: Sequence[Record], overlap: bool) -> PromiseCheck:
    """A step whose predecessor published (with overlap, the one before that) has newer rollouts.
    One that trained the critic alone published nothing."""
    promise = "policy version of the rollouts, step by step"
    steps = [r for r in history if "rollout/policy_version" in r]
    versions = [int(r["rollout/policy_version"]) for r in steps]
    if not versions:
        return PromiseCheck(promise, "not measured", "rises with every update", None)
    published = ["publication/update_s" in record for record in steps]
    pairs = list(pairwise(versions))[overlap:]
    rises = all(
        later > earlier or not update
        for (earlier, later), update in zip(pairs, published, strict=False)
    )
    measured = f"{versions[0]} to {versions[-1]} over {len(versions)} steps"
    return PromiseCheck(promise, measured, "rises with every update", rises)


def _one_version_per_rollout(history: Sequence[Record]) -> PromiseCheck:
    promise = "policy versions within one rollout (most)"
    spans = [r["rollout/version_spans_max"] for r in history if "rollout/version_spans_max" in r]
    if not spans:
        return PromiseCheck(promise, "not measured", "1", None)
    return PromiseCheck(promise, f"{max(spans):.0f}", "1", max(spans) <= 1)
