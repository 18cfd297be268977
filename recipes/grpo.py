"""Group-relative policy optimization, from the command line to the report, top to bottom.

    python -m recipes.grpo [--config FILE] [--field value ...]      --help explains every field

Exit codes: 0 the run finished; 130 Ctrl-C (143 SIGTERM): ended cleanly, checkpoint kept; 2 the
configuration is wrong; 1 anything else, with the cause in one sentence on stderr.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from recipes.algorithms import ADVANTAGES, presets
from recipes.checkpoints import Checkpoints
from recipes.command_line import ConfigError, parse_config
from recipes.config import GrpoConfig
from recipes.data import PromptCursor, sampling_seed
from recipes.errors import RunError, sentence
from recipes.evaluation import evaluate
from recipes.metrics import MetricsLog
from recipes.models import model_location
from recipes.output import prepare_output
from recipes.progress import RunDisplay
from recipes.report import RunRecord, write_report
from recipes.rewards import score_completions, teaching_samples
from recipes.sft import demonstration_batches, warm_start
from recipes.step_metrics import (
    StepClock,
    completion_metrics,
    engine_metrics,
    reward_metrics,
    version_metrics,
)
from recipes.stopping import Stopped, stop_signals
from recipes.tasks.catalog import load_task
from recipes.tasks.task import Demonstrates, Task, encode_prompt, prompt_text
from rollout import SamplingParams
from rollout.engine_config import EngineConfig
from trainer_bridge import Colocation, TrainerConfig
from trainer_bridge.algorithm import Algorithm


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from command-line arguments; returns the exit code and never raises."""
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


def run(config: GrpoConfig, output: Path, task: Task | None = None) -> int:
    """Train as configured, writing everything under `output`. Returns the exit code.

    `task` replaces the one the configuration names. An error passes through, after the report
    has been written with its cause.
    """
    print(f"output: {output}")
    with MetricsLog(
        output,
        wandb_mode=config.logging.wandb,
        project=config.logging.project,
        run_name=output.name,
        config=asdict(config),
    ) as metrics:
        record = RunRecord(config, metrics.history)
        started = time.monotonic()
        try:
            task = task or load_task(config.task, config.seed)
            with Colocation(
                model_location(config.model, output, config.seed),
                rollout_actors=config.rollout.actors,
                trainer=_trainer_config(config),
                engine=EngineConfig(
                    max_batch_size=config.rollout.max_batch_size, exact=config.rollout.exact
                ),
            ) as colocation:
                exit_code = train(config, task, colocation, metrics, record, output)
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
    task: Task,
    colocation: Colocation,
    metrics: MetricsLog,
    record: RunRecord,
    output: Path,
) -> int:
    """Warm start, evaluation, the training steps, evaluation. Fills `record` as it goes.

    After Ctrl-C or SIGTERM the weights are still saved. Returns the exit code.
    """
    checkpoints = Checkpoints(
        output / "checkpoints",
        lambda folder: colocation.trainer.save_checkpoint(str(folder)),
        config.checkpoint.keep,
    )
    cursor = PromptCursor(len(task.train), config.rollout.prompts_per_step, config.seed)
    algorithm = presets.named(
        config.algorithm.name,
        clip_low=config.algorithm.clip_low,
        clip_high=config.algorithm.clip_high,
        dual_clip=config.algorithm.dual_clip,
        max_completion_length=config.rollout.max_tokens,
    )

    def evaluate_now(step: int) -> dict[str, float]:
        evaluation = evaluate(
            colocation.pool.run_batch,
            colocation.tokenizer,
            task,
            max_tokens=config.rollout.max_tokens,
            num_prompts=config.evaluation.prompts,
        )
        record.evaluations.append((step, evaluation))
        metrics.log(step, evaluation.metrics())
        return evaluation.metrics()

    def checkpoint_now(step: int) -> None:
        state = {"name": config.name, "seed": config.seed}
        record.checkpoint = checkpoints.write(step, state)

    # Starting Ray put its own SIGTERM handler in place; within the loop it is ours again.
    with stop_signals(), RunDisplay(config.name, config.steps) as display:
        try:
            record.exactness = colocation.exactness
            if config.warm_start.steps:
                if not isinstance(task, Demonstrates):
                    raise RunError(
                        f"task {task.name!r} has no demonstrations; set warm_start.steps to 0"
                    )
                batches = demonstration_batches(
                    task,
                    colocation.tokenizer,
                    config.warm_start.steps,
                    config.warm_start.batch_size,
                    config.seed,
                )
                for stats in warm_start(colocation.trainer, batches):
                    metrics.log(0, {f"warm_start/{name}": v for name, v in stats.items()})
                display.note(f"warm start: {config.warm_start.steps} supervised steps")
            display.update(0, evaluate_now(0))
            record.weights_bytes = colocation.trainer.get_stats()["arena_bytes"]
            record.memory_before = colocation.memory()

            for step in range(1, config.steps + 1):
                rows = cursor.rows(step - 1)
                values = train_step(config, task, colocation, rows, algorithm, step)
                record.steps_done = step
                metrics.log(step, values)
                if _due(step, config.evaluation.every, config.steps):
                    values |= evaluate_now(step)
                display.update(step, values)
                if _due(step, config.checkpoint.every, config.steps):
                    checkpoint_now(step)

            record.memory_after = colocation.memory()
            record.status = "finished"
            return 0
        except Stopped as stop:
            display.note(f"{stop}: saving the weights, then ending; once more to end at once")
            checkpoint_now(record.steps_done)
            record.status = f"stopped by {stop}"
            return stop.exit_code


def train_step(
    config: GrpoConfig,
    task: Task,
    colocation: Colocation,
    row_indices: list[int],
    algorithm: Algorithm,
    step: int,
) -> dict[str, float]:
    """One batch of prompts to one publication (or several, with minibatches). Its metrics."""
    clock = StepClock()

    rows = [task.train[index] for index in row_indices]
    params = SamplingParams(
        n=config.rollout.group_size,
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_tokens,
        seed=sampling_seed(config.seed, step),
    )
    prompts = [encode_prompt(colocation.tokenizer, row["prompt"]) for row in rows]
    batch = colocation.pool.run_batch(prompts, params)
    rollout_seconds = clock.lap("rollout")

    completions = [colocation.tokenizer.decode(batch.tokens(i).tolist()) for i in range(len(batch))]
    sample_rows = [rows[index] for index in batch.prompt_index]
    rewards = score_completions(
        task.rewards,
        [prompt_text(row["prompt"]) for row in sample_rows],
        completions,
        sample_rows,
        batch.finish_reasons,
    )
    clock.lap("reward")

    advantages = ADVANTAGES[config.algorithm.name](rewards.total, batch.prompt_index)
    teaching = np.flatnonzero(
        teaching_samples(batch.finish_reasons, config.algorithm.mask_truncated)
    )
    clock.lap("advantage")

    stats: dict[str, float] = {}
    if len(teaching):
        taught = batch if len(teaching) == len(batch) else batch.select(teaching)
        stats = colocation.trainer.step(taught, advantages[teaching], algorithm)
    clock.lap("update")

    return {
        **reward_metrics(rewards, batch.prompt_index),
        **completion_metrics(batch.lengths, batch.finish_reasons, rollout_seconds),
        **engine_metrics(colocation.pool.get_stats()),
        **stats,
        **version_metrics(batch),
        **clock.metrics(),
    }


def _trainer_config(config: GrpoConfig) -> TrainerConfig:
    """The trainer's settings; the learning-rate schedule spans warm start and training steps."""
    rollouts = config.rollout.prompts_per_step * config.rollout.group_size
    minibatches = math.ceil(rollouts / (config.optimizer.minibatch_size or rollouts))
    return TrainerConfig(
        **asdict(config.optimizer),
        total_steps=config.warm_start.steps
        + config.steps * minibatches * config.optimizer.num_iterations,
    )


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


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
