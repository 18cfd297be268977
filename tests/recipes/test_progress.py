"""The display: plain lines without a terminal, a live table with one."""

import io

import pytest
from rich.console import Console

from recipes.progress import RunDisplay, format_duration


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_plain_lines_without_a_terminal():
    out, clock = io.StringIO(), Clock()
    with RunDisplay("run", 4, Console(file=out, width=40), clock) as display:
        display.note("warm start [done]")
        display.update(0, {"heldout/reward": 0.25})
        clock.now += 30
        display.update(
            1,
            {
                "reward": 0.5, "rollout/tokens_per_second": 1234.5, "rollout/policy_version": 3,
                "timing_s/rollout": 0.256, "timing_s/update": 1.5,
            },
        )
    assert out.getvalue().splitlines() == [
        "warm start [done]",
        "step 0/4 | reward - | held-out 0.250 | tokens/s - | rollout s - | update s - | version - "
        "| left -",
        "step 1/4 | reward 0.500 | held-out 0.250 | tokens/s 1234 | rollout s 0.26 | update s 1.50 "
        "| version 3 | left 1:30",
    ]
    assert "\x1b" not in out.getvalue()


def test_live_table_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with RunDisplay("my run", 2, console) as display:
        display.update(1, {"reward": 0.125, "heldout/reward": float("nan")})
        display.note("a sentence")
    text = out.getvalue()
    assert "my run" in text and "0.125" in text and "a sentence" in text
    assert text.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_the_terminal_is_restored_on_an_error():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True)
    with pytest.raises(KeyboardInterrupt), RunDisplay("run", 2, console):
        raise KeyboardInterrupt
    assert "\x1b[?25h" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (75, "1:15"), (4000, "1:06:40"), (-3, "0:00")]
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text
