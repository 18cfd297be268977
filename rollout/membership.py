"""Which rollout actors serve, which are lost, and which are starting in their place."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray

from rollout.policy import WeightsError
from rollout.remote import (
    ActorDied,
    ActorFailure,
    ActorLost,
    ActorOutOfMemory,
    ActorTimeout,
    RemoteActor,
    result_of,
)

_POLL_S = 0.05
_log = logging.getLogger(__name__)


class ActorSource(Protocol):
    """Where a pool gets actors in place of those it loses."""

    def start_actor(self, name: str) -> Any:
        """The handle of a new `RolloutActor`; its process may still be starting. None while there
        is no room for it."""

    def admit_actor(self, name: str, about: dict[str, Any], probes: Mapping[str, Any]) -> bool:
        """Raise if this new actor, which describes itself so, must not serve; False if that cannot
        be told yet. probes: `RolloutActor.probe` of it and of those that serve, by name."""

    def check(self) -> None:
        """Called now and then: replace what actors depend on and a pool does not know."""

    def unreadable(self, name: str, error: WeightsError) -> Exception:
        """What to raise for weights that an actor cannot read: `ActorLost` if another actor in its
        place could, `error` if not."""


@dataclass(frozen=True, slots=True)
class _Joining:
    """An actor on its way: it has been asked to describe itself, then it and its peers to prove
    their bits. Nobody waits for the answers: the trainer may hang while it holds the weights, and
    whoever would wait for a reader of them may be the one who is to notice."""

    actor: RemoteActor
    deadline: float
    description: Any
    probes: Mapping[str, Any] | None = None

    @property
    def answered(self) -> bool:
        asked = [self.description, *(self.probes or {}).values()]
        return len(ray.wait(asked, num_returns=len(asked), timeout=0)[0]) == len(asked)


class Membership:
    """The actors of one pool, by name. Guarded by a lock: any thread may ask.

    heartbeat_timeout_s: silence after which an actor counts as hung; it is killed then, since a
    stopped process may hold the weights' lock. source: starts another actor for one that was lost,
    at most `max_restarts` times in all, each within `start_timeout_s`; None = nobody is replaced.
    """

    def __init__(
        self,
        actors: Mapping[str, Any],
        source: ActorSource | None,
        max_restarts: int,
        heartbeat_timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._start_timeout_s = start_timeout_s
        self._actors = {name: self._watched(name, handle) for name, handle in actors.items()}
        self._source = source
        self._restarts_left = max_restarts
        self._joining: dict[str, _Joining] = {}
        self._missing: list[str] = []
        self._lock = threading.RLock()
        self.min_version = 0
        """Actors that read older weights sample nothing until they read these, and new ones do not
        join."""
        self.stale_timeout_s = start_timeout_s
        """How long an actor waits for them before it refuses."""
        self.losses: list[ActorLost] = []
        self.restarts = 0

    @property
    def serving(self) -> dict[str, RemoteActor]:
        """Those that work, now."""
        with self._lock:
            return dict(self._actors)

    def check(self) -> None:
        """Ask for heartbeats, drop actors that are dead or hung, take in those that have started.

        Never raises for a lost actor while another is left.
        """
        with self._lock:
            if self._source is not None:
                self._source.check()
            for actor in list(self._actors.values()):
                try:
                    actor.check("a check of the pool")
                except ActorLost as error:
                    self.lose(actor, error)
            self.welcome()

    def lose(self, actor: RemoteActor, error: ActorLost) -> None:
        """Drop an actor, end its process, start another in its place if that is allowed. Raises
        `error` if nobody is left."""
        with self._lock:
            if self._actors.get(actor.name) is not actor:
                return  # another thread saw it first
            del self._actors[actor.name]
            self.losses.append(error)
            self._missing.append(actor.name)
            actor.kill()
            self.refill()
            serving, joining = list(self._actors), list(self._joining)
            _log.warning("%s; %s serve, %s start again", error, serving, joining)
            if not self._actors and not self._joining:
                raise error

    def refill(self) -> None:
        """Start the actors that are missing, as far as restarts are left. Does not wait."""
        with self._lock:
            for _ in range(len(self._missing)):
                if not self._missing or self._source is None or self._restarts_left < 1:
                    return
                name = self._missing.pop(0)
                handle = self._source.start_actor(name)
                if handle is None:
                    self._missing.append(name)
                    continue
                self._restarts_left -= 1
                actor = self._watched(name, handle)
                description = actor.handle.describe.remote()
                deadline = time.monotonic() + self._start_timeout_s
                self._joining[name] = _Joining(actor, deadline, description)

    def look_after(self) -> None:
        """What a wait for actors does meanwhile: take in those that have started, check what they
        depend on."""
        if self._source is not None:
            self._source.check()
        self.welcome()

    def unreadable(self, name: str, error: WeightsError) -> Exception:
        """`ActorSource.unreadable`; without a source, `error`."""
        return error if self._source is None else self._source.unreadable(name, error)

    def welcome(self) -> None:
        """Take in the actors that have started and may serve; those that cannot are missing. Does
        not wait."""
        with self._lock:
            for name, joining in list(self._joining.items()):
                try:
                    following = self._next(joining)
                except Exception as error:
                    del self._joining[name]
                    joining.actor.kill()
                    self._missing.append(name)
                    _log.warning("%s could not be started again: %s", name, error)
                    continue
                if following is not None:
                    self._joining[name] = following
                    continue
                del self._joining[name]
                self._actors[name] = joining.actor
                self.restarts += 1

    def _next(self, joining: _Joining) -> _Joining | None:
        """How an actor that is starting stands now; None once it may serve."""
        actor = joining.actor
        if not joining.answered:
            if time.monotonic() > joining.deadline:
                raise ActorTimeout(f"it did not start in {self._start_timeout_s:.0f} s")
            return joining
        about = result_of(joining.description, actor.name, "start again")
        if about["policy_version"] < self.min_version:
            if time.monotonic() > joining.deadline:
                raise ActorFailure(
                    f"it reads policy version {about['policy_version']}, "
                    f"{self.min_version} is wanted"
                )
            return replace(joining, description=actor.handle.describe.remote(), probes=None)
        assert self._source is not None
        if joining.probes is not None:
            found = self._probed(joining)
            tellable = actor.name in found and joining.probes.keys() >= self._actors.keys()
            if tellable and self._source.admit_actor(actor.name, about, found):
                return None
            if time.monotonic() > joining.deadline:
                raise ActorFailure("the weights kept changing: nobody to compare with")
        others = {name: peer.handle.probe.remote() for name, peer in self._actors.items()}
        return replace(joining, probes={**others, actor.name: actor.handle.probe.remote()})

    def _probed(self, joining: _Joining) -> dict[str, Any]:
        """What was found, by name; without those that could not read the weights, which a trainer
        will make whole, and peers that are lost."""
        found: dict[str, Any] = {}
        for name, probe in (joining.probes or {}).items():
            try:
                found[name] = result_of(probe, name, "probe")
            except WeightsError as error:
                cause = self.unreadable(name, error)
                if cause is not error:
                    raise cause from None
            except ActorFailure:
                if name == joining.actor.name:
                    raise
        return found

    def wait_for_one(self, deadline: float) -> None:
        """Until an actor serves; `ActorDied` when none will."""
        while not self._actors:
            with self._lock:
                if not self._joining:
                    self.refill()
                pending = bool(self._joining)
            if not pending:
                why = f"; the last one: {self.losses[-1]}" if self.losses else ""
                raise ActorDied(f"no rollout actor is left{why}")
            if time.monotonic() > deadline:
                raise ActorTimeout("no rollout actor has started again in time")
            self.welcome()
            time.sleep(0.0 if self._actors else _POLL_S)

    def ask(self, method: str, timeout_s: float, *arguments: Any) -> dict[str, Any]:
        """The answers of all actors by name; one that is lost meanwhile is left out."""
        actors = self.serving.values()
        calls = [(actor, getattr(actor.handle, method).remote(*arguments)) for actor in actors]
        answers = {}
        for actor, reference in calls:
            try:
                answers[actor.name] = actor.call(method, reference, timeout_s)
            except ActorOutOfMemory:
                raise
            except ActorLost as error:
                self.lose(actor, error)
        return answers

    def close(self) -> None:
        """End the actors' processes."""
        with self._lock:
            for actor in [*self._actors.values(), *(j.actor for j in self._joining.values())]:
                with suppress(Exception):
                    ray.kill(actor.handle)
            self._actors.clear()
            self._joining.clear()
            self._missing.clear()

    def _watched(self, name: str, handle: Any) -> RemoteActor:
        return RemoteActor(name, handle, self._heartbeat_timeout_s)
