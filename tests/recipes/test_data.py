"""The data cursor and the sampling seeds."""

import pytest

from recipes.data import PromptCursor, sampling_seed


@pytest.mark.parametrize(("num_rows", "batch_size"), [(10, 3), (7, 7), (5, 12), (1, 1)])
def test_every_epoch_sees_every_row_once(num_rows, batch_size):
    cursor = PromptCursor(num_rows, seed=3)
    steps = range(0, 4 * num_rows * batch_size, batch_size)
    flat = [row for drawn in steps for row in cursor.rows(drawn, batch_size)]
    for start in range(0, len(flat) - num_rows + 1, num_rows):
        assert sorted(flat[start : start + num_rows]) == list(range(num_rows))


def test_a_step_needs_no_earlier_one():
    """R8: a resumed run reads the prompts the uninterrupted one would have read."""
    whole = PromptCursor(50, 1).rows(0, 160)
    assert PromptCursor(50, 1).rows(96, 64) == whole[96:]


def test_epochs_and_seeds_differ():
    cursor = PromptCursor(100, 0)
    assert cursor.rows(0, 100) != cursor.rows(100, 100)
    assert cursor.rows(0, 100) != PromptCursor(100, 1).rows(0, 100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 0), "num_rows"), ((1, -1), "seed")],
)
def test_errors_name_the_field(arguments, message):
    with pytest.raises(ValueError, match=message):
        PromptCursor(*arguments)
    for drawn, count in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="position must be at least 0 and count at least 1"):
            PromptCursor(3, 0).rows(drawn, count)


def test_sampling_seeds():
    """One per step and round, reproducible, within what SamplingParams takes."""
    seeds = [sampling_seed(0, step) for step in range(1000)]
    assert seeds == [sampling_seed(0, step) for step in range(1000)]
    assert len(set(seeds) | {sampling_seed(1, step) for step in range(1000)}) == 2000
    assert all(0 <= seed < 2**32 for seed in seeds)
    rounds = {sampling_seed(0, step, round_index) for step in range(99) for round_index in range(9)}
    assert len(rounds) == 99 * 9
