"""Errors as one sentence, the folder of a run, and the sources of first weights (F6)."""

import cmath
import math
import signal

import pytest

from recipes.config import RunConfig, TaskConfig
from recipes.errors import RunError, sentence
from recipes.models import model_location
from recipes.output import prepare_output
from recipes.stopping import Stopped, stop_signals
from recipes.tasks.catalog import load_task


class RemoteError(RuntimeError):
    def __init__(self, cause):
        super().__init__("Traceback (most recent call last):\n  File ...\n" + repr(cause))
        self.cause = cause


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a  b\nc"), "a b c"),
        (ValueError(), "ValueError"),
        (KeyError("x"), "missing key 'x'"),
        (RemoteError(RemoteError(ValueError("inner"))), "inner"),
        (MemoryError("of 3 GiB"), "out of memory of 3 GiB"),
        (OSError(28, "No space left on device"), "No space left on device (free some space"),
        (PermissionError(13, "Permission denied", "/a"), "/a: Permission denied (choose one"),
    ],
)
def test_sentence(error, text):
    assert sentence(error).startswith(text)
    assert "\n" not in sentence(error)


def test_output_folder_holds_the_configuration(tmp_path):
    config = RunConfig(output=str(tmp_path / "deep" / "run"))
    folder = prepare_output(config)
    assert folder == tmp_path / "deep" / "run"
    assert (folder / "config.yaml").is_file()


def test_output_folder_without_a_name_is_always_a_new_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = prepare_output(RunConfig()), prepare_output(RunConfig())
    assert first != second
    assert first.parent == tmp_path / "runs"


def test_a_folder_with_a_run_is_refused_and_untouched(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match="already holds a run; choose another folder with --output"):
        prepare_output(RunConfig(output=str(tmp_path)))
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("folder", ["file/run", "/proc/run"])
def test_an_unwritable_output_folder(tmp_path, folder):
    """F6. These refuse the superuser too: a file in the way, a file system that takes no folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write to the output folder .*--output"):
        prepare_output(RunConfig(output=str(tmp_path / folder)))


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere", "nowhere", "a/b/c"])
def test_a_missing_model(tmp_path, model):
    with pytest.raises(RunError, match=rf"there is no model '{model}'; give --model"):
        model_location(model, tmp_path, 0)


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(RunError, match=r"has no config\.json"):
        model_location(str(tmp_path), tmp_path, 0)


def test_a_model_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert model_location(str(tmp_path), tmp_path, 0) == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chainsum", "one of embedded, calculator, chain_sum, basic_arithmetic or module"),
        ("no_such_module:load", "task.name 'no_such_module:load' cannot be imported"),
        ("recipes.data:nothing", "recipes.data has no function 'nothing'"),
    ],
)
def test_a_missing_task(name, message):
    with pytest.raises(RunError, match=message):
        load_task(TaskConfig(name=name), 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_run_through_its_own_code(number, code):
    """F5: also a second one during the clean-up of the first; handlers are put back."""
    before = signal.getsignal(number)
    with stop_signals(), pytest.raises(Stopped) as second:
        try:
            signal.raise_signal(number)
        except Stopped as first:
            assert first.exit_code == code
            signal.raise_signal(number)
    assert second.value.exit_code == code
    assert isinstance(second.value, KeyboardInterrupt)
    assert signal.getsignal(number) is before


def test_reward_functions_of_one_name_do_not_hide_each_other():
    """Alone, each goes by its short name; beside its namesake by where it is."""
    one, other = "math:exp", "cmath:exp"
    assert list(load_task(TaskConfig(rewards=(one, "math:sin")), 0).rewards) == ["exp", "sin"]
    both = load_task(TaskConfig(rewards=(one, other)), 0).rewards
    assert both == {one: math.exp, other: cmath.exp}
    for wrong in ((), (one, one)):
        with pytest.raises(ValueError, match="at least one function, each once"):
            TaskConfig(rewards=wrong)
