"""Algorithms by one name: a policy loss and the weight of its tokens.

A preset says what the *trainer* does with advantages; the advantage of the same name is in
`advantages.ADVANTAGES`. Presets hold module-level functions only, so they travel to the trainer
actor by pickle.
"""

from __future__ import annotations

from functools import partial

from recipes.algorithms.aggregation import Aggregation, token_weights
from recipes.algorithms.policy_losses import clip
from recipes.algorithms.policy_losses import sft as sft_loss
from trainer_bridge.algorithm import Algorithm


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: Aggregation = "token_mean",
) -> Algorithm:
    """Clipped surrogate over group-relative advantages. Shao et al. 2024, arXiv:2402.03300.

    Every token weighs alike, the default here; `seq_mean_token_mean` is the paper's own form.
    """
    loss = partial(clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return Algorithm("grpo", loss, partial(token_weights, mode=aggregation))


def dr_grpo(
    *,
    max_completion_length: int = 512,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Algorithm:
    """GRPO without its two biases: no std in the advantage, a constant length normaliser.

    `max_completion_length` is the run's `max_tokens`. Liu et al. 2025, arXiv:2503.20783.
    """
    loss = partial(clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    weights = partial(
        token_weights,
        mode="seq_mean_token_sum_norm",
        max_completion_length=max_completion_length,
    )
    return Algorithm("dr_grpo", loss, weights)


def rloo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Algorithm:
    """Leave-one-out advantages on whole sequences. Ahmadian et al. 2024, arXiv:2402.14740.

    The gradient on-policy is that of -A logprob(sequence), as in the paper: the clipped ratio is
    exactly 1 there. The ratio is kept so that several optimizer steps per batch stay sound.
    """
    loss = partial(clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return Algorithm("rloo", loss, partial(token_weights, mode="seq_mean_token_sum"))


def sft() -> Algorithm:
    """Maximum likelihood of demonstrations, every token alike."""
    return Algorithm("sft", sft_loss, partial(token_weights, mode="token_mean"))


def named(
    name: str,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    max_completion_length: int,
) -> Algorithm:
    """The reinforcement-learning preset a configuration names. ValueError for another name."""
    if name == "grpo":
        return grpo(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    if name == "rloo":
        return rloo(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    if name == "dr_grpo":
        return dr_grpo(
            max_completion_length=max_completion_length,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
        )
    raise ValueError(f"algorithm must be grpo, dr_grpo or rloo, got {name!r}")
