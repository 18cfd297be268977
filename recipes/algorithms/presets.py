"""Algorithms by one name: each is a row of `PRESETS`, and each part of a row may be exchanged.

    rewards --advantages--> [N] or [T] --policy_loss, correction--> [T] --aggregation--> one number

`advantages` runs in the recipe (those of PPO come from its critic); `Preset.algorithm()` is what
travels to the trainer by pickle, so losses and corrections are module-level functions or
`functools.partial` of them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from recipes.algorithms.advantages import (
    AdvantageFunction,
    dr_grpo_advantages,
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
)
from recipes.algorithms.aggregation import token_weights
from recipes.algorithms.kl import kl_penalty
from recipes.algorithms.policy_losses import TokenLoss, cispo, clip, gspo, sapo
from recipes.algorithms.policy_losses import sft as sft_loss
from recipes.algorithms.value_losses import clipped_value_loss
from trainer_bridge.algorithm import Algorithm, Correction, ValueLoss


@dataclass(frozen=True, slots=True)
class Preset:
    """One algorithm, whole. `dataclasses.replace` changes a part.

    advantages: None where the recipe has its own, from a critic. aggregation: a mode of
    `token_weights`. dynamic_sampling: groups whose rewards are all equal are replaced by others.
    overlong_share: the last share of the longest completion in which `overlong_penalty` takes
    hold; 0 for no such penalty. beta: of `kl_penalty` in the loss; 0 for no reference policy.
    value_loss: the critic's; None for no critic. recipe: the module that takes its steps.
    """

    name: str
    advantages: AdvantageFunction | None
    policy_loss: Callable[..., TokenLoss]
    aggregation: str
    correction: Correction | None = None
    dynamic_sampling: bool = False
    overlong_share: float = 0.0
    beta: float = 0.0
    entropy_coefficient: float = 0.0
    value_loss: ValueLoss | None = None
    recipe: str = "recipes.grpo"

    def with_loss_options(self, **options: float) -> Preset:
        """The same with keyword options of its loss. ValueError for one that the loss has not."""
        known = _keywords(self.policy_loss)
        for name in options:
            if name not in known:
                raise ValueError(
                    f"the policy loss of {self.name} has no option {name}; "
                    f"it has {', '.join(known) or 'none'}"
                )
        if not options:
            return self
        return dataclasses.replace(self, policy_loss=partial(self.policy_loss, **options))

    def algorithm(self, max_completion_length: int = 512) -> Algorithm:
        """The trainer's part. max_completion_length: the run's `max_tokens`, which only
        `seq_mean_token_sum_norm` reads."""
        weights = partial(
            token_weights, mode=self.aggregation, max_completion_length=max_completion_length
        )
        penalty = partial(kl_penalty, coefficient=self.beta) if self.beta else None
        return Algorithm(
            self.name,
            self.policy_loss,
            weights,
            self.correction,
            penalty,
            self.entropy_coefficient,
            self.value_loss,
        )


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        # Shao et al. 2024, arXiv:2402.03300; `seq_mean_token_mean` is the paper's own aggregation.
        Preset("grpo", grpo_advantages, clip, "token_mean"),
        # Liu et al. 2025, arXiv:2503.20783: neither std nor length in a denominator.
        Preset("dr_grpo", dr_grpo_advantages, clip, "seq_mean_token_sum_norm"),
        # Yu et al. 2025, arXiv:2503.14476; buffer 4,096 of 20,480 tokens.
        Preset(
            "dapo",
            grpo_advantages,
            partial(clip, clip_low=0.2, clip_high=0.28),
            "token_mean",
            dynamic_sampling=True,
            overlong_share=0.2,
        ),
        # Zheng et al. 2025, arXiv:2507.18071.
        Preset("gspo", grpo_advantages, gspo, "seq_mean_token_mean"),
        # MiniMax 2025, arXiv:2506.13585.
        Preset("cispo", grpo_advantages, cispo, "token_mean"),
        # Gao et al. 2025, arXiv:2511.20347.
        Preset("sapo", grpo_advantages, sapo, "seq_mean_token_mean"),
        # Ahmadian et al. 2024, arXiv:2402.14740: the gradient of the sequence's log-prob. The ratio
        # is exactly 1 on-policy; it keeps several optimizer steps per batch sound.
        Preset("rloo", rloo_advantages, clip, "seq_mean_token_sum"),
        # Hu et al. 2025, arXiv:2501.03262.
        Preset("reinforce_pp", reinforce_pp_advantages, clip, "token_mean"),
        # Schulman et al. 2017, arXiv:1707.06347, with the dual clip of arXiv:1912.09729.
        Preset(
            "ppo",
            None,
            partial(clip, dual_clip=3.0),
            "token_mean",
            value_loss=clipped_value_loss,
            recipe="recipes.ppo",
        ),
    )
}

SFT = Algorithm("sft", sft_loss, partial(token_weights, mode="token_mean"))
"""Maximum likelihood of demonstrations, every token alike."""


def algorithm(name: str) -> Algorithm:
    """The trainer's part of a preset, or `sft`. ValueError naming the presets for another name."""
    if name == SFT.name:
        return SFT
    if name not in PRESETS:
        raise ValueError(f"algorithm must be one of {', '.join(PRESETS)} or sft, got {name!r}")
    return PRESETS[name].algorithm()


def _keywords(function: Callable[..., object]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
