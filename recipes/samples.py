"""What the policy wrote: a few samples of some steps in samples.jsonl, for people to read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from recipes.lesson import Lesson
from recipes.metrics import warn_on_stderr
from recipes.sampled_step import SampledStep
from rollout.tokenizer import Tokenizer

Record: TypeAlias = dict[str, Any]

COLUMNS = (
    "step", "prompt", "completion", "reward", "rewards", "advantage", "num_tokens",
    "finish_reason", "versions",
)  # fmt: skip
"""Fields of a line of samples.jsonl, and columns of the table."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion and what it earned; None for what could not be scored or has no advantage.

    rewards: by function, `reward` is their sum; advantage: the mean over the tokens that the policy
    chose; versions: `(version, start, end)`, output tokens [start, end) were produced under that
    policy version.
    """

    prompt: str
    completion: str
    reward: float | None
    rewards: Mapping[str, float | None]
    advantage: float | None
    num_tokens: int
    finish_reason: str
    versions: Sequence[tuple[int, int, int]]


def samples_of(
    step: SampledStep, lesson: Lesson, indices: Sequence[int], tokenizer: Tokenizer
) -> list[Sample]:
    """These rollouts of a step as text, with what they earned; no advantage for those that the
    lesson leaves out."""
    in_lesson = {rollout: place for place, rollout in enumerate(lesson.rollouts.tolist())}
    samples = []
    for i in indices:
        rollout, place = step.batch[i], in_lesson.get(i)
        advantage = None
        if place is not None and rollout.token_ids:
            row = slice(*lesson.batch.offsets[place : place + 2])
            chosen = lesson.batch.response_mask[row]
            advantage = float(lesson.advantages[row][chosen].mean())
        samples.append(
            Sample(
                tokenizer.decode(rollout.prompt_token_ids),
                tokenizer.decode(rollout.token_ids),
                step.rewards.total[i],
                step.rewards.of_sample(i),
                advantage,
                len(rollout.token_ids),
                rollout.finish_reason,
                rollout.version_spans,
            )
        )
    return samples


class SampleLog:
    """`<folder>/samples.jsonl`: at most `per_step` samples of every `every`-th step.

    Texts are cut to `max_chars` characters and the newest `keep_steps` logged steps remain, so the
    file does not grow with the run. A number that is not finite becomes null. A failure never ends
    the run: the first one is reported, and the next logged step tries to write the whole file.

    every: 0 logs nothing. per_step, keep_steps: at least 1, or ValueError. keep_up_to: for a folder
    that holds a run already, the last step whose samples to keep; those of later steps are dropped,
    since they will be logged again. None = a new run, which replaces what is there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        per_step: int,
        every: int,
        keep_steps: int,
        max_chars: int = 2000,
        keep_up_to: int | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        if per_step < 1 or keep_steps < 1:
            raise ValueError(
                f"per_step and keep_steps must be at least 1, got {per_step} and {keep_steps}"
            )
        self._path = folder / "samples.jsonl"
        self._per_step = per_step
        self._every = every
        self._keep_steps = keep_steps
        self._max_chars = max_chars
        self._warn = warn or warn_on_stderr
        self._warned = False
        self._logged: dict[int, list[Record]] = {}  # by step, ascending
        self._intact = False  # the file holds what `_logged` does
        self._guard(lambda: self._open(keep_up_to))

    def due(self, step: int) -> bool:
        """Whether `log` would write samples of this step."""
        return self._every > 0 and step % self._every == 0

    def log(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the samples that `choose` takes, if the step is due.

        They replace what was logged of this step and of later ones.
        """
        if samples and self.due(step):
            self._guard(lambda: self._log(step, samples))

    def rewind(self, step: int) -> None:
        """Forget the samples of later steps: they will come again."""
        if any(at > step for at in self._logged):
            self._logged = {at: r for at, r in self._logged.items() if at <= step}
            self._guard(self._rewrite)

    def rows(self, step: int) -> list[list[Any]]:
        """The samples logged of a step as rows of `COLUMNS`, lists and mappings as JSON text;
        empty for a step that was not logged or is no longer kept."""
        return [
            [_cell(record.get(name)) for name in COLUMNS] for record in self._logged.get(step, ())
        ]

    def _open(self, keep_up_to: int | None) -> None:
        if self._path.exists():
            if keep_up_to is not None:
                self._logged = self._read(keep_up_to)
            self._rewrite()

    def _read(self, keep_up_to: int) -> dict[int, list[Record]]:
        """What is there up to that step, without lines that a killed run did not finish."""
        found: dict[int, list[Record]] = {}
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            record = _parsed(line)
            if record is not None and record["step"] <= keep_up_to:
                found.setdefault(record["step"], []).append(record)
        return {step: found[step] for step in sorted(found)[-self._keep_steps :]}

    def _log(self, step: int, samples: Sequence[Sample]) -> None:
        chosen = choose([sample.reward for sample in samples], self._per_step)
        records = [_record(step, samples[i], self._max_chars) for i in chosen]
        earlier = [at for at in self._logged if at < step]
        kept = earlier[max(len(earlier) + 1 - self._keep_steps, 0) :]
        self._intact &= len(kept) == len(self._logged)
        self._logged = {at: self._logged[at] for at in kept} | {step: records}
        if self._intact:
            self._append(records)
        else:
            self._rewrite()

    def _append(self, records: Sequence[Record]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, records)))

    def _rewrite(self) -> None:
        """The file with what is kept, replaced as a whole."""
        partial = self._path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(_line(r) for records in self._logged.values() for r in records)
        partial.rename(self._path)
        self._intact = True

    def _guard(self, action: Callable[[], None]) -> None:
        """A failure is told of once and stays here; the next write replaces the whole file."""
        try:
            action()
        except Exception as error:
            self._intact = False
            if not self._warned:
                self._warned = True
                self._warn(
                    f"cannot log samples to {self._path} ({type(error).__name__}: {error}); "
                    "the run goes on"
                )


def choose(rewards: Sequence[float | None], count: int) -> list[int]:
    """Which `count` samples to show, in order: the best, the worst, the second best, ...

    Equal rewards in order of index; those without a reward last. All of them if there are fewer.
    """
    scored = [(reward, i) for i, reward in enumerate(rewards) if reward is not None]
    best = sorted(scored, key=lambda pair: (-pair[0], pair[1]))
    alternating = [i for pair in zip(best, sorted(scored), strict=True) for _, i in pair]
    unscored = [i for i, reward in enumerate(rewards) if reward is None]
    return list(dict.fromkeys([*alternating, *unscored]))[:count]


def _record(step: int, sample: Sample, max_chars: int) -> Record:
    values = (
        step,
        sample.prompt[:max_chars],
        sample.completion[:max_chars],
        _number(sample.reward),
        {name: _number(reward) for name, reward in sample.rewards.items()},
        _number(sample.advantage),
        int(sample.num_tokens),
        sample.finish_reason,
        [[int(number) for number in span] for span in sample.versions],
    )
    return dict(zip(COLUMNS, values, strict=True))


def _number(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"


def _parsed(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value
