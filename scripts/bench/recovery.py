"""How long a run stands still after each fault of a real Ray actor.

    python -m scripts.bench.recovery [MODEL] --repeats 10

MODEL: a model folder; without it a small one of random weights. Two rollout actors, a batch in
flight, heartbeats of `--heartbeat-timeout` seconds; one fault at a time, and for each

  batch     the batch in flight is whole, every token as without the fault (checked)
  back      the actor that replaced the lost one is serving (rollout actors)
  noticed   the driver got `TrainerLost` (trainer)
  going on  another trainer has published from the checkpoint (trainer)

in seconds since the blow. A table goes to stdout and one JSON line last; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ray
import torch

from rollout import Decoder, EngineConfig, SamplingParams, save_pretrained
from scripts.bench.chaos.actors import pid_of, tiny_tokenizer
from scripts.bench.chaos.oracle import model_config
from trainer_bridge import Colocation, TrainerConfig, TrainerLost

PROMPTS = [[3, 4, 5 + i] for i in range(16)]
PARAMS = SamplingParams(n=4, max_tokens=100, seed=1, ignore_eos=True)
Times = dict[str, float]


def hurt_itself(model: torch.nn.Module, number: int) -> None:
    """Runs in the trainer, inside the gate: half of the weights are new when it is struck."""
    parameters = list(model.parameters())
    for parameter in parameters[: len(parameters) // 2]:
        parameter.zero_()
    os.kill(os.getpid(), number)


class Faults:
    """Blows to the processes of one run, each followed by what a recipe does."""

    def __init__(self, run: Colocation, folder: Path) -> None:
        self._run = run
        self._checkpoint = folder / "checkpoint"
        run.trainer.save_checkpoint(str(self._checkpoint))
        self._expected = self._tokens()

    def rollout(self, number: int) -> Times:
        """Strike one of the two while both compute."""
        self._until_whole()
        members = self._run.pool.members
        victim = members.serving["rollout-1"]
        pid = pid_of(victim)
        assert pid is not None
        took: Times = {}

        def strike() -> None:
            os.kill(pid, number)
            took["struck"] = time.monotonic()

        blow = threading.Timer(0.05, strike)
        blow.start()
        tokens = self._tokens()
        done = time.monotonic()
        blow.join()
        if not took["struck"] < done:
            raise AssertionError("the batch was over before the blow")
        if tokens != self._expected:
            raise AssertionError("the batch is not the one without the fault")
        while members.serving.get("rollout-1") in (None, victim):
            members.look_after()
            time.sleep(0.01)
        back = time.monotonic()
        return {"batch": done - took["struck"], "back": back - took["struck"]}

    def trainer(self, number: int, midway: bool) -> Times:
        """Strike the trainer while it does nothing, or in the midst of an update."""
        self._until_whole()
        pid = self._run.trainer.get_stats()["pid"]
        struck = time.monotonic()
        try:
            if midway:
                self._run.trainer.apply_weight_update(None, partial(hurt_itself, number=number))
            else:
                os.kill(pid, number)
                self._run.trainer.get_stats()
            raise AssertionError("the loss of the trainer was not told")
        except TrainerLost:
            noticed = time.monotonic()
        version = self._run.restart_trainer(self._checkpoint)
        going_on = time.monotonic()
        self._run.confirm_publication(version)
        if self._tokens() != self._expected:
            raise AssertionError("the weights are not those of the checkpoint")
        return {"noticed": noticed - struck, "going on": going_on - struck}

    def _tokens(self) -> list[list[int]]:
        return [rollout.token_ids for rollout in self._run.pool.run_batch(PROMPTS, PARAMS)]

    def _until_whole(self) -> None:
        while len(self._run.pool.alive) < 2:
            self._run.pool.members.look_after()
            time.sleep(0.05)


def kinds(faults: Faults) -> dict[str, Callable[[], Times]]:
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    return {
        "rollout actor killed": lambda: faults.rollout(kill),
        "rollout actor stopped": lambda: faults.rollout(stop),
        "trainer killed": lambda: faults.trainer(kill, False),
        "trainer killed in an update": lambda: faults.trainer(kill, True),
        "trainer stopped in an update": lambda: faults.trainer(stop, True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.recovery", description=__doc__.splitlines()[0]
    )
    parser.add_argument("model", nargs="?", type=Path, help="a model folder")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--heartbeat-timeout", type=float, default=3.0, help="seconds")
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory(prefix="lockstep-recovery-") as temporary:
        folder = Path(temporary)
        model = options.model or folder / "model"
        if options.model is None:
            decoder = Decoder(model_config())
            decoder.init_weights(0)
            save_pretrained(decoder, model, tiny_tokenizer())
        with Colocation(
            model,
            rollout_actors=2,
            trainer=TrainerConfig(num_threads=1),
            engine=EngineConfig(num_threads=1, max_batch_size=32, max_seq_len=160),
            heartbeat_timeout_s=options.heartbeat_timeout,
            max_restarts=sys.maxsize,
        ) as run:
            result = {
                name: measured(name, act, options.repeats)
                for name, act in kinds(Faults(run, folder)).items()
            }
    print(
        json.dumps(
            {
                "bench": "recovery",
                "repeats": options.repeats,
                "heartbeat_timeout_s": options.heartbeat_timeout,
                "median_s": result,
            }
        )
    )


def measured(name: str, act: Callable[[], Times], repeats: int) -> Times:
    """Medians, in seconds."""
    times = [act() for _ in range(repeats)]
    medians = {key: round(statistics.median(t[key] for t in times), 2) for key in times[0]}
    ranges = ", ".join(
        f"{key} {value:.2f} ({min(t[key] for t in times):.2f} to {max(t[key] for t in times):.2f})"
        for key, value in medians.items()
    )
    print(f"{name:30}{ranges}", flush=True)
    return medians


if __name__ == "__main__":
    main()
