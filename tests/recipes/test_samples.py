"""Samples to read: few, telling, bounded, resumable; logging them never ends a run (R9)."""

import json
from dataclasses import replace

import numpy as np
import pytest
import wandb
from hypothesis import given
from hypothesis import strategies as st

from recipes.command_line import ConfigError, parse_config
from recipes.metrics import MetricsLog
from recipes.samples import COLUMNS, Sample, SampleLog, choose

SAMPLE = Sample("1+1=", "2", 1.5, {"right": 1.0, "short": 0.5}, 0.25, 3, "stop", [(4, 0, 3)])


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def open_log(tmp_path, warnings):
    def open_with(**options):
        settings = {"per_step": 4, "every": 1, "keep_steps": 10, "warn": warnings.append}
        return SampleLog(tmp_path, **{**settings, **options})

    return open_with


def lines(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def steps(folder):
    return [line["step"] for line in lines(folder)]


def earning(*rewards):
    return [replace(SAMPLE, completion=str(i), reward=r) for i, r in enumerate(rewards)]


@pytest.mark.parametrize(
    ("rewards", "chosen"),
    [
        ([0.2, 0.9, 0.1, 0.5], [1, 2, 3, 0]),
        ([1.0, 1.0, 0.0, 0.0], [0, 2, 1, 3]),
        ([0.5, 0.5, 0.5], [0, 1, 2]),
        ([None, 0.0, None, 1.0], [3, 1, 0, 2]),
        ([None, None], [0, 1]),
        ([], []),
    ],
)
def test_the_best_and_the_worst_in_turn(rewards, chosen):
    for count in range(len(rewards) + 2):
        assert choose(rewards, count) == chosen[:count]


@given(st.lists(st.none() | st.integers(-2, 2)), st.integers(0, 9))
def test_each_choice_is_extreme_among_what_is_left(rewards, count):
    chosen = choose(rewards, count)
    assert len(chosen) == min(count, len(rewards))
    left = list(range(len(rewards)))
    for turn, index in enumerate(chosen):
        scored = [i for i in left if rewards[i] is not None]
        sign = 1 if turn % 2 else -1
        assert index == (min(scored, key=lambda i: sign * rewards[i]) if scored else left[0])
        left.remove(index)


def test_a_line_has_all_of_a_sample(tmp_path, open_log):
    unscored = replace(SAMPLE, reward=None, rewards={"right": None}, advantage=None)
    open_log().log(2, [SAMPLE, unscored])
    first, second = lines(tmp_path)
    assert first == {
        "step": 2, "prompt": "1+1=", "completion": "2", "reward": 1.5,
        "rewards": {"right": 1.0, "short": 0.5}, "advantage": 0.25, "num_tokens": 3,
        "finish_reason": "stop", "versions": [[4, 0, 3]],
    }  # fmt: skip
    assert second == {**first, "reward": None, "rewards": {"right": None}, "advantage": None}
    assert tuple(first) == COLUMNS


def test_at_most_so_many_of_a_step_and_the_telling_ones(tmp_path, open_log):
    open_log(per_step=2).log(1, earning(0.5, 0.0, 1.0, 0.2))
    assert [(line["completion"], line["reward"]) for line in lines(tmp_path)] == [
        ("2", 1.0), ("1", 0.0),
    ]  # fmt: skip


@pytest.mark.parametrize(("every", "logged"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (0, [])])
def test_only_every_so_many_steps(tmp_path, open_log, every, logged):
    log = open_log(every=every)
    for step in range(1, 5):
        log.log(step, [SAMPLE])
    assert [step for step in range(1, 5) if log.due(step)] == logged
    assert (steps(tmp_path) if logged else list(tmp_path.iterdir())) == logged


def test_texts_are_cut(tmp_path, open_log):
    open_log(max_chars=3).log(1, [replace(SAMPLE, prompt="é" * 9, completion="abcd")])
    (line,) = lines(tmp_path)
    assert (line["prompt"], line["completion"]) == ("ééé", "abc")


def test_every_text_is_one_line(tmp_path, open_log):
    """Line ends of every alphabet, and half a character as a tokenizer may leave it."""
    text = 'a\nb\r\u2028\x85"\ud83d'
    open_log().log(1, [replace(SAMPLE, completion=text)])
    (line,) = lines(tmp_path)
    assert line["completion"] == text


def test_numbers_of_numpy_and_those_that_are_not_finite(tmp_path, open_log, warnings):
    odd = replace(
        SAMPLE, rewards={"right": float("nan")}, advantage=np.float32(0.5),
        num_tokens=np.int64(2), versions=np.array([[1, 0, 2]]),
    )  # fmt: skip
    open_log().log(1, [odd])
    (line,) = lines(tmp_path)
    assert (line["rewards"], line["advantage"], line["num_tokens"]) == ({"right": None}, 0.5, 2)
    assert line["versions"] == [[1, 0, 2]] and not warnings


@pytest.mark.parametrize("keep_steps", [1, 3])
def test_only_the_newest_steps_remain(tmp_path, open_log, keep_steps):
    log = open_log(keep_steps=keep_steps)
    for step in range(1, 8):
        log.log(step, [SAMPLE, SAMPLE])
        newest = range(max(1, step - keep_steps + 1), step + 1)
        assert steps(tmp_path) == [at for at in newest for _ in range(2)]
    assert log.rows(7 - keep_steps) == [] and len(log.rows(7)) == 2
    assert steps(tmp_path) and list(tmp_path.iterdir()) == [tmp_path / "samples.jsonl"]
    open_log(keep_steps=1, keep_up_to=7)
    assert steps(tmp_path) == [7, 7], "also when fewer are kept than before"


def test_until_then_the_file_is_added_to(tmp_path, open_log):
    """Not written anew with every step, which would be quadratic where many are kept."""
    log = open_log(keep_steps=10)
    log.log(1, [SAMPLE])
    inode = (tmp_path / "samples.jsonl").stat().st_ino
    log.log(2, [SAMPLE])
    assert (tmp_path / "samples.jsonl").stat().st_ino == inode and steps(tmp_path) == [1, 2]


def test_rewinding(tmp_path, open_log):
    log = open_log()
    for step in (1, 2, 3):
        log.log(step, [SAMPLE])
    log.rewind(1)
    assert steps(tmp_path) == [1] and log.rows(2) == []
    log.log(2, [SAMPLE])
    assert steps(tmp_path) == [1, 2]


def test_a_step_that_comes_again_replaces_itself_and_what_followed(tmp_path, open_log):
    log = open_log()
    for step in (1, 2, 3, 2):
        log.log(step, earning(step))
    assert steps(tmp_path) == [1, 2]


def test_going_on_with_a_run(tmp_path, open_log):
    """From a checkpoint after step 2: as if the run had never been interrupted."""
    first = open_log()
    for step in (1, 2, 3, 4):
        first.log(step, earning(step))
    uninterrupted = (tmp_path / "samples.jsonl").read_text()
    second = open_log(keep_up_to=2)
    assert steps(tmp_path) == [1, 2] and second.rows(2) == first.rows(2)
    for step in (3, 4):
        second.log(step, earning(step))
    assert (tmp_path / "samples.jsonl").read_text() == uninterrupted


def test_a_new_run_begins_anew(tmp_path, open_log):
    open_log().log(9, [SAMPLE])
    open_log().log(1, [SAMPLE])
    assert steps(tmp_path) == [1]


@given(st.data())
def test_a_run_killed_while_it_wrote(tmp_path_factory, data):
    """Cut anywhere, the file gives the lines that are whole, and is whole again."""
    folder = tmp_path_factory.mktemp("killed")
    options = {"per_step": 2, "every": 1, "keep_steps": 5}
    log = SampleLog(folder, **options)
    for step in (1, 2, 3):
        log.log(step, earning(0.0, step))
    path = folder / "samples.jsonl"
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    damage = data.draw(st.sampled_from([b"", b"\0\0", b"\xff", b"[1]", b'{"step": "x"}']))
    path.write_bytes(content[:cut] + damage)
    again = SampleLog(folder, **options, keep_up_to=3)
    whole = content[: content.rfind(b"\n", 0, cut) + 1].splitlines(keepends=True)
    if content[cut : cut + 1] == b"\n" and not damage:
        whole = content[: cut + 1].splitlines(keepends=True)
    assert path.read_bytes() == b"".join(whole)
    again.log(4, [SAMPLE])
    assert steps(folder)[-1] == 4 and len(steps(folder)) == len(whole) + 1


def test_a_disk_that_is_full_for_a_while(tmp_path, open_log, warnings, monkeypatch):
    """One warning; when there is room again, what was missed is written too."""
    log = open_log()
    log.log(1, [SAMPLE])
    with monkeypatch.context() as full:
        def refuse(*arguments, **options):
            raise OSError(28, "No space left on device")

        full.setattr("pathlib.Path.open", refuse)
        log.log(2, [SAMPLE])
        log.log(3, [SAMPLE])
        log.rewind(2)
        log.log(3, [SAMPLE])
    assert steps(tmp_path) == [1] and len(log.rows(3)) == 1
    assert len(warnings) == 1 and "No space left on device" in warnings[0]
    log.log(4, [SAMPLE])
    assert steps(tmp_path) == [1, 2, 3, 4] and len(warnings) == 1


def test_a_line_that_was_written_by_half_is_no_part_of_the_next(tmp_path, open_log):
    log = open_log()
    log.log(1, [SAMPLE])
    with pytest.MonkeyPatch.context() as full:
        def half(self, records):
            with self._path.open("a") as file:
                file.write('{"step": 2, "pro')
            raise OSError(28, "No space left on device")

        full.setattr(SampleLog, "_append", half)
        log.log(2, [SAMPLE])
    log.log(3, [SAMPLE])
    assert steps(tmp_path) == [1, 2, 3]


def test_a_folder_that_cannot_be_written(tmp_path, warnings):
    blocker = tmp_path / "file"
    blocker.write_text("")
    log = SampleLog(
        blocker, per_step=1, every=1, keep_steps=1, keep_up_to=3, warn=warnings.append
    )
    log.log(1, [SAMPLE])
    log.log(2, [SAMPLE])
    log.rewind(1)
    assert len(warnings) == 1 and "cannot log samples" in warnings[0]


def test_a_sample_that_cannot_be_written(tmp_path, open_log, warnings):
    log = open_log()
    log.log(1, [replace(SAMPLE, advantage="much")])
    log.log(2, [SAMPLE])
    assert steps(tmp_path) == [2] and len(warnings) == 1


def test_a_step_without_samples_leaves_no_trace(tmp_path, open_log):
    log = open_log(keep_steps=1)
    log.log(1, [SAMPLE])
    log.log(2, [])
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("setting", ["per_step", "keep_steps"])
def test_settings_out_of_range(open_log, setting):
    with pytest.raises(ValueError, match=r"per_step and keep_steps must be at least 1, got .*0"):
        open_log(**{setting: 0})


class Run:
    """A wandb run that remembers."""

    def __init__(self, logged):
        self.logged = logged

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self, exit_code):
        pass


@pytest.fixture
def logged(monkeypatch):
    """What wandb was sent: `(step, values)`."""
    sent = []
    monkeypatch.setattr(wandb, "init", lambda **settings: Run(sent))
    return sent


def test_rows_make_a_table(tmp_path, open_log, logged):
    log = open_log()
    log.log(1, [SAMPLE, replace(SAMPLE, reward=None, rewards={}, advantage=None)])
    with MetricsLog(tmp_path) as metrics:
        metrics.log_table(1, "samples", COLUMNS, log.rows(1))
    ((step, values),) = logged
    assert step == 1 and values.keys() == {"samples"}
    assert values["samples"].columns == list(COLUMNS)
    assert values["samples"].data == [
        [1, "1+1=", "2", 1.5, '{"right": 1.0, "short": 0.5}', 0.25, 3, "stop", "[[4, 0, 3]]"],
        [1, "1+1=", "2", None, "{}", None, 3, "stop", "[[4, 0, 3]]"],
    ]


def test_tables_go_no_step_back(tmp_path, logged):
    with MetricsLog(tmp_path) as metrics:
        metrics.log(2, {"reward": 1.0})
        for step in (1, 2, 4, 3):
            metrics.log_table(step, "t", ["x"], [[step]])
        metrics.log(3, {"reward": 2.0})
        metrics.log(5, {"reward": 3.0})
    assert [step for step, _ in logged] == [2, 2, 4, 5]
    assert len(metrics.history) == 3, "a table is no record"


def test_a_table_may_mix_types(tmp_path, logged, warnings):
    with MetricsLog(tmp_path, warn=warnings.append) as metrics:
        metrics.log_table(1, "t", ["x"], [["text"], [1], [None], [0.5]])
    assert len(logged) == 1 and not warnings


def test_a_broken_table_is_told_of_and_metrics_go_on(tmp_path, logged, warnings):
    with MetricsLog(tmp_path, warn=warnings.append) as metrics:
        metrics.log_table(1, "t", ["x", "y"], [[1]])
        metrics.log(1, {"reward": 1.0})
    assert logged == [(1, {"reward": 1.0})]
    assert len(warnings) == 1 and "'t' is no table" in warnings[0]


def test_wandb_dying_at_a_table(tmp_path, logged, warnings, monkeypatch):
    def die(self, values, step):
        raise ConnectionError("service process is gone")

    monkeypatch.setattr(Run, "log", die)
    with MetricsLog(tmp_path, warn=warnings.append) as metrics:
        metrics.log_table(1, "t", ["x"], [[1]])
        metrics.log_table(2, "t", ["x"], [[1]])
    assert len(warnings) == 1 and "wandb stopped logging" in warnings[0]


def test_without_wandb_no_table_is_made(tmp_path, warnings):
    with MetricsLog(tmp_path, wandb_mode="disabled", warn=warnings.append) as metrics:
        metrics.log_table(1, "t", ["x", "y"], [[1]])
    assert not warnings


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("samples_per_step=0", "logging.samples_per_step must be at least 1, got 0"),
        ("samples_every=-1", "logging.samples_every must be at least 0, got -1"),
        ("samples_keep=0", "logging.samples_keep must be at least 1, got 0"),
    ],
)
def test_configured_wrongly(option, message):
    with pytest.raises(ConfigError, match=message):
        parse_config([f"--logging.{option}"])
