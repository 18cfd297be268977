"""Stage one: the protocol alone, under thousands of updates and a fault several times a second.

Processes are forked, so that one that was killed is back in a fraction of a second; what they run
is the product's arena, gate, engine, rollout actor and checkpoint writer. This side only restarts
what is gone, hands unfinished prompts to others, and asks the oracle about everything that came.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from recipes.checkpoints import CheckpointError, Checkpoints
from rollout import Decoder, Rollout, SamplingParams
from rollout.request import PromptTask, prompt_tasks
from rollout.transport import PackedPrompts
from scripts.bench.chaos.faults import (
    CHECKPOINT_POINTS,
    ROLLOUT_POINTS,
    TRAINER_POINTS,
    Fault,
    draw_fault,
)
from scripts.bench.chaos.oracle import Oracle, model_config, write_weights
from scripts.bench.chaos.workers import (
    WorkerSettings,
    context,
    make_prompts,
    serve_rollouts,
    serve_trainer,
)
from trainer_bridge.arena import ArenaLayout, WeightArena
from trainer_bridge.publication import Attachment, SharedGate

SILENCE_S = 1.5
EXPECTED = {
    "TornWeights", "PoisonedWeights", "UpdateBusy", "QuiesceTimeout", "InjectedFault",
    "CheckpointError", "FencedWriter",
}  # fmt: skip
"""What a worker may answer under faults. Anything else is a violation."""


@dataclass
class Tally:
    """Counts of one run. recovery_s: seconds from a process's end to its successor at work."""

    updates: int = 0
    burnt: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    fenced: int = 0
    recovery_s: dict[str, list[float]] = field(default_factory=dict)

    def recovered(self, what: str, seconds: float) -> None:
        self.recovery_s.setdefault(what, []).append(seconds)

    def medians(self) -> dict[str, Any]:
        return {
            what: {"median_s": round(statistics.median(times), 3), "count": len(times)}
            for what, times in sorted(self.recovery_s.items())
        }


class Child:
    """One worker process with its pipe. Silent for too long = hung."""

    def __init__(self, role: str, settings: WorkerSettings) -> None:
        self.role = role
        self.pipe, theirs = context.Pipe()
        serve = serve_trainer if role == "trainer" else serve_rollouts
        self.process: BaseProcess = context.Process(
            target=serve, args=(theirs, settings), daemon=True
        )
        self.process.start()
        theirs.close()
        self.ready = False
        self.attachment: Attachment | None = None
        self.heard = time.monotonic()
        self.busy = False
        self.stopped_at = ""
        self.struck: float | None = None
        self.parked = False

    def send(self, *message: object) -> None:
        self.busy, self.heard = True, time.monotonic()
        with suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> tuple[Any, ...] | None:
        """The next message; None when the process is gone, also in the midst of a message."""
        try:
            message: tuple[Any, ...] = self.pipe.recv()
        except Exception:
            return None
        self.heard = time.monotonic()
        return message

    @property
    def silent(self) -> bool:
        waits = (self.busy or not self.ready) and not self.parked
        return waits and time.monotonic() - self.heard > SILENCE_S

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            assert self.process.pid is not None
            os.kill(self.process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join()
        self.pipe.close()


@dataclass
class Batch:
    """Prompts that one rollout process works on. `left`: those not handed back yet."""

    run_id: int
    left: dict[int, PromptTask]


class ProtocolChaos:
    """One trainer and `rollouts` rollout processes, until the time is over."""

    def __init__(self, oracle: Oracle, folder: Path, guarded: bool, rollouts: int) -> None:
        self.oracle = oracle
        self.tally = Tally()
        self._rng = random.Random(oracle.seed)
        self._folder = folder
        self._guarded = guarded
        model = Decoder(model_config(), device="meta")
        self._arena = WeightArena.create(ArenaLayout.for_module(model))
        self._arena.bind(model, requires_grad=True)
        write_weights(model, oracle.seed, 0)
        self._gate = SharedGate.create(self._arena, model)
        self._gate.open()
        self._rollouts: list[Child | None] = [None] * rollouts
        self._batches: list[Batch | None] = [None] * rollouts
        self._trainer: Child | None = None
        self._fenced_off: Child | None = None
        self._needs_recovery = True
        self._backlog: list[PromptTask] = []
        self._next_run = self._next_uid = self._step = 0
        self._ends: dict[str, tuple[str, float]] = {}  # how and when a role was struck
        self._conts: list[tuple[float, Child]] = []
        self._last_version = 0
        self._given = self._returned = 0
        self._calm = False

    def run(self, seconds: float) -> Tally:
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline and len(self.oracle.violations) < 100:
                self._tend()
                pipes = {c.pipe: c for c in self._children()}
                for pipe in wait(list(pipes), timeout=0.05):
                    self._hear(pipes[pipe])  # type: ignore[index]
            self._settle()
        finally:
            for child in self._children():
                child.end()
            self._gate.close()
            self._arena.close()
        return self.tally

    def _children(self) -> list[Child]:
        everyone = [self._trainer, self._fenced_off, *self._rollouts]
        return [child for child in everyone if child is not None]

    # ------------------------------------------------------------- what should be running

    def _tend(self) -> None:
        now = time.monotonic()
        for at, child in list(self._conts):
            if now >= at:
                self._conts.remove((at, child))
                child.signal(signal.SIGCONT)
        for child in self._children():
            if child.silent and not any(child is waiting for _, waiting in self._conts):
                self._lost(child, "hung")
        if self._trainer is None:
            self._trainer = self._start("trainer", TRAINER_POINTS)
            self._needs_recovery = True
        elif self._trainer.ready and not self._trainer.busy:
            self._command_trainer(self._trainer)
        for index, child in enumerate(self._rollouts):
            if child is None:
                self._rollouts[index] = self._start(f"rollout-{index}", ROLLOUT_POINTS)
            elif child.ready and not child.busy:
                self._give_work(index, child)

    def _start(self, role: str, points: tuple[str, ...]) -> Child:
        fault = None
        if self._strikes(0.05):
            action = self._rng.choice(["kill", "stop"])
            fault = Fault("attaching", action, self._rng.randint(0, 1))
        settings = WorkerSettings(
            self._some_attachment(),
            self.oracle.seed,
            self._guarded,
            fault,
            undo=self._rng.random() < 0.5,
            checkpoints=self._folder,
        )
        return Child("trainer" if role == "trainer" else role, settings)

    def _some_attachment(self) -> Attachment:
        """Through any process that lives: the weights do not depend on who made them."""
        ways = [c.attachment for c in self._children() if c.attachment and c.process.is_alive()]
        return self._rng.choice([*ways, self._gate.attachment()])

    def _command_trainer(self, trainer: Child) -> None:
        rng = self._rng
        if self._needs_recovery:
            fault = Fault("mid-update", "kill", rng.randint(0, 9)) if self._strikes(0.1) else None
            trainer.send("recover", fault)
        elif rng.random() < 0.05:
            self._step += 1
            fault = draw_fault(rng, CHECKPOINT_POINTS, 1) if self._strikes(0.5) else None
            trainer.send("checkpoint", fault, self._step)
        else:
            fault = draw_fault(rng, TRAINER_POINTS, 0) if self._strikes(0.2) else None
            if fault and fault.point == "mid-update":
                fault = Fault(fault.point, fault.action, rng.randint(0, 15), fault.seconds)
            trainer.send("update", fault)

    def _give_work(self, index: int, child: Child) -> None:
        if not self._backlog:
            prompts, lengths = make_prompts(self._rng)
            params = [SamplingParams(n=2, max_tokens=k, ignore_eos=True) for k in lengths]
            new = prompt_tasks(prompts, params, self.oracle.seed, self._next_uid)
            self._backlog = [
                PromptTask(self._next_uid + i, t.token_ids, t.params, t.seed, t.first_sample_index)
                for i, t in enumerate(new)
            ]
            self._next_uid += len(new)
            self._given += sum(task.params.n for task in new)
        tasks, self._backlog = self._backlog[:4], self._backlog[4:]
        batch = Batch(self._next_run, {task.prompt_index: task for task in tasks})
        self._next_run += 1
        self._batches[index] = batch
        fault = draw_fault(self._rng, ROLLOUT_POINTS, 60) if self._strikes(0.3) else None
        child.send("run", batch.run_id, PackedPrompts.pack(tasks), fault)

    # ------------------------------------------------------------- what they say

    def _hear(self, child: Child) -> None:
        message = child.receive()
        if message is None:
            self._lost(child, "killed")
            return
        kind, *content = message
        if kind == "ready":
            child.ready, child.attachment = True, content[0]
            if child.role != "trainer":
                self._back(child.role)
        elif kind == "fault":
            point, action = content
            self.tally.faults[f"{child.role.partition('-')[0]}: {point}: {action}"] += 1
            child.stopped_at = point if action == "stop" else ""
            child.struck = time.monotonic() if action in ("kill", "stop") else None
            if action == "stop" and self._rng.random() < 0.5:
                child.stopped_at = ""
                self._conts.append((time.monotonic() + self._rng.uniform(0.01, 0.6), child))
        elif child is self._fenced_off:
            self._fenced_answer(kind, content)
        elif child.role == "trainer":
            child.busy = False
            self._trainer_answer(kind, content)
        else:
            self._rollout_answer(child, kind, content)

    def _trainer_answer(self, kind: str, content: list[Any]) -> None:
        command = content[0]
        if kind == "failed":
            self._refused(content[1], content[2])
            if content[1] in ("TornWeights", "PoisonedWeights", "FencedWriter"):
                self._needs_recovery = True
            return
        if command == "recover":
            self._needs_recovery = False
            self._back("trainer")
            if self._fenced_off is not None and self._fenced_off.parked:
                self._fenced_off.parked = False
                self._fenced_off.heard = time.monotonic()
                self._fenced_off.signal(signal.SIGCONT)
        if command in ("recover", "update"):
            version = content[1]
            if version < self._last_version or (
                version == self._last_version and command == "update"
            ):
                self._violation(f"{command} published {version} after {self._last_version}")
            self.tally.updates += version > self._last_version
            self.tally.burnt += max(0, version - self._last_version - 1)
            self._last_version = version

    def _rollout_answer(self, child: Child, kind: str, content: list[Any]) -> None:
        index = int(child.role.partition("-")[2])
        batch = self._batches[index]
        if batch is None or batch.run_id != content[0]:
            self._violation(f"{child.role} answered about a run that it was not given")
            return
        if kind == "part":
            self._take(batch, content[1])
            return
        child.busy = False
        self._batches[index] = None
        if kind == "failed":
            self._refused(content[1], content[2])
            self._backlog = [*batch.left.values(), *self._backlog]
        elif batch.left:
            self._violation(f"{child.role} ended a run without {len(batch.left)} prompts")

    def _take(self, batch: Batch, parts: dict[int, list[Rollout]]) -> None:
        for index, rollouts in parts.items():
            task = batch.left.pop(index, None)
            if task is None:
                self._violation("a prompt was handed in twice")
            elif len(rollouts) != task.params.n:
                self._violation(f"{len(rollouts)} samples of a prompt with n={task.params.n}")
            self._returned += len(rollouts)
            failed = [r for r in rollouts if r.finish_reason != "length"]
            if failed:
                self._violation(f"a sample ended as {failed[0].finish_reason}")
            self.oracle.check(r for r in rollouts if r.finish_reason == "length")

    def _fenced_answer(self, kind: str, content: list[Any]) -> None:
        """The old trainer, stopped and superseded, goes on: it may not have published."""
        assert self._fenced_off is not None
        if kind == "failed" and content[1] in EXPECTED:
            self.tally.fenced += 1
        else:
            self._violation(f"a trainer that was superseded went on: {kind} {content}")
        self._fenced_off.end()
        self._fenced_off = None

    def _refused(self, name: str, sentence: str) -> None:
        self.tally.refusals[name] += 1
        if name not in EXPECTED:
            self._violation(f"unexpected {name}: {sentence}")

    # ------------------------------------------------------------- who is gone

    def _lost(self, child: Child, how: str) -> None:
        self._conts = [(at, other) for at, other in self._conts if other is not child]
        if child is self._fenced_off:
            child.end()
            self._fenced_off = None
            return
        if how == "hung" and child.stopped_at == "before lock" and self._fenced_off is None:
            child.parked, self._fenced_off = True, child  # it goes on when it has a successor
        else:
            child.end()
        self._ends.setdefault(child.role, (how, child.struck or time.monotonic()))
        if child.role == "trainer":
            self._trainer = None
            self._check_checkpoint()
            return
        index = int(child.role.partition("-")[2])
        self._rollouts[index] = None
        batch, self._batches[index] = self._batches[index], None
        if batch is not None:
            self._backlog = [*batch.left.values(), *self._backlog]

    def _back(self, role: str) -> None:
        """A successor is at work: from the blow, its detection included."""
        if role in self._ends:
            how, struck = self._ends.pop(role)
            self.tally.recovered(f"{role.partition('-')[0]} {how}", time.monotonic() - struck)

    def _check_checkpoint(self) -> None:
        """Whatever moment the trainer died at: what looks like a checkpoint is one."""
        try:
            found = Checkpoints(self._folder).newest(self._violation)
        except CheckpointError as error:
            self._violation(str(error))
            return
        if found is not None:
            tensors = load_file(str(found.folder / "model.safetensors"))
            self.oracle.check_weights(tensors, found.policy_version, found.folder.name)

    def _settle(self) -> None:
        """No more faults: what is open must come to its end."""
        if not self._guarded:
            return
        self._calm = True
        deadline = time.monotonic() + 60
        while self._returned < self._given and time.monotonic() < deadline:
            for _, child in self._conts:
                child.signal(signal.SIGCONT)
            self._conts.clear()
            self._tend()
            pipes = {c.pipe: c for c in self._children()}
            for pipe in wait(list(pipes), timeout=0.05):
                self._hear(pipes[pipe])  # type: ignore[index]
            if not self._backlog and not any(self._batches):
                break
        if self._backlog or any(batch and batch.left for batch in self._batches):
            self._violation("prompts were lost: they did not come back in a minute of peace")

    def _strikes(self, probability: float) -> bool:
        return not self._calm and self._rng.random() < probability

    def _violation(self, sentence: str) -> None:
        self.oracle.violations.append(sentence)
