"""The data cursor and the sampling seeds."""

import pytest

from recipes.data import PromptCursor, sampling_seed


@pytest.mark.parametrize(("num_rows", "batch_size"), [(10, 3), (7, 7), (5, 12), (1, 1)])
def test_every_epoch_sees_every_row_once(num_rows, batch_size):
    cursor = PromptCursor(num_rows, batch_size, seed=3)
    flat = [row for step in range(4 * num_rows) for row in cursor.rows(step)]
    for start in range(0, len(flat) - num_rows + 1, num_rows):
        assert sorted(flat[start : start + num_rows]) == list(range(num_rows))


def test_a_step_needs_no_earlier_one():
    """R8: a resumed run reads the prompts the uninterrupted one would have read."""
    whole = [PromptCursor(50, 8, 1).rows(step) for step in range(20)]
    assert [PromptCursor(50, 8, 1).rows(step) for step in range(12, 20)] == whole[12:]


def test_epochs_and_seeds_differ():
    cursor = PromptCursor(100, 100, 0)
    assert cursor.rows(0) != cursor.rows(1)
    assert cursor.rows(0) != PromptCursor(100, 100, 1).rows(0)
    assert cursor.epoch(3) == 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 1, 0), "num_rows"), ((1, 0, 0), "batch_size"), ((1, 1, -1), "seed")],
)
def test_errors_name_the_field(arguments, message):
    with pytest.raises(ValueError, match=message):
        PromptCursor(*arguments)


def test_sampling_seeds():
    """One per step, reproducible, within what SamplingParams takes."""
    seeds = [sampling_seed(0, step) for step in range(1000)]
    assert seeds == [sampling_seed(0, step) for step in range(1000)]
    assert len(set(seeds) | {sampling_seed(1, step) for step in range(1000)}) == 2000
    assert all(0 <= seed < 2**32 for seed in seeds)
