"""The arrows between the packages, read from their import statements."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
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
    "ray": {
        "rollout/pool.py", "rollout/membership.py", "rollout/remote.py",
        "trainer_bridge/cluster.py", "trainer_bridge/colocation.py", "trainer_bridge/mirrors.py",
        "trainer_bridge/placement.py",
    },
    "accelerate": {"trainer_bridge/learner.py"},
}
TORCH_FREE = [
    *(
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "kvcache").glob("*.py"))
        if path.name != "storage.py"
    ),
    *(
        f"rollout/{name}.py"
        for name in (
            "admission", "detokenizer", "generation_config", "logit_edits", "noise", "policy",
            "request", "rollout_batch", "running", "sampling", "sampling_rows", "scheduler",
            "step_plan", "stopping", "tasks", "transport",
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


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        ("attention/tiled.py", "import kvcache.block", "kvcache"),
        ("kvcache/storage.py", "from attention import x", "attention"),
        ("kvcache/pool.py", "import rollout as r", "rollout"),
        ("rollout/pool.py", "if True:\n    import trainer_bridge, os", "trainer_bridge"),
        ("trainer_bridge/learner.py", "try:\n    import recipes.algorithms\nfinally: 0", "recipes"),
        ("trainer_bridge/scoring.py", "from kvcache.pool import BlockPool", "kvcache"),
        ("recipes/grpo.py", "from attention import select_backend", "attention"),
    ],
)
def test_every_arrow_is_watched(file, source, wrong):
    """The check can fail, for each arrow and each form of import."""
    assert wrong_arrows({file: imported(source)}) == [f"{file} imports {wrong}"]


def test_what_is_allowed_passes():
    source = "from __future__ import annotations\nfrom rollout import engine\nimport torch.nn"
    assert imported(source) == {"__future__", "rollout", "torch"}
    assert wrong_arrows({"recipes/grpo.py": imported(source)}) == []


def test_no_relative_import_hides_an_arrow():
    """`imported` reads absolute names, and those are all there are."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                assert not (isinstance(node, ast.ImportFrom) and node.level), path


@pytest.mark.parametrize(("package", "absent"), [
    ("kvcache", ("torch", "ray")),
    ("attention", ("ray", "accelerate", "kvcache", "rollout")),
    ("rollout", ("ray", "accelerate", "trainer_bridge")),
    ("rollout.actor", ("ray", "trainer_bridge", "recipes")),
    ("trainer_bridge.learner", ("recipes", "datasets", "wandb")),
])
def test_an_import_brings_nothing_else_along(package, absent):
    """What a process really loads, through however many files."""
    code = f"import sys, {package}; print(*(m for m in {absent} if m in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == []


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
