"""Finds the task a configuration names."""

from __future__ import annotations

from recipes.config import TaskConfig
from recipes.errors import RunError
from recipes.plugins import named_function
from recipes.tasks.task import Task, assert_disjoint, with_rewards

BUILT_IN = {
    "embedded": "recipes.tasks.embedded:load",
    "calculator": "recipes.tasks.calculator:load",
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
    if ":" not in location:
        raise RunError(
            f"task.name must be one of {', '.join(BUILT_IN)} or module:function, "
            f"got {config.name!r}"
        )
    task: Task = named_function("task.name", location, {})(config, seed)
    assert_disjoint(task)
    if config.rewards is None:
        return task
    short = [location.rpartition(":")[2] for location in config.rewards]
    names = short if len(set(short)) == len(short) else config.rewards  # none hides another
    functions = [named_function("task.rewards", location, {}) for location in config.rewards]
    return with_rewards(task, dict(zip(names, functions, strict=True)))
