"""A batch that is being computed: what of it has ended can be taken while the rest goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.request import Request, Rollout

_WHOLE = ("stop", "length")


class OpenBatch:
    """The requests of some prompts, and `compute`, which steps the engine until all have ended.

    One thread computes, another may take. Samples of a prompt are handed out together.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        compute: Callable[[list[Request]], None],
        abort: Callable[[list[Request]], None],
    ) -> None:
        self._requests = list(requests)
        self._compute = compute
        self._abort = abort
        groups: dict[int, list[Request]] = {}
        for request in self._requests:
            groups.setdefault(request.task.prompt_index, []).append(request)
        self._open = groups

    def compute(self) -> None:
        """Blocks until all have ended; an exception frees all that they hold."""
        self._compute([r for r in self._requests if not r.finished])

    def abort(self) -> None:
        """From any thread: end what has not ended, after the step that runs."""
        self._abort(self._requests)

    def take_finished(self) -> list[Rollout]:
        """Rollouts of prompts all of whose samples came to an end of their own since the last
        call. Aborted and failed ones are left for `take_rest`: a batch whose `compute` raises
        ends its requests too, and those are no results."""
        ended = [
            index
            for index, requests in self._open.items()
            if all(r.finished and r.finish_reason in _WHOLE for r in requests)
        ]
        return self._take(ended)

    def take_rest(self) -> list[Rollout]:
        """After `compute` has returned: whatever was not taken yet, in the order of the prompts."""
        return self._take(list(self._open))

    def _take(self, prompt_indices: list[int]) -> list[Rollout]:
        return [request.result() for i in prompt_indices for request in self._open.pop(i)]
