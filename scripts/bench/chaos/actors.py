"""Stage two: a `Colocation` of real Ray actors, whose processes are killed and stopped for real.

Here supervision is the product's own: the pool finds, ends and replaces rollout actors by itself;
this side does what a recipe does: updates, checkpoints, and another trainer when one is lost.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import ray
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import models

from recipes.checkpoints import Checkpoints
from rollout import (
    Decoder,
    EngineConfig,
    Rollout,
    SamplingParams,
    Tokenizer,
    WeightsError,
    save_pretrained,
)
from rollout.membership import Membership
from rollout.pool import RolloutPool
from rollout.process_identity import ProcessIdentity
from rollout.remote import ActorFailure, RemoteActor
from scripts.bench.chaos.faults import InjectedFault
from scripts.bench.chaos.oracle import EOS, VOCABULARY, Oracle, model_config, write_weights
from scripts.bench.chaos.processes import Tally
from scripts.bench.chaos.workers import make_prompts
from trainer_bridge import Colocation, TrainerConfig, TrainerLost

HEARTBEAT_S = 3.0
STRIDE = 100
"""Updates take multiples of it, recoveries the numbers after them: a number tells which it was,
also when the process that published it died before it could say so."""


def publish(model: Decoder, seed: int, version: int, harm: str, after_tensors: int) -> None:
    """Runs in the trainer, inside the gate: the weights of `version`, or a death on the way."""
    left = [after_tensors]

    def between() -> None:
        left[0] -= 1
        if left[0] == 0:
            if harm == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif harm == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif harm == "raise":
                raise InjectedFault("mid-update")

    write_weights(model, seed, version, between)


class ColocationChaos:
    """Updates in this thread, rollouts in a second one, blows from a third."""

    def __init__(self, oracle: Oracle, folder: Path, tally: Tally, rollouts: int) -> None:
        self._oracle = oracle
        self._tally = tally
        self._rng = random.Random(oracle.seed + 1)
        self._folder = folder
        self._rollouts = rollouts
        self._checkpoints = Checkpoints(folder / "colocation", keep=2)
        self._found: queue.Queue[tuple[RolloutPool, list[Rollout]]] = queue.Queue()
        self._over = threading.Event()
        # What recoveries published under the numbers between updates, by (pool, version // STRIDE).
        # When every process is gone, so is the memory: then a new pool reads a new one.
        self._recovered: dict[tuple[RolloutPool, int], int] = {}
        self._version = self._tried = self._step = 0
        self._struck: dict[str, float] = {}
        self._restarting = False

    def run(self, seconds: float) -> None:
        model = Decoder(model_config())
        write_weights(model, self._oracle.seed, 0)
        save_pretrained(model, self._folder / "model", tiny_tokenizer())
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR",
            object_store_memory=200 << 20,
        )  # fmt: skip
        try:
            with Colocation(
                self._folder / "model",
                self._rollouts,
                TrainerConfig(num_threads=1),
                EngineConfig(num_threads=1, max_batch_size=8, max_seq_len=160),
                heartbeat_timeout_s=HEARTBEAT_S,
                max_restarts=sys.maxsize,
            ) as run:
                helpers = [
                    threading.Thread(target=work, args=(run,))
                    for work in (self._roll_out, self._strike)
                ]
                for helper in helpers:
                    helper.start()
                deadline = time.monotonic() + seconds
                while time.monotonic() < deadline and not self._oracle.violations:
                    self._update(run)
                    self._check()
                self._over.set()
                for helper in helpers:
                    helper.join(120)
                self._check()
                if any(helper.is_alive() for helper in helpers):
                    self._oracle.violations.append("a batch of rollouts never ended")
        finally:
            self._over.set()
            ray.shutdown()

    # ------------------------------------------------------------- what a recipe does

    def _update(self, run: Colocation) -> None:
        rng = self._rng
        harm = rng.choice(["kill", "stop", "raise"]) if rng.random() < 0.02 else ""
        self._tried = (max(self._version, self._tried) // STRIDE + 1) * STRIDE
        if harm:
            self._tally.faults[f"trainer actor: mid-update: {harm}"] += 1
        update = partial(
            publish, seed=self._oracle.seed, version=self._tried, harm=harm,
            after_tensors=rng.randint(1, 10),
        )  # fmt: skip
        try:
            run.trainer.apply_weight_update(self._tried, update)
            self._version = self._tried
            self._tally.updates += 1
            run.confirm_publication(self._version)
            if self._version // STRIDE % 20 == 0:
                self._step += 1
                self._checkpoints.write(
                    self._step, {"version": self._version},
                    lambda folder: run.trainer.save_checkpoint(str(folder)),
                )  # fmt: skip
        except TrainerLost:
            self._restart(run)
        except InjectedFault:
            self._tally.burnt += 1
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, TrainerLost):
                cause = cause.__cause__
            if isinstance(cause, TrainerLost):
                self._restart(run)
            elif not isinstance(error, WeightsError | ActorFailure):
                self._oracle.violations.append(f"update: {type(error).__name__}: {error}")
            else:
                self._tally.refusals[f"update: {_name(error)}"] += 1

    def _restart(self, run: Colocation) -> None:
        struck = self._struck.pop("trainer", time.monotonic())
        start = self._checkpoints.newest(self._oracle.violations.append)
        version_of_start = 0 if start is None else int(start.state["version"])
        self._restarting = True
        for _ in range(20):
            for number in (self._version, self._tried, version_of_start):
                self._recovered[run.pool, number // STRIDE] = version_of_start
            try:
                self._version = run.restart_trainer(start.folder if start else None)
                break
            except (ActorFailure, WeightsError) as error:
                self._tally.refusals[f"restart: {_name(error)}"] += 1
        else:
            self._oracle.violations.append("no trainer could be started again in 20 attempts")
            return
        self._restarting = False
        self._tally.burnt += self._version % STRIDE
        self._tally.recovered("trainer actor", time.monotonic() - struck)

    def _check(self) -> None:
        with suppress(queue.Empty):
            while True:
                pool, rollouts = self._found.get_nowait()
                self._oracle.weights_of = partial(self._weights_of, pool)
                self._oracle.check(rollouts)

    def _weights_of(self, pool: RolloutPool, version: int) -> int:
        return self._recovered[pool, version // STRIDE] if version % STRIDE else version

    # ------------------------------------------------------------- rollouts all the while

    def _roll_out(self, run: Colocation) -> None:
        rng = random.Random(self._oracle.seed + 2)
        uid = 0
        while not self._over.is_set():
            prompts, lengths = make_prompts(rng)
            params = [
                SamplingParams(n=4, max_tokens=k, ignore_eos=True, seed=uid + i)
                for i, k in enumerate(lengths)
            ]
            uid += len(prompts)
            while not self._over.is_set():
                try:
                    pool = run.pool
                    batch = list(pool.run_batch(prompts, params))
                except (ActorFailure, WeightsError) as error:
                    self._tally.refusals[f"rollouts: {_name(error)}"] += 1
                    time.sleep(0.1)
                    continue
                except Exception as error:
                    self._oracle.violations.append(f"rollouts: {type(error).__name__}: {error}")
                    return
                whole = [(r.prompt_index, r.sample_index) for r in batch]
                if whole != [(i, j) for i in range(len(prompts)) for j in range(4)]:
                    self._oracle.violations.append("samples of a batch are missing or doubled")
                if len({r.finish_reason for r in batch}) > 1:
                    self._oracle.violations.append("a sample did not come to its end")
                self._found.put((pool, batch))
                break

    # ------------------------------------------------------------- the adversary

    def _strike(self, run: Colocation) -> None:
        rng = random.Random(self._oracle.seed + 3)
        while not self._over.wait(rng.uniform(0.5, 4.0)):
            actors = list(run.pool.members.serving.values())
            victim = run.trainer._actor if rng.random() < 0.3 or not actors else rng.choice(actors)
            if self._restarting and rng.random() < 0.8:
                continue  # a start takes seconds: some must come through
            number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            pid = pid_of(victim)
            if pid is None:
                continue
            role = "trainer actor" if victim is run.trainer._actor else "rollout actor"
            kind = "kill" if number == signal.SIGKILL else "stop"
            members = run.pool.members
            losses, restarts = len(members.losses), members.restarts
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                self._tally.faults[f"{role}: any moment: {kind}"] += 1
                if victim is run.trainer._actor:
                    self._struck.setdefault("trainer", time.monotonic())
                elif rng.random() < 0.5:
                    self._await(members, restarts + 1, f"{role} {kind}")
                elif number == signal.SIGSTOP and rng.random() < 0.5:
                    time.sleep(rng.uniform(0.1, 1.0))
                    if len(members.losses) == losses:
                        os.kill(pid, signal.SIGCONT)

    def _await(self, members: Membership, restarts: int, what: str) -> None:
        """Time one recovery, without another blow in between."""
        started = time.monotonic()
        while not self._over.wait(0.02):
            if members.restarts >= restarts:
                self._tally.recovered(what, time.monotonic() - started)
                return
            if time.monotonic() - started > 60:
                return


def _name(error: Exception) -> str:
    """Of the class that was raised, not of Ray's around it."""
    return type(getattr(error, "cause", error)).__name__


def pid_of(actor: RemoteActor) -> int | None:
    """None before it has started, and when Ray knows that it is gone."""
    ready, _ = ray.wait([actor._identity], timeout=0)
    if not ready:
        return None
    with suppress(ray.exceptions.RayError):
        identity = ray.get(actor._identity)
        assert isinstance(identity, ProcessIdentity)
        return identity.pid
    return None


def tiny_tokenizer() -> Tokenizer:
    words = {"<eos>" if i == EOS else f"w{i}": i for i in range(VOCABULARY)}
    backend = BackendTokenizer(models.WordLevel(words, unk_token="w0"))
    return Tokenizer(backend.to_str(), {"eos_token": "<eos>"}, None, (EOS,))
