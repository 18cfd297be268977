"""KeyboardInterrupt at any line of a batch, as Ctrl-C may come at any: a trace raises it there.

Afterwards nothing is held or queued, the lock is free, and the next batch gives the same bits.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import FrameType

import pytest

from rollout import RolloutEngine, SamplingParams
from tests.folders import word_tokenizer
from tests.models import tiny_model

FILES = {
    "planning": ("scheduler", "step_builder", "running", "manager", "pool", "block", "table"),
    "results": ("core", "batch", "results", "stopping", "detokenizer", "request", "admission"),
}
PACKAGES = tuple(str(Path(__file__).parents[2] / name) for name in ("rollout", "kvcache"))
PLACES = 120  # lines at which a batch is interrupted, of some thousands

PROMPT = [7, 3, 9, 9, 4, 5, 6, 8, 2, 3, 3, 5, 7, 11, 13, 17, 19]
PROMPTS = [PROMPT, [*PROMPT[:9], 3, 4, 5], PROMPT]
PARAMS = SamplingParams(n=2, max_tokens=6, seed=3, stop=("w1 w1",), logprobs=2)


class Interrupter:
    """Counts the lines run in `files`, and raises at number `at`."""

    def __init__(self, files: tuple[str, ...], at: int) -> None:
        self.files = files
        self.at = at
        self.lines = 0
        self.place = ""

    def enter(self, frame: FrameType, event: str, arg: object):
        path = Path(frame.f_code.co_filename)
        mine = path.stem in self.files and str(path.parent) in PACKAGES
        return self.line if mine else None

    def line(self, frame: FrameType, event: str, arg: object):
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.line

    def run(self, engine: RolloutEngine) -> None:
        before = sys.gettrace()
        sys.settrace(self.enter)
        try:
            engine.run_batch(PROMPTS, PARAMS)
        finally:
            sys.settrace(before)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def small_engine(model) -> RolloutEngine:
    return RolloutEngine(
        model, word_tokenizer(), max_batch_size=4, max_seq_len=40, block_size=4,
        num_kv_blocks=15, max_num_batched_tokens=12,
    )


@pytest.mark.parametrize("part", FILES)
def test_anywhere(model, part):
    """K21, S8, L5: planning, bookkeeping, inputs, results, ends."""
    expected = small_engine(model).run_batch(PROMPTS, PARAMS, return_details=True)
    counter = Interrupter(FILES[part], at=-1)
    counter.run(small_engine(model))
    assert counter.lines > 2000
    interrupted = 0
    for at in random.Random(0).sample(range(1, counter.lines + 1), PLACES):
        engine = small_engine(model)
        interrupter = Interrupter(FILES[part], at)
        try:
            interrupter.run(engine)
        except KeyboardInterrupt:
            interrupted += 1
        where = interrupter.place
        assert not engine._core.lock.depth, where
        stats = engine.get_stats()
        assert (stats["requests_waiting"], stats["requests_running"]) == (0, 0), where
        assert stats["kv_blocks_used"] == 0, where
        engine.check_integrity()
        assert engine.run_batch(PROMPTS, PARAMS, return_details=True) == expected, where
    assert interrupted > PLACES * 0.9
