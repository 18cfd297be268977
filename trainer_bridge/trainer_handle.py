"""The trainer actor as its driver sees it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.model import Decoder
from rollout.remote import ActorFailure, ActorLost, ActorOutOfMemory, RemoteActor, wait_for
from rollout.rollout_batch import RolloutBatch
from trainer_bridge.algorithm import Algorithm
from trainer_bridge.receipt import WeightsEcho
from trainer_bridge.token_columns import TokenColumns


class TrainerLost(ActorFailure):
    """The trainer is dead or hung. The weights may be torn; `Colocation.restart_trainer` goes on
    from a checkpoint."""


class TrainerHandle:
    """The trainer actor as an object. Calls wait, with a deadline that names the phase, and raise
    `TrainerLost` when it died or hangs.

    meanwhile: called about once a second while a call waits. published: called after each call
    that may have changed the weights.
    """

    def __init__(
        self,
        actor: RemoteActor,
        timeout_s: float,
        meanwhile: Callable[[], None],
        published: Callable[[], None],
    ) -> None:
        self._actor = actor
        self._timeout_s = timeout_s
        self._meanwhile = meanwhile
        self._published = published
        self._holds = itertools.count()

    def step(
        self,
        batch: RolloutBatch,
        advantages: NDArray[np.float32] | None,
        algorithm: Algorithm | str = "grpo",
        columns: TokenColumns | None = None,
        *,
        wait_for_rollouts: Callable[[], object] | None = None,
    ) -> dict[str, float]:
        """Forward, backward, `apply_weight_update`; metrics. See `Learner.step`.

        wait_for_rollouts: called while forward and backward run; the weights change only after it
        has returned, so what is sampled until then is of one version. It must not raise.
        """
        handle = self._actor.handle
        if wait_for_rollouts is None:
            reference = handle.step.remote(batch, advantages, algorithm, columns)
            return self._change("step", reference)  # type: ignore[no-any-return]
        hold = next(self._holds)
        reference = handle.step.remote(batch, advantages, algorithm, columns, hold)
        try:
            wait_for_rollouts()
        finally:
            handle.allow_update.remote(hold)
        return self._change("step", reference)  # type: ignore[no-any-return]

    def score_tokens(self, batch: RolloutBatch) -> TokenColumns:
        """What reference policy and critic say of the batch's tokens, those that there are
        (`TrainerConfig`), under the weights as they are."""
        return self._call("score_tokens", batch)  # type: ignore[no-any-return]

    def reset_from_policy(self, *names: str) -> None:
        """Let "critic", "reference" or both begin anew from the policy as it is, for instance
        after a warm start."""
        self._call("reset_from_policy", *names)

    def apply_weight_update(self, version: int | None, update: Callable[[Decoder], Any]) -> Any:
        """Run `update(model)` in the trainer, in place, and publish. See `TrainerActor`."""
        reference = self._actor.handle.apply_weight_update.remote(version, update)
        return self._change("apply_weight_update", reference)

    def save_checkpoint(self, folder: str) -> int:
        """Write weights, tokenizer and the trainer's state; returns the version written."""
        return self._call("save_checkpoint", str(folder))  # type: ignore[no-any-return]

    def snapshot(self, weights_bytes: int, piece_bytes: int) -> list[Any]:
        """References of the version and of every piece of the weights; does not wait."""
        pieces = -(-weights_bytes // piece_bytes)
        method = self._actor.handle.snapshot.options(num_returns=1 + pieces)
        return list(method.remote(piece_bytes))

    def weights_echo(self, *, checksum: bool = False) -> WeightsEcho:
        """What the trainer itself reads; see `SharedGate.echo`."""
        return self._call("weights_echo", checksum)  # type: ignore[no-any-return]

    def get_stats(self) -> dict[str, Any]:
        return self._call("get_stats")  # type: ignore[no-any-return]

    def memory_uss(self) -> int:
        return self._call("memory_uss")  # type: ignore[no-any-return]

    @property
    def policy_version(self) -> int:
        return int(self.get_stats()["policy_version"])

    def replace(self, actor: RemoteActor) -> None:
        """From now on address another process."""
        self._actor = actor

    def kill(self) -> None:
        """End the process. Idempotent."""
        self._actor.kill()

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._result(method, getattr(self._actor.handle, method).remote(*arguments))

    def _change(self, method: str, reference: Any) -> Any:
        """Of a step that raised, earlier minibatches may have been published."""
        try:
            result = self._result(method, reference)
        except ActorFailure:
            raise
        except Exception:
            self._published()
            raise
        self._published()
        return result

    def _result(self, method: str, reference: Any) -> Any:
        actor = self._actor

        def check(phase: str) -> None:
            actor.check(phase)
            self._meanwhile()

        try:
            return wait_for(reference, actor.name, method, self._timeout_s, check)
        except ActorOutOfMemory:
            raise
        except ActorLost as error:
            raise TrainerLost(str(error)) from error
