"""Finds the task a configuration names."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from recipes.config import TaskConfig
from recipes.errors import RunError, sentence
from recipes.tasks.task import Task, assert_disjoint

BUILT_IN = {
    "embedded": "recipes.tasks.embedded:load",
    "chain_sum": "recipes.tasks.arithmetic:load",
    "basic_arithmetic": "recipes.tasks.arithmetic:load",
}


def load_task(config: TaskConfig, seed: int) -> Task:
    """Call the task's loader with `(config, seed)` and check that its two splits are disjoint.

    A loader is `module:function`; the built-in ones have short names. Modules are imported on
    demand, because each task has packages of its own. RunError when there is no such loader or a
    package of it is missing.
    """
    location = BUILT_IN.get(config.name, config.name)
    module_name, _, function_name = location.partition(":")
    if not function_name:
        raise RunError(
            f"task.name must be one of {', '.join(BUILT_IN)} or module:function, "
            f"got {config.name!r}"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RunError(f"task {config.name!r} cannot be imported: {sentence(error)}") from error
    loader: Callable[[TaskConfig, int], Task] | None = getattr(module, function_name, None)
    if loader is None:
        raise RunError(f"task {config.name!r}: {module_name} has no function {function_name!r}")
    task = loader(config, seed)
    assert_disjoint(task)
    return task
