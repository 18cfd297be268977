"""The arrows between the packages, read from their import statements."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("attention", "kvcache", "rollout", "trainer_bridge", "recipes")
ALLOWED = {
    "attention": {"attention"},
    "kvcache": {"kvcache"},
    "rollout": {"rollout", "attention", "kvcache"},
    "trainer_bridge": {"trainer_bridge", "rollout", "attention"},
    "recipes": {"recipes", "trainer_bridge", "rollout"},
}
ONLY_IN = {
    "ray": {"rollout/pool.py", "rollout/remote.py", "trainer_bridge/colocation.py"},
    "accelerate": {"trainer_bridge/learner.py"},
}
TORCH_FREE = [
    *(f"kvcache/{name}.py" for name in ("block", "keys", "manager", "pool", "table")),
    *(
        f"rollout/{name}.py"
        for name in (
            "noise", "policy", "request", "rollout_batch", "sampling", "scheduler", "stopping",
            "transport",
        )
    ),
]


def imported(source: str) -> set[str]:
    """Top-level names of every import statement, those inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def sources() -> dict[str, set[str]]:
    return {
        str(path.relative_to(ROOT)): imported(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def wrong_arrows(files: dict[str, set[str]]) -> list[str]:
    return [
        f"{file} imports {name}"
        for file, names in files.items()
        for name in sorted(names & set(PACKAGES) - ALLOWED[file.partition("/")[0]])
    ]


def test_arrows():
    files = sources()
    assert len(files) > 60
    assert wrong_arrows(files) == []


def test_the_check_can_fail():
    source = "def f():\n    from trainer_bridge.arena import WeightArena\n"
    assert wrong_arrows({"rollout/engine.py": imported(source)}) == [
        "rollout/engine.py imports trainer_bridge"
    ]


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_stays_where_it_belongs(library):
    assert {file for file, names in sources().items() if library in names} == ONLY_IN[library]


@pytest.mark.parametrize("library", ["datasets", "wandb"])
def test_only_recipes_know_data_and_logging(library):
    users = {file.partition("/")[0] for file, names in sources().items() if library in names}
    assert users == {"recipes"}


@pytest.mark.parametrize("file", TORCH_FREE)
def test_bookkeeping_is_torch_free(file):
    assert "torch" not in sources()[file]
