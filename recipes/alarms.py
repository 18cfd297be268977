"""What a step's numbers must not look like: one line when it begins, not one per step."""

from __future__ import annotations

from collections.abc import Mapping

MOSTLY_TRUNCATED = 0.5

Metrics = Mapping[str, float]


class Alarms:
    """Remembers which alarms stand, so that each is said when it begins and again if it returns.

    on_policy: every rollout is meant to be of the very weights it trains, and engine and trainer
    to compute the same bits; then a ratio other than 1 is a fault of the program, not of the data.
    compares_groups: only differences of reward within a group teach.
    """

    def __init__(self, on_policy: bool, compares_groups: bool = True) -> None:
        self._on_policy = on_policy
        self._compares_groups = compares_groups
        self._standing: set[str] = set()

    def check(self, step: int, metrics: Metrics) -> list[str]:
        """The alarms that begin with this step, one sentence each."""
        now = dict(_off_policy(metrics)) if self._on_policy else {}
        now |= dict(_learning(metrics, self._compares_groups))
        begun = [f"ALARM, step {step}: {now[kind]}" for kind in now if kind not in self._standing]
        self._standing = set(now)
        return begun


def _off_policy(metrics: Metrics) -> list[tuple[str, str]]:
    found = []
    ratios = [
        metrics[name]
        for bound in ("min", "max")
        if (name := f"sampling/importance_sampling_ratio/{bound}") in metrics
    ]
    wrong = [ratio for ratio in ratios if ratio != 1.0]
    if wrong:
        found.append(
            ("ratio", f"the importance ratio of the first minibatch is {wrong[0]:.8g}, not 1: "
             "these tokens were not sampled under the weights they train")
        )  # fmt: skip
    difference = metrics.get("sampling/sampling_logp_difference/max", 0.0)
    if difference != 0.0:
        found.append(
            ("difference", f"engine and trainer differ by {difference:.3g} in a log-prob, not by 0")
        )
    return found


def _learning(metrics: Metrics, compares_groups: bool) -> list[tuple[str, str]]:
    found = []
    if compares_groups and metrics.get("frac_reward_zero_std") == 1.0:
        found.append(
            ("uniform", "in no group do the rewards differ (frac_reward_zero_std 1): "
             "nothing is learned from this step")
        )  # fmt: skip
    truncated = metrics.get("rollout/truncated_ratio", 0.0)
    if truncated > MOSTLY_TRUNCATED:
        found.append(
            ("truncated", f"{truncated:.0%} of the completions ran into rollout.max_tokens (or a "
             "conversation's max_turns): raise it, or see algorithm.mask_truncated and "
             "algorithm.overlong_share")
        )  # fmt: skip
    return found
