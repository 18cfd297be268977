"""A lock that serves its waiters in order of arrival."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """Reentrant, first come first served.

    The loop that steps the scheduler lets go of its lock between two steps and takes it again at
    once; with `threading.RLock` whoever else waits for it, a publication for one, would hardly
    ever be served.

    Python may raise KeyboardInterrupt between any two lines of this, and between a `with` block
    and its `__exit__`. Whoever catches one calls `unwind` with the depth it had before.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # `with` on it is atomic, on a Condition it is not
        self._changed = threading.Condition(self._mutex)
        self._queue: deque[int] = deque()  # waiting threads
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        try:
            with self._mutex:
                self._queue.append(me)
                while self._owner is not None or self._queue[0] != me:
                    self._changed.wait()
                self._queue.popleft()
                self._owner, self._depth = me, 1
        except BaseException:
            self.unwind(0)
            raise

    def __exit__(self, *error: object) -> None:
        self.unwind(self.depth - 1)

    @property
    def depth(self) -> int:
        """How often the calling thread holds it."""
        return self._depth if self._owner == threading.get_ident() else 0

    def unwind(self, depth: int) -> None:
        """Let go of what this thread holds beyond `depth`, its place in the queue included."""
        me = threading.get_ident()
        with self._mutex:
            if me in self._queue:
                self._queue.remove(me)
            if self._owner == me and self._depth > depth:
                self._depth = depth
                if not depth:
                    self._owner = None
            self._changed.notify_all()
