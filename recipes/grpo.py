"""Group-relative policy optimization, from the command line to the report, top to bottom.

    python -m recipes.grpo [--config FILE] [--field value ...]      --help explains every field

Exit codes: 0 the run finished; 130 Ctrl-C (143 SIGTERM): ended cleanly, checkpoint kept; 2 the
configuration is wrong; 1 anything else, with the cause in one sentence on stderr.
"""

from __future__ import annotations

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
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from recipes.alarms import Alarms
from recipes.algorithms import overlong_penalty, teaching_groups
from recipes.algorithms.presets import Preset
from recipes.checkpoints import Checkpoint, Checkpoints
from recipes.command_line import ConfigError, parse_config
from recipes.config import GrpoConfig
from recipes.data import PromptCursor, sampling_seed
from recipes.errors import RunError, sentence
from recipes.evaluation import evaluate
from recipes.metrics import MetricsLog
from recipes.models import model_location
from recipes.output import holds_run, prepare_output
from recipes.plugins import configured_preset
from recipes.progress import RunDisplay
from recipes.report import RunRecord, write_report
from recipes.rewards import RewardTable, score_rollouts, teaching_samples
from recipes.sampled_step import SampledStep
from recipes.samples import COLUMNS, SampleLog, choose, samples_of
from recipes.sft import demonstration_batches, warm_start
from recipes.step_metrics import (
    StepClock,
    completion_metrics,
    engine_metrics,
    reward_metrics,
    version_metrics,
    versions_behind,
)
from recipes.stopping import Stopped, StopSignals, stop_signals
from recipes.tasks.catalog import load_task
from recipes.tasks.task import Demonstrates, Task, encode_prompt
from rollout import EngineConfig, RolloutBatch, SamplingParams, TornWeights
from trainer_bridge import Colocation, Placement, TrainerConfig, TrainerLost
from trainer_bridge.algorithm import Algorithm
from trainer_bridge.token_columns import advantages_per_token

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from command-line arguments; returns the exit code and never raises."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # in a pipe too: live, and in order with stderr
        sys.stdout.reconfigure(line_buffering=True)
    try:
        config = parse_config(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output: Path | None = None
    try:
        with stop_signals():
            output = prepare_output(config)
            return run(config, output)
    except Stopped as stop:
        print("stopped before a clean end; earlier checkpoints are complete", file=sys.stderr)
        return stop.exit_code
    except Exception as error:
        print(f"error: {sentence(error)}{_keep_traceback(output)}", file=sys.stderr)
        return 1


def run(
    config: GrpoConfig, output: Path, task: Task | None = None, preset: Preset | None = None
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
            preset = preset or configured_preset(config.algorithm)
            task = task or load_task(config.task, config.seed)
            with Colocation(
                model_location(config.model, output, config.seed),
                rollout_actors=config.rollout.actors,
                placement=Placement(nodes=config.rollout.nodes),
                trainer=_trainer_config(config),
                engine=EngineConfig(
                    max_batch_size=config.rollout.max_batch_size, exact=config.rollout.exact
                ),
                checkpoint=record.checkpoint,
                heartbeat_timeout_s=config.rollout.heartbeat_timeout,
                max_restarts=config.rollout.restarts,
            ) as colocation:
                exit_code = train(
                    config, preset, task, colocation, metrics, samples, record, checkpoints
                )
        except BaseException as error:
            stopped = isinstance(error, Stopped)
            record.status = f"{'stopped' if stopped else 'failed'}: {sentence(error)}"
            with suppress(OSError):
                _finish(record, output, started)
            raise
        _finish(record, output, started)
    return exit_code


def train(
    config: GrpoConfig,
    preset: Preset,
    task: Task,
    colocation: Colocation,
    metrics: MetricsLog,
    samples: SampleLog,
    record: RunRecord,
    checkpoints: Checkpoints,
) -> int:
    """From where `record` stands to the last step. Returns the exit code.

    A trainer that is lost is started again from the newest checkpoint, and the steps since then
    are taken again, with the same result. After Ctrl-C or SIGTERM the weights are still saved.
    """
    # Starting Ray put its own SIGTERM handler in place; within the loop it is ours again.
    with stop_signals() as signals, RunDisplay(config.name, config.steps) as display:
        loop = partial(
            train_to_the_end, config, preset, task, colocation, metrics, samples, record,
            checkpoints, signals, display,
        )  # fmt: skip
        record.exactness = colocation.exactness
        try:
            for restarts_left in reversed(range(config.trainer_restarts + 1)):
                try:
                    loop()
                    break
                except (TrainerLost, TornWeights) as error:
                    if not restarts_left:
                        raise
                    start = checkpoints.newest(display.note)
                    record.restore(start)
                    metrics.rewind(_records_of(start))
                    samples.rewind(record.steps_done)
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
            _checkpoint(colocation, record, checkpoints)
            record.status = f"stopped by {stop}"
            return stop.exit_code


def train_to_the_end(
    config: GrpoConfig,
    preset: Preset,
    task: Task,
    colocation: Colocation,
    metrics: MetricsLog,
    samples: SampleLog,
    record: RunRecord,
    checkpoints: Checkpoints,
    signals: StopSignals,
    display: RunDisplay,
) -> None:
    """Warm start, evaluations, training steps, checkpoints; `record` says what is done already.

    What changes the weights, and what says so, is never parted by a signal. With
    `rollout.overlap` the rollouts of the following step are sampled on another thread.
    """
    algorithm = preset.algorithm(config.rollout.max_tokens)
    sample = partial(rollout_step, config, preset, task, colocation)
    exact = all(exactness.on for exactness in record.exactness.values())
    alarms = Alarms(on_policy=exact and not config.rollout.overlap)

    if record.warm_start_done < config.warm_start.steps:
        batches = _demonstrations(config, task, colocation, record.warm_start_done)
        updates = warm_start(colocation.trainer, batches)
        for done in range(record.warm_start_done + 1, config.warm_start.steps + 1):
            with signals.held():
                stats = next(updates)
                record.warm_start_done = done
                record.policy_version = int(stats["rollout/policy_version"])
                metrics.log(0, {f"warm_start/{name}": v for name, v in stats.items()})
        display.note(f"warm start: {config.warm_start.steps} supervised steps")
        with signals.held():
            _checkpoint(colocation, record, checkpoints)

    record.weights_bytes = colocation.trainer.get_stats()["arena_bytes"]
    shown: dict[str, float] = {}
    while True:
        step = record.steps_done
        if _due(step, config.evaluation.every, config.steps) and not record.evaluated(step):
            evaluation = evaluate(
                colocation.pool.run_batch,
                colocation.tokenizer,
                task,
                max_tokens=config.rollout.max_tokens,
                num_prompts=config.evaluation.prompts,
                num_samples=config.evaluation.samples,
                pass_at=config.evaluation.pass_at,
                temperature=config.evaluation.temperature,
                pass_reward=config.evaluation.pass_reward,
                seed=config.seed,
            )
            with signals.held():
                record.evaluations.append((step, evaluation))
                metrics.log(step, evaluation.metrics())
            shown |= evaluation.metrics()
        display.update(step, shown)
        if step and _due(step, config.checkpoint.every, config.steps):
            with signals.held():
                _checkpoint(colocation, record, checkpoints)
        if step >= config.steps:
            return
        if not record.memory_before:
            record.memory_before = colocation.memory()

        began = time.monotonic()
        if record.ahead is None:
            record.ahead = sample(record.prompts_drawn, step + 1)
        with signals.held():
            following = None
            if config.rollout.overlap and step + 1 < config.steps:
                following = _beside(sample, record.ahead.prompts_drawn, step + 2)
            shown = update_step(config, colocation, record.ahead, algorithm, record, following)
            shown["timing_s/wall"] = time.monotonic() - began
            record.steps_done, record.prompts_drawn = step + 1, record.ahead.prompts_drawn
            taken, record.ahead = record.ahead, None
            metrics.log(step + 1, shown)
            if samples.due(step + 1):
                chosen = choose(taken.rewards.total, config.logging.samples_per_step)
                samples.log(step + 1, samples_of(taken, chosen, colocation.tokenizer))
                metrics.log_table(step + 1, "samples", COLUMNS, samples.rows(step + 1))
            for alarm in alarms.check(step + 1, shown):
                display.note(alarm)
            if following is not None:
                record.ahead = following.result()


def rollout_step(
    config: GrpoConfig,
    preset: Preset,
    task: Task,
    colocation: Colocation,
    prompts_drawn: int,
    step: int,
) -> SampledStep:
    """Prompts to rollouts, rewards and advantages. Changes nothing: it may be done again.

    With dynamic sampling in rounds: what a round brought of groups whose rewards differ is kept,
    and the next one samples as many other prompts as are still missing.
    """
    clock = StepClock()
    cursor = PromptCursor(len(task.train), config.seed)
    dynamic, limit = preset.dynamic_sampling, config.algorithm.max_sampling_rounds
    batches: list[RolloutBatch] = []
    tables: list[RewardTable] = []
    missing = config.rollout.prompts_per_step
    while missing and len(batches) < (limit if dynamic else 1):
        rows = [task.train[index] for index in cursor.rows(prompts_drawn, missing)]
        prompts_drawn += missing
        seed = sampling_seed(config.seed, step, len(batches))
        batch, rewards = sample_and_score(config, task, colocation, rows, seed, clock)
        batches.append(batch)
        tables.append(rewards)
        kept = teaching_groups(rewards.total, batch.prompt_index)
        missing -= len(np.unique(batch.prompt_index[kept]))
    batch, rewards = RolloutBatch.concat(batches), RewardTable.concat(tables)

    penalty = _overlong(config, preset, batch)
    shaped = [None if r is None else r + p for r, p in zip(rewards.total, penalty, strict=True)]
    teaches = teaching_samples(batch.finish_reasons, config.algorithm.mask_truncated)
    metrics = {
        **reward_metrics(rewards, batch.prompt_index),
        **completion_metrics(batch.lengths, batch.finish_reasons, clock.seconds("rollout")),
        **engine_metrics(colocation.pool.get_stats()),
        "rollout/sampling_rounds": float(len(batches)),
        "rewards/overlong_penalty": float(penalty.mean()),
    }
    if dynamic:
        kept = teaching_groups(rewards.total, batch.prompt_index)
        if not kept.any():
            raise RunError(
                f"step {step}: in each of the {batch.num_prompts} groups sampled, all rewards were "
                "equal; there is nothing to learn from (raise rollout.group_size, change the task, "
                "or set algorithm.dynamic_sampling to false)"
            )
        index = np.flatnonzero(kept)
        batch, shaped, teaches = batch.select(index), [shaped[i] for i in index], teaches[index]
        rewards = rewards.select(index)
    advantages = preset.advantages(shaped, batch.prompt_index, batch.lengths)
    clock.lap("advantage")
    return SampledStep(
        batch, rewards, advantages_per_token(batch, advantages), np.flatnonzero(teaches),
        prompts_drawn, metrics, clock,
    )  # fmt: skip


def sample_and_score(
    config: GrpoConfig,
    task: Task,
    colocation: Colocation,
    rows: list[dict[str, Any]],
    seed: int,
    clock: StepClock,
) -> tuple[RolloutBatch, RewardTable]:
    """`group_size` completions of each row's prompt, and what they earn."""
    params = SamplingParams(
        n=config.rollout.group_size,
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_tokens,
        seed=seed,
    )
    prompts = [encode_prompt(colocation.tokenizer, row["prompt"]) for row in rows]
    batch = colocation.pool.run_batch(prompts, params)
    clock.lap("rollout")

    _, rewards = score_rollouts(task.rewards, colocation.tokenizer, rows, batch)
    clock.lap("reward")
    return batch, rewards


def update_step(
    config: GrpoConfig,
    colocation: Colocation,
    sample: SampledStep,
    algorithm: Algorithm,
    record: RunRecord,
    following: Future[SampledStep] | None,
) -> dict[str, float]:
    """One publication (or several, with minibatches), confirmed by every actor. All metrics.

    following: rollouts that are sampled meanwhile; the weights change when they have ended.
    """
    batch = sample.batch
    sample.clock.skip()
    stats: dict[str, float] = {}
    behind = versions_behind(batch, record.policy_version)
    rollouts_end = None if following is None else partial(wait, [following])
    if len(sample.teaching):
        taught, advantages = sample.taught()
        stats = colocation.trainer.step(
            taught, advantages, algorithm, wait_for_rollouts=rollouts_end
        )
        record.policy_version = int(stats["rollout/policy_version"])
    elif rollouts_end is not None:
        rollouts_end()
    sample.clock.lap("update")
    colocation.confirm_publication(record.policy_version)
    sample.clock.lap("confirm")
    return {
        **sample.metrics, **stats, **version_metrics(batch), **behind, **sample.clock.metrics()
    }  # fmt: skip


def _overlong(config: GrpoConfig, preset: Preset, batch: RolloutBatch) -> NDArray[np.float64]:
    """What each rollout loses for its length, at most 0; all 0 without such a penalty."""
    longest = config.rollout.max_tokens
    buffer = round(preset.overlong_share * longest)
    if not buffer:
        return np.zeros(len(batch))
    return overlong_penalty(batch.lengths, longest, buffer, config.algorithm.overlong_factor)


def _trainer_config(config: GrpoConfig) -> TrainerConfig:
    """The trainer's settings; the learning-rate schedule spans warm start and training steps."""
    rollouts = config.rollout.prompts_per_step * config.rollout.group_size
    minibatches = math.ceil(rollouts / (config.optimizer.minibatch_size or rollouts))
    return TrainerConfig(
        **asdict(config.optimizer),
        total_steps=config.warm_start.steps
        + config.steps * minibatches * config.optimizer.num_iterations,
    )


def _demonstrations(
    config: GrpoConfig, task: Task, colocation: Colocation, done: int
) -> Iterator[RolloutBatch]:
    """The warm start's batches from number `done` on."""
    if not isinstance(task, Demonstrates):
        raise RunError(f"task {task.name!r} has no demonstrations; set warm_start.steps to 0")
    batches = demonstration_batches(
        task,
        colocation.tokenizer,
        config.warm_start.steps,
        config.warm_start.batch_size,
        config.seed,
    )
    return islice(batches, done, None)


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


def _checkpoint(colocation: Colocation, record: RunRecord, checkpoints: Checkpoints) -> None:
    """Save the state after `record.steps_done` steps. Not to be parted by a signal."""

    def save(folder: Path) -> int:
        version = colocation.trainer.save_checkpoint(str(folder))
        if version != record.policy_version:
            raise RunError(
                f"the weights are policy version {version}, but after step {record.steps_done} "
                f"they were {record.policy_version}: somebody else updated them"
            )
        if record.ahead is not None:
            record.ahead.save(folder)
        return version

    record.checkpoint = checkpoints.write(record.steps_done, record.state(), save)


def _records_of(start: Checkpoint | None) -> int:
    """How many records of metrics there were when the checkpoint was written."""
    return 0 if start is None else int(start.state["records"])


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


if __name__ == "__main__":
    sys.exit(main())
