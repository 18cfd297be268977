"""The loop of every recipe, from the command line to the report, top to bottom.

A recipe (`grpo.py`, `ppo.py`) says how a step is sampled and what it teaches; `main` runs the one
that the algorithm's preset names.

Exit codes: 0 the run finished; 130 Ctrl-C (143 SIGTERM): ended cleanly, checkpoint kept; 2 the
configuration is wrong; 1 anything else, with the cause in one sentence on stderr.
"""

from __future__ import annotations

import importlib
import io
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

from recipes.alarms import Alarms
from recipes.algorithms.presets import PRESETS, Preset
from recipes.checkpoints import Checkpoint, Checkpoints
from recipes.command_line import ConfigError, parse_config
from recipes.config import RunConfig
from recipes.errors import RunError, sentence
from recipes.evaluation import evaluate
from recipes.lesson import Lesson
from recipes.metrics import MetricsLog
from recipes.models import model_location
from recipes.output import holds_run, prepare_output
from recipes.plan import plan_run
from recipes.plugins import configured_preset
from recipes.progress import RunDisplay
from recipes.recipe import Recipe, Run
from recipes.report import RunRecord, write_report
from recipes.sampled_step import SampledStep
from recipes.samples import COLUMNS, SampleLog, choose, samples_of
from recipes.sft import demonstration_batches, warm_start
from recipes.step_metrics import version_metrics, versions_behind
from recipes.stopping import Stopped, StopSignals, stop_signals
from recipes.tasks.catalog import load_task
from recipes.tasks.task import Demonstrates, Task, encode_prompt
from recipes.trainer_settings import trainer_config
from rollout import EngineConfig, RolloutBatch, Tokenizer, TornWeights
from trainer_bridge import Colocation, Placement, TrainerLost

T = TypeVar("T")


def main(program: str, default_config: Path, arguments: Sequence[str] | None = None) -> int:
    """Run from command-line arguments; returns the exit code and never raises.

    program: the module that was started; default_config: what it does without `--config`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # in a pipe too: live, and in order with stderr
        sys.stdout.reconfigure(line_buffering=True)
    try:
        given = sys.argv[1:] if arguments is None else arguments
        config = parse_config(given, default_config, program)
        _check_program(program, config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output: Path | None = None
    try:
        if "--dry-run" in given:
            return dry_run(config)
        with stop_signals():
            output = prepare_output(config)
            return run(config, output)
    except Stopped as stop:
        print("stopped before a clean end; earlier checkpoints are complete", file=sys.stderr)
        return stop.exit_code
    except Exception as error:
        print(f"error: {sentence(error)}{_keep_traceback(output)}", file=sys.stderr)
        return 1


def dry_run(config: RunConfig) -> int:
    """Print what the run would take; 1 if it does not fit."""
    task = load_task(config.task, config.seed)
    with TemporaryDirectory() as folder:  # for a policy that is made on the spot
        location = Path(model_location(config.model, Path(folder), config.seed))
        tokenizer = Tokenizer.from_folder(location)
        prompts = task.train[:64]["prompt"]
        tokens = sum(len(encode_prompt(tokenizer, prompt)) for prompt in prompts) / len(prompts)
        plan = plan_run(config, configured_preset(config), location, math.ceil(tokens))
    print(plan.text())
    return 0 if plan.fits else 1


def run(
    config: RunConfig, output: Path, task: Task | None = None, preset: Preset | None = None
) -> int:
    """Train as configured, writing everything under `output`. Returns the exit code.

    `task` and `preset`, the algorithm, replace those that the configuration names. An error passes
    through, after the report has been written with its cause.
    """
    print(f"output: {output}")
    resuming = config.resume is not None and holds_run(output)
    checkpoints = Checkpoints(output / "checkpoints", config.checkpoint.keep)
    start = checkpoints.newest(_warn) if resuming else None
    with MetricsLog(
        output,
        wandb_mode=config.logging.wandb,
        project=config.logging.project,
        run_name=output.name,
        config=asdict(config),
        keep=_records_of(start) if resuming else None,
    ) as metrics:
        record = RunRecord(config, metrics.history)
        if resuming:
            record.restore(start)
        samples = SampleLog(
            output,
            per_step=config.logging.samples_per_step,
            every=config.logging.samples_every,
            keep_steps=config.logging.samples_keep,
            keep_up_to=record.steps_done if resuming else None,
        )
        started = time.monotonic()
        try:
            preset = preset or configured_preset(config)
            task = task or load_task(config.task, config.seed)
            with Colocation(
                model_location(config.model, output, config.seed),
                rollout_actors=config.rollout.actors,
                placement=Placement(nodes=config.rollout.nodes),
                trainer=trainer_config(config, preset),
                engine=EngineConfig(
                    max_batch_size=config.rollout.max_batch_size, exact=config.rollout.exact
                ),
                checkpoint=record.checkpoint,
                heartbeat_timeout_s=config.rollout.heartbeat_timeout,
                max_restarts=config.rollout.restarts,
            ) as colocation:
                exit_code = train(
                    Run(config, preset, task, colocation, metrics, samples, record, checkpoints)
                )
        except BaseException as error:
            stopped = isinstance(error, Stopped)
            record.status = f"{'stopped' if stopped else 'failed'}: {sentence(error)}"
            with suppress(OSError):
                _finish(record, output, started)
            raise
        _finish(record, output, started)
    return exit_code


def train(run: Run) -> int:
    """From where the record stands to the last step. Returns the exit code.

    A trainer that is lost is started again from the newest checkpoint, and the steps since then
    are taken again, with the same result. After Ctrl-C or SIGTERM the weights are still saved.
    """
    config, colocation, record = run.config, run.colocation, run.record
    # Starting Ray put its own SIGTERM handler in place; within the loop it is ours again.
    with stop_signals() as signals, RunDisplay(config.name, config.steps) as display:
        record.exactness = colocation.exactness
        try:
            for restarts_left in reversed(range(config.trainer_restarts + 1)):
                try:
                    train_to_the_end(run, signals, display)
                    break
                except (TrainerLost, TornWeights) as error:
                    if not restarts_left:
                        raise
                    start = run.checkpoints.newest(display.note)
                    record.restore(start)
                    run.metrics.rewind(_records_of(start))
                    run.samples.rewind(record.steps_done)
                    display.note(
                        f"{sentence(error)}: a new trainer goes on after step {record.steps_done}"
                    )
                    record.policy_version = colocation.restart_trainer(record.checkpoint)
                    record.exactness = colocation.exactness
            record.memory_after = colocation.memory()
            record.weights = colocation.verify_weights()
            record.status = "finished"
            return 0
        except Stopped as stop:
            if stop.at_once:
                raise
            display.note(f"{stop}: saving the weights, then ending; once more to end at once")
            _checkpoint(run)
            record.status = f"stopped by {stop}"
            return stop.exit_code


def train_to_the_end(run: Run, signals: StopSignals, display: RunDisplay) -> None:
    """Warm start, evaluations, training steps, checkpoints; the record says what is done already.

    What changes the weights, and what says so, is never parted by a signal. With
    `rollout.overlap` the rollouts of the following step are sampled on another thread.
    """
    config, record = run.config, run.record
    recipe = cast(Recipe, importlib.import_module(run.preset.recipe))
    sample = partial(recipe.sample, run)
    exact = all(exactness.on for exactness in record.exactness.values())
    alarms = Alarms(
        on_policy=exact and not config.rollout.overlap,
        compares_groups=config.algorithm.compares_groups,
    )
    if record.warm_start_done < config.warm_start.steps:
        _warm_start(run, signals)
        display.note(f"warm start: {config.warm_start.steps} supervised steps")

    record.weights_bytes = run.colocation.trainer.get_stats()["arena_bytes"]
    shown: dict[str, float] = {}
    while True:
        step = record.steps_done
        if _due(step, config.evaluation.every, config.steps) and not record.evaluated(step):
            shown |= _evaluate(run, signals)
        display.update(step, shown)
        if step and _due(step, config.checkpoint.every, config.steps):
            with signals.held():
                _checkpoint(run)
        if step >= config.steps:
            return
        if not record.memory_before:
            record.memory_before = run.colocation.memory()

        began = time.monotonic()
        if record.ahead is None:
            record.ahead = sample(record.prompts_drawn, step + 1)
        with signals.held():
            taken, following = record.ahead, None
            if config.rollout.overlap and step + 1 < config.steps:
                following = _beside(sample, taken.prompts_drawn, step + 2)
            taken.clock.skip()
            try:
                lesson = recipe.lesson(run, taken)
            except BaseException:
                if following is not None:
                    wait([following])  # nobody else samples when a new trainer begins
                raise
            shown = update_step(run, taken, lesson, following)
            shown["timing_s/wall"] = time.monotonic() - began
            record.steps_done, record.prompts_drawn = step + 1, taken.prompts_drawn
            record.ahead, record.carried = None, dict(lesson.carried)
            run.metrics.log(step + 1, shown)
            if run.samples.due(step + 1):
                chosen = choose(taken.rewards.total, config.logging.samples_per_step)
                rows = samples_of(taken, lesson, chosen, run.colocation.tokenizer)
                run.samples.log(step + 1, rows)
                run.metrics.log_table(step + 1, "samples", COLUMNS, run.samples.rows(step + 1))
            for alarm in alarms.check(step + 1, shown):
                display.note(alarm)
            if following is not None:
                record.ahead = following.result()


def update_step(
    run: Run, sample: SampledStep, lesson: Lesson, following: Future[SampledStep] | None
) -> dict[str, float]:
    """One publication (or several, with minibatches), confirmed by every actor. All metrics.

    following: rollouts that are sampled meanwhile; the weights change when they have ended.
    """
    trainer, record = run.colocation.trainer, run.record
    stats: dict[str, float] = {}
    behind = versions_behind(sample.batch, record.policy_version)
    rollouts_end = None if following is None else partial(wait, [following])
    if len(lesson.batch):
        stats = trainer.step(
            lesson.batch,
            lesson.advantages,
            lesson.algorithm,
            lesson.columns,
            wait_for_rollouts=rollouts_end,
        )
        record.policy_version = int(stats["rollout/policy_version"])
    elif rollouts_end is not None:
        rollouts_end()
    sample.clock.lap("update")
    run.colocation.confirm_publication(record.policy_version)
    sample.clock.lap("confirm")
    sync = run.config.algorithm.ref_model_sync_steps
    has_reference = trainer_config(run.config, run.preset).reference
    if has_reference and sync and (record.steps_done + 1) % sync == 0:
        trainer.reset_from_policy("reference")
    return {
        **sample.metrics, **lesson.metrics, **stats, **version_metrics(sample.batch), **behind,
        **sample.clock.metrics(),
    }  # fmt: skip


def _warm_start(run: Run, signals: StopSignals) -> None:
    """The supervised steps that are still to do; critic and reference policy, if there are any,
    begin as the policy that comes out."""
    record, trainer, steps = run.record, run.colocation.trainer, run.config.warm_start.steps
    settings = trainer_config(run.config, run.preset)
    there = {"critic": settings.critic is not None, "reference": settings.reference}
    updates = warm_start(trainer, _demonstrations(run))
    for done in range(record.warm_start_done + 1, steps + 1):
        with signals.held():
            stats = next(updates)
            if done == steps:
                trainer.reset_from_policy(*(name for name, present in there.items() if present))
            record.warm_start_done = done
            record.policy_version = int(stats["rollout/policy_version"])
            run.metrics.log(0, {f"warm_start/{name}": v for name, v in stats.items()})
    with signals.held():
        _checkpoint(run)


def _evaluate(run: Run, signals: StopSignals) -> dict[str, float]:
    """Held-out reward of the weights as they are, recorded and logged."""
    config, step = run.config, run.record.steps_done
    evaluation = evaluate(
        run.colocation.pool.run_batch,
        run.colocation.tokenizer,
        run.task,
        max_tokens=config.rollout.max_tokens,
        max_turns=config.rollout.max_turns,
        num_prompts=config.evaluation.prompts,
        num_samples=config.evaluation.samples,
        pass_at=config.evaluation.pass_at,
        temperature=config.evaluation.temperature,
        pass_reward=config.evaluation.pass_reward,
        seed=config.seed,
    )
    with signals.held():
        run.record.evaluations.append((step, evaluation))
        run.metrics.log(step, evaluation.metrics())
    return evaluation.metrics()


def _demonstrations(run: Run) -> Iterator[RolloutBatch]:
    """The warm start's batches that are still to come."""
    task, config = run.task, run.config
    if not isinstance(task, Demonstrates):
        raise RunError(f"task {task.name!r} has no demonstrations; set warm_start.steps to 0")
    batches = demonstration_batches(
        task,
        run.colocation.tokenizer,
        config.warm_start.steps,
        config.warm_start.batch_size,
        config.seed,
    )
    return islice(batches, run.record.warm_start_done, None)


def _beside(work: Callable[..., T], *arguments: Any) -> Future[T]:
    """The work on a thread of its own, which nobody has to wait for at the end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="rollouts ahead", daemon=True).start()
    return future


def _checkpoint(run: Run) -> None:
    """Save the state after `record.steps_done` steps. Not to be parted by a signal."""
    record = run.record

    def save(folder: Path) -> int:
        version = run.colocation.trainer.save_checkpoint(str(folder))
        if version != record.policy_version:
            raise RunError(
                f"the weights are policy version {version}, but after step {record.steps_done} "
                f"they were {record.policy_version}: somebody else updated them"
            )
        if record.ahead is not None:
            record.ahead.save(folder)
        return version

    began = time.monotonic()
    record.checkpoint = run.checkpoints.write(record.steps_done, record.state(), save)
    record.checkpoint_seconds += time.monotonic() - began


def _records_of(start: Checkpoint | None) -> int:
    """How many records of metrics there were when the checkpoint was written."""
    return 0 if start is None else int(start.state["records"])


def _check_program(program: str, config: RunConfig) -> None:
    """Who starts PPO by its own name does not want another algorithm of that name's file."""
    recipe = PRESETS[config.algorithm.name].recipe
    if program not in (recipe, "recipes.grpo"):
        raise ConfigError(
            f"{program} is not the recipe of algorithm.name {config.algorithm.name}: run "
            f"python -m {recipe}, or name the algorithm with --algorithm"
        )


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _due(step: int, every: int, last: int) -> bool:
    """At the first step and the last, and every so often between."""
    return step in (0, last) or (every > 0 and step % every == 0)


def _finish(record: RunRecord, output: Path, started: float) -> None:
    record.seconds = time.monotonic() - started
    print(f"{record.status}; report: {write_report(output, record)}")


def _keep_traceback(output: Path | None) -> str:
    """Write the traceback of the current exception beside the run; says where, or nothing."""
    if output is None:
        return ""
    path = output / "error.txt"
    try:
        path.write_text(traceback.format_exc(), encoding="utf-8")
    except OSError:
        return ""
    return f" (details: {path})"
