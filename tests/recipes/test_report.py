"""The report: what was measured, the table of promises, and honest words for what was not."""

from recipes.config import RunConfig, WarmStartConfig
from recipes.evaluation import Evaluation
from recipes.report import RunRecord, write_report


def evaluation(reward):
    examples = (("2|3=", "five", 1.0), ("4=", "", None))
    return Evaluation(reward, {}, 40, 0.25, 1.0, examples)


def test_before_and_after(tmp_path):
    record = RunRecord(
        RunConfig(warm_start=WarmStartConfig(steps=7)),
        [{"step": step, "reward": step / 10, "entropy": 1.0} for step in range(1, 21)],
        evaluations=[(0, evaluation(0.25)), (20, evaluation(0.75))],
        weights_bytes=3 * 2**20,
        memory_before={"trainer": 2**20},
        memory_after={"trainer": 2**21, "rollout-0": 5 * 2**20},
        steps_done=20,
        seconds=75,
        status="finished",
    )
    text = write_report(tmp_path, record).read_text()
    assert "7 supervised steps, then 20 of 100 steps in 1:15; finished" in text
    assert "Before (after the warm start) 0.25, after 0.75 (+0.5000)" in text
    assert "| reward | 0.15 | 1.95 |" in text
    assert "The weights (3.0 MiB)" in text and "| rollout-0 | - | 5.0 |" in text
    assert "| `2\\|3=` | `five` | 1 |" in text and "| `4=` | (empty) | - |" in text
    assert text.count("| not measured |") == 7
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_where_the_time_goes(tmp_path):
    """Shares of phases; totals of several phases at once are not phases."""
    step = {"reward": 0.5, "timing_s/rollout": 2.0, "timing_s/update": 1.0, "timing_s/step": 3.0,
            "timing_s/wall": 3.1, "timing_s/train": 0.9}  # fmt: skip
    history = [{"step": i, **step} for i in (1, 2)] + [{"step": 2, "timing_s/evaluation": 3.0}]
    record = RunRecord(RunConfig(), history, checkpoint_seconds=1.0)
    text = write_report(tmp_path, record).read_text()
    section = text.split("## Where the time goes")[1].split("##")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert rows == [
        "| rollout | 4 | 40% |", "| evaluation | 3 | 30% |", "| update | 2 | 20% |",
        "| checkpoint | 1 | 10% |",
    ]  # fmt: skip
    assert "they do not add up" not in text


def test_a_run_that_never_started(tmp_path):
    record = RunRecord(RunConfig(), [], status="failed: no model")
    text = write_report(tmp_path, record).read_text()
    assert "failed: no model" in text
    assert "Not evaluated." in text and "No step was completed." in text


def test_every_table_row_has_the_columns_of_its_head(tmp_path):
    """A stray bar in a name or a prompt would shift a row."""
    record = RunRecord(
        RunConfig(),
        [{"step": 1, "reward": 0.5}],
        evaluations=[(0, evaluation(0.5))],
        memory_before={"trainer": 1},
    )
    columns = 0
    for line in write_report(tmp_path, record).read_text().splitlines():
        bars = line.replace("\\|", "").count("|")
        if not line.startswith("|"):
            columns = 0
            continue
        assert bars == (columns or bars), line
        columns = bars
