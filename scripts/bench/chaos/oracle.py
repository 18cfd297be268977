"""What is true: the weights of every version, and the log-prob of every token under them.

The weights of version v are a pure function of (seed, v). Nothing has to be remembered or sent to
know, for any token that claims a version, which log-prob it must carry, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rollout import Decoder, DecoderConfig, Rollout
from trainer_bridge import score

VOCABULARY = 96
EOS = 1


def model_config() -> DecoderConfig:
    """Small enough for thousands of versions to be checked."""
    return DecoderConfig(
        model_type="llama",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_ids=(EOS,),
    )


@torch.no_grad()
def write_weights(
    model: Decoder, seed: int, version: int, between: Callable[[], None] = lambda: None
) -> None:
    """The weights of a version, in place, one tensor after another; `between` after each."""
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(((seed * 1_000_003) + version) * 1009 + index)
        scale = 0.4 if parameter.dim() > 1 else 1.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        between()


@dataclass
class Oracle:
    """Recomputes what rollouts claim. `violations` are sentences; there should be none.

    weights_of: version -> the version whose weights, a function of (seed, version), it has; others
    than itself where a recovery published a checkpoint.
    """

    seed: int
    weights_of: Callable[[int], int] = lambda version: version
    violations: list[str] = field(default_factory=list)
    rollouts: int = 0
    tokens: int = 0
    versions: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._model = Decoder(model_config())

    def check(self, rollouts: Iterable[Rollout]) -> None:
        """Every token against the weights of the version it claims; spans must cover all."""
        by_weights: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            self.rollouts += 1
            self.tokens += len(rollout.token_ids)
            covered = [i for span in rollout.version_spans for i in range(span.start, span.end)]
            if covered != list(range(len(rollout.token_ids))):
                self._blame(f"the spans {rollout.version_spans} do not cover the output")
            versions = [span.version for span in rollout.version_spans]
            if versions != sorted(set(versions)):
                self._blame(f"the versions of one rollout go back: {versions}")
            self.versions.update(versions)
            for version in {self.weights_of(v) for v in versions}:
                by_weights.setdefault(version, []).append(rollout)
        for version, claimed in sorted(by_weights.items()):
            self._check_version(version, claimed)

    def _check_version(self, version: int, rollouts: Sequence[Rollout]) -> None:
        write_weights(self._model, self.seed, version)
        for rollout, expected in zip(rollouts, score(self._model, rollouts), strict=True):
            truth = expected.detach().numpy()
            found = np.asarray(rollout.logprobs, np.float32)
            for span in rollout.version_spans:
                if self.weights_of(span.version) != version:
                    continue
                wrong = np.flatnonzero(found[span.start : span.end] != truth[span.start : span.end])
                if len(wrong):
                    self._blame(
                        f"{len(wrong)} of {span.end - span.start} tokens say version "
                        f"{span.version} and were not computed with its weights"
                    )

    def check_weights(self, tensors: Mapping[str, torch.Tensor], version: int, what: str) -> None:
        """Stored weights, a checkpoint's, against those of the version they claim."""
        write_weights(self._model, self.seed, self.weights_of(version))
        for name, parameter in self._model.named_parameters():
            if not torch.equal(tensors[name], parameter):
                self._blame(f"{what} says version {version}, and its {name} is another one")

    def _blame(self, sentence: str) -> None:
        self.violations.append(sentence)
