"""`python -m recipes.report RUN ...`: from folders to a table, without the runs themselves."""

import json

import pytest
import yaml

from recipes.report import main

RUNS = {
    "first": ("grpo", 1, [0.1, 0.5], [0.0, 0.25, 1.0]),
    "second": ("dapo", 2, [0.1, 0.9], [0.5, 0.5, 0.5]),
    "unfinished": ("rloo", 3, [], []),
}


@pytest.fixture
def folders(tmp_path):
    for name, (algorithm, seed, heldout, rewards) in RUNS.items():
        folder = tmp_path / name
        folder.mkdir()
        config = {"algorithm": {"name": algorithm}, "seed": seed}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        records = [
            {"step": i + 1, "reward": reward, "timing_s/step": 0.5, "completions/mean_length": None}
            for i, reward in enumerate(rewards)
        ] + [{"step": i, "heldout/reward": value} for i, value in enumerate(heldout)]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "metrics.jsonl").write_text(lines)
    return tmp_path


def test_runs_side_by_side(folders, capsys):
    picture = folders / "curves.png"
    code = main([*(str(folders / name) for name in RUNS), f"--picture={picture}"])
    assert code == 0
    head, line, *rows = capsys.readouterr().out.splitlines()[:5]
    assert head.startswith("| run | algorithm | seed | steps | held-out before") and "---" in line
    assert rows == [
        "| second | dapo | 2 | 3 | 0.100 | 0.900 | 0.500 | - | 0.500 |",
        "| first | grpo | 1 | 3 | 0.100 | 0.500 | 1.000 | - | 0.500 |",
        "| unfinished | rloo | 3 | 0 | - | - | - | - | - |",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("broken", ["missing", "config.yaml", "metrics.jsonl"])
def test_a_folder_without_a_run_is_named(folders, capsys, broken):
    if broken != "missing":
        (folders / "first" / broken).write_text("{")
    where = folders / ("missing" if broken == "missing" else "first")
    assert main([str(where), f"--picture={folders / 'curves.png'}"]) == 1
    said = capsys.readouterr().err
    assert f"error: {where} holds no run that can be read" in said and said.count("\n") == 1
