"""The mirrors of one run as their driver sees them: started, kept at the last version, replaced."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from rollout.remote import ActorDied, ActorLost, ActorTimeout, RemoteActor

_POLL_S = 0.02
_RETRY_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Mirror:
    actor: RemoteActor
    sent: Any = None  # reference to the version that it took in last, or is taking in
    sent_at: float = 0.0
    failed: bool = False


class Mirrors:
    """A `MirrorActor` on each of `nodes`. Any thread may call.

    start: makes the actor of a node. snapshot: asks the trainer for its weights as they are; the
    references of their version and of all pieces, without waiting. Ray carries them from node to
    node. lost: told of a node whose mirror is gone, and why; whoever read it must end, too.
    meanwhile: called while mirrors are waited for, since a hung reader may keep one from writing.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        start: Callable[[int], Any],
        snapshot: Callable[[], list[Any]],
        lost: Callable[[int, ActorLost], None],
        meanwhile: Callable[[], None],
        heartbeat_timeout_s: float,
        timeout_s: float,
    ) -> None:
        self._nodes = tuple(nodes)
        self._start = start
        self._snapshot = snapshot
        self._lost = lost
        self._meanwhile = meanwhile
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._timeout_s = timeout_s
        self._mirrors: dict[int, _Mirror] = {}
        self._lock = threading.RLock()

    def of_node(self, node: int) -> Any:
        """The handle of the mirror of `node`, a new one in place of one that does not answer; None
        where the trainer's own weights are."""
        if node not in self._nodes:
            return None
        if (mirror := self._mirrors.get(node)) and not self._answers(mirror):
            self.lose(node, ActorDied(f"{mirror.actor.name} does not answer"))
        with self._lock:
            if node not in self._mirrors:
                handle = self._start(node)
                actor = RemoteActor(f"mirror-{node}", handle, self._heartbeat_timeout_s)
                self._mirrors[node] = _Mirror(actor)
                self._send(self._mirrors[node])
            return self._mirrors[node].actor.handle

    def follow(self) -> None:
        """After a publication: send the weights to every mirror. Does not wait for them, but for
        what was sent before: at most one version is under way to a node."""
        if self._mirrors:
            self.settle()
            for mirror in self._all().values():
                self._send(mirror)

    def settle(self) -> None:
        """Until every mirror has taken in what was sent last; `ActorTimeout` if one has not."""
        deadline = time.monotonic() + self._timeout_s
        while late := [m for m in self._all().values() if not self._has_arrived(m)]:
            if time.monotonic() > deadline:
                raise ActorTimeout(
                    f"{', '.join(m.actor.name for m in late)} did not take in the weights within "
                    f"{self._timeout_s:.0f} s; the network or the node may be slow"
                )
            time.sleep(_POLL_S)
            self.check()
            self._meanwhile()

    def check(self) -> None:
        """Replace mirrors that are dead or hung; send again what has not arrived."""
        for node, mirror in self._all().items():
            try:
                mirror.actor.check("a check of the mirrors")
            except ActorLost as error:
                self.lose(node, error, mirror)
                continue
            if not self._has_arrived(mirror) and mirror.failed:
                if time.monotonic() - mirror.sent_at > _RETRY_S:
                    self._send(mirror)

    def lose(self, node: int, error: ActorLost, mirror: _Mirror | None = None) -> None:
        """End the mirror of a node; the next `of_node` starts another one."""
        with self._lock:
            if mirror is not None and self._mirrors.get(node) is not mirror:
                return  # another thread saw it first
            gone = self._mirrors.pop(node, None)
        if gone is not None:
            gone.actor.kill()
            self._lost(node, error)

    def ask(self, method: str, timeout_s: float, *arguments: Any) -> dict[str, Any]:
        """The answers of all mirrors, by name."""
        return {
            mirror.actor.name: mirror.actor.call(
                method, getattr(mirror.actor.handle, method).remote(*arguments), timeout_s
            )
            for mirror in self._all().values()
        }

    def close(self) -> None:
        """End them all."""
        with self._lock:
            for mirror in self._mirrors.values():
                mirror.actor.kill()
            self._mirrors.clear()

    def _all(self) -> dict[int, _Mirror]:
        with self._lock:
            return dict(self._mirrors)

    def _send(self, mirror: _Mirror) -> None:
        mirror.sent = mirror.actor.handle.publish.remote(*self._snapshot())
        mirror.sent_at, mirror.failed = time.monotonic(), False

    def _has_arrived(self, mirror: _Mirror) -> bool:
        """Whether it has taken in what was sent last. `failed` is set if it will not: the trainer
        or the pieces' node may be gone, or itself, which its heartbeat tells."""
        if mirror.failed or not ray.wait([mirror.sent], timeout=0)[0]:
            return False
        try:
            ray.get(mirror.sent)
        except Exception as error:
            mirror.failed = True
            _log.warning("%s could not take in the weights: %s", mirror.actor.name, error)
        return not mirror.failed

    def _answers(self, mirror: _Mirror) -> bool:
        try:
            ray.get(mirror.actor.handle.heartbeat.remote(), timeout=self._heartbeat_timeout_s)
        except RayError:
            return False
        return True
