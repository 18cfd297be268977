"""The knobs of the algorithms: sections `algorithm`, `ppo` and `critic` of a `RunConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recipes.algorithms.aggregation import Aggregation
from recipes.checks import at_least, positive


@dataclass(frozen=True)
class AlgorithmConfig:
    """What is done with the rewards: a preset by name, and any part of it in exchange.

    Args:
        name: grpo (group mean and std), dr_grpo (no std, constant length normaliser), dapo (a
            higher upper clip, dynamic sampling, overlong penalty), gspo (one ratio per sequence),
            cispo (bounded weight, no clipping), sapo (smooth gate), rloo (leave-one-out baseline
            on whole sequences), reinforce_pp (no group baseline, whitened over the batch) or ppo
            (a critic; sections ppo and critic); `--algorithm NAME` for short
        advantages: grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline or your own as
            module:function, (rewards, group_index, lengths) -> one number per rollout or per token
        policy_loss: clip, gspo, cispo, sapo, reinforce or your own as module:function, with the
            signature of those in recipes/algorithms/policy_losses.py
        aggregation: token_mean, seq_mean_token_mean, seq_mean_token_sum or seq_mean_token_sum_norm
        correction: for tokens of older weights than those trained on (rollout.overlap): decoupled,
            tis, mis, sequence_rejection or your own as module:function; null to leave them to the
            ratio of the loss
        clip_low: the ratio is clipped below 1 - clip_low
        clip_high: and above 1 + clip_high
        dual_clip: for a negative advantage A the loss of clip is at most -dual_clip * A
        ratio_max: the ratio of cispo is at most this
        dynamic_sampling: replace groups whose rewards are all equal by other prompts
        max_sampling_rounds: how often, at most, one step samples for that; then it goes on with
            the groups it has
        overlong_share: the last share of max_tokens in which a completion loses reward, linearly,
            up to overlong_factor at max_tokens; 0 for none
        overlong_factor: see there
        mask_truncated: leave completions that ran into max_tokens out of the loss
        beta: of the KL penalty in the loss (k3) towards the reference policy, the policy as it was
            when the training steps began; 0 for none, then no reference policy is kept
        ref_model_sync_steps: steps after which the reference policy becomes the policy of that
            moment, again and again; 0 for never
        entropy_coefficient: times the entropy of each token's distribution, taken off the loss
    """

    name: Literal[
        "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce_pp", "ppo"
    ] = "grpo"
    advantages: str | None = None
    policy_loss: str | None = None
    aggregation: Aggregation | None = None
    correction: str | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_max: float | None = None
    dynamic_sampling: bool | None = None
    max_sampling_rounds: int = 10
    overlong_share: float | None = None
    overlong_factor: float = 1.0
    mask_truncated: bool = False
    beta: float = 0.0
    ref_model_sync_steps: int = 0
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if self.clip_low is not None and not 0 <= self.clip_low < 1:
            raise ValueError(f"algorithm.clip_low must lie in [0, 1), got {self.clip_low}")
        if self.clip_high is not None and self.clip_high < 0:
            raise ValueError(f"algorithm.clip_high must be at least 0, got {self.clip_high}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(
                f"algorithm.dual_clip must be greater than 1 or null, got {self.dual_clip}"
            )
        if self.ratio_max is not None:
            positive("algorithm.ratio_max", self.ratio_max)
        at_least("algorithm.max_sampling_rounds", self.max_sampling_rounds, 1)
        if self.overlong_share is not None and not 0 <= self.overlong_share <= 1:
            raise ValueError(
                f"algorithm.overlong_share must lie in [0, 1], got {self.overlong_share}"
            )
        at_least("algorithm.overlong_factor", self.overlong_factor, 0)
        at_least("algorithm.beta", self.beta, 0)
        at_least("algorithm.ref_model_sync_steps", self.ref_model_sync_steps, 0)
        if self.name == "ppo" and self.advantages is not None:
            raise ValueError(
                f"algorithm.advantages must be null for ppo, whose advantages come from its critic "
                f"(ppo.gamma, ppo.lam), got {self.advantages!r}"
            )
        if self.name == "ppo" and self.dynamic_sampling:
            raise ValueError(
                "algorithm.dynamic_sampling must be null or false for ppo: a group whose rewards "
                "are all equal teaches its critic, too"
            )

    @property
    def baseline(self) -> str:
        """What compares rewards: dynamic sampling, the name of an advantage, or the preset."""
        dynamic = self.name == "dapo" if self.dynamic_sampling is None else self.dynamic_sampling
        return "dynamic sampling" if dynamic else self.advantages or self.name

    @property
    def compares_groups(self) -> bool:
        """Whether only differences within a group teach, and a group needs two samples. Taken to
        be so of no function of the user's."""
        return self.baseline not in ("reinforce_pp", "ppo") and ":" not in self.baseline


@dataclass(frozen=True)
class PpoConfig:
    """What only PPO has. Read by algorithm.name ppo.

    Args:
        gamma: discount of the return, per token
        lam: lambda of generalized advantage estimation
        kl_coefficient: of the KL divergence from the reference policy (k1) that is taken off the
            reward of each token; 0 for none
        kl_target: nats per token that the coefficient is steered to, from kl_coefficient on; null
            to leave it fixed
        kl_horizon: rollouts in which a steered coefficient can change by a fifth
        value_clip: the critic's loss is clipped where a value has moved further than this within a
            step; null for no clipping
    """

    gamma: float = 1.0
    lam: float = 1.0
    kl_coefficient: float = 0.001
    kl_target: float | None = None
    kl_horizon: int = 10000
    value_clip: float | None = 0.5

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"ppo.{name} must lie in [0, 1], got {getattr(self, name)}")
        at_least("ppo.kl_coefficient", self.kl_coefficient, 0)
        at_least("ppo.kl_horizon", self.kl_horizon, 1)
        if self.value_clip is not None:
            positive("ppo.value_clip", self.value_clip)
        if self.kl_target is not None:
            positive("ppo.kl_target", self.kl_target)
            positive("ppo.kl_coefficient", self.kl_coefficient)


@dataclass(frozen=True)
class CriticConfig:
    """The critic of PPO: a value head in the trainer, which no rollout actor loads.

    Args:
        trunk: own, a second decoder that begins as a copy of the policy; or shared, the policy's
        learning_rate: of its own AdamW, constant
        weight_decay: decoupled weight decay
        max_grad_norm: its gradient is scaled down to this norm; null for no bound
        coefficient: of the value loss in the gradient of a shared trunk
        warmup_steps: of the training steps, the first so many train the critic alone
    """

    trunk: Literal["own", "shared"] = "own"
    learning_rate: float = 1e-5
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    coefficient: float = 0.1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        positive("critic.learning_rate", self.learning_rate)
        at_least("critic.weight_decay", self.weight_decay, 0)
        at_least("critic.coefficient", self.coefficient, 0)
        if self.max_grad_norm is not None:
            positive("critic.max_grad_norm", self.max_grad_norm)
        at_least("critic.warmup_steps", self.warmup_steps, 0)
