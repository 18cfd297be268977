"""A lock that serves its waiters in order of arrival."""

from __future__ import annotations

import threading


class FairLock:
    """Reentrant, first come first served.

    The loop that steps the scheduler lets go of its lock between two steps and takes it again at
    once; with `threading.RLock` whoever else waits for it, a publication for one, would hardly
    ever be served.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._owner: int | None = None
        self._depth = 0
        self._next_ticket = 0
        self._serving = 0
        self._given_up: set[int] = set()

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._condition:
            if self._owner == me:
                self._depth += 1
                return
            ticket = self._next_ticket
            self._next_ticket += 1
            try:
                while self._serving != ticket:
                    self._condition.wait()
                self._owner, self._depth = me, 1
            except BaseException:  # Ctrl-C while waiting: nobody may wait for this ticket
                if self._owner == me:
                    self._owner, self._depth = None, 0
                if self._serving == ticket:
                    self._serve_next()
                else:
                    self._given_up.add(ticket)
                raise

    def __exit__(self, *error: object) -> None:
        with self._condition:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._serve_next()

    @property
    def depth(self) -> int:
        """How often the calling thread holds it."""
        return self._depth if self._owner == threading.get_ident() else 0

    def unwind(self, depth: int) -> None:
        """Let go of what this thread holds beyond `depth`.

        Python may raise KeyboardInterrupt between a `with` block and its `__exit__`; whoever
        handles it does not know whether the lock was left.
        """
        while self.depth > depth:
            self.__exit__()

    def _serve_next(self) -> None:
        self._serving += 1
        while self._serving in self._given_up:
            self._given_up.remove(self._serving)
            self._serving += 1
        self._condition.notify_all()
