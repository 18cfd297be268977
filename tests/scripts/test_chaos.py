"""The fault harness: it finds nothing with the protocol, and something without it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from rollout import Decoder, RolloutEngine, SamplingParams
from scripts.bench.chaos.faults import TRAINER_POINTS, Fault, FaultPoints, InjectedFault, draw_fault
from scripts.bench.chaos.oracle import Oracle, model_config, write_weights


def chaos(*options: str) -> tuple[int, dict]:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench.chaos", *options],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_with_the_protocol_nothing_is_found():
    """W3, W6, F1-F3: real processes, killed and stopped in the midst of updates and steps."""
    code, found = chaos("--seconds=10", "--seed=4", "--ray-share=0")
    assert (code, found["violations"]) == (0, 0)
    assert found["updates"] > 20 and found["faults"] > 5 and found["tokens_checked"] > 1000
    assert any("kill" in kind for kind in found["faults_by_kind"])


def test_without_it_violations_are_found():
    """The control: the harness can fail."""
    code, found = chaos("--seconds=60", "--seed=4", "--control")
    assert (code, found["control"]) == (0, True)
    assert found["violations"] > 0


@pytest.fixture(scope="module")
def rollouts():
    model = Decoder(model_config())
    write_weights(model, 7, 3)
    engine = RolloutEngine(model, policy_version=3, exact=False)
    params = SamplingParams(n=2, max_tokens=12, ignore_eos=True, seed=0)
    return engine.run_batch([[5, 6], [9]], params, return_details=True)


def test_the_oracle_knows_what_is_true(rollouts):
    oracle = Oracle(7)
    oracle.check(rollouts)
    assert oracle.violations == []
    assert (oracle.rollouts, oracle.tokens, oracle.versions) == (4, 48, {3})


@pytest.mark.parametrize("lie", ["version", "logprob", "gap"])
def test_the_oracle_sees_one_wrong_token(rollouts, lie):
    rollout = rollouts[1]
    (span,) = rollout.version_spans
    if lie == "version":
        spans = (span._replace(end=11), span._replace(version=4, start=11))
        changed = replace(rollout, version_spans=spans)
    elif lie == "logprob":
        nearest = float(np.nextafter(np.float32(rollout.logprobs[6]), np.float32(0)))
        changed = replace(rollout, logprobs=[*rollout.logprobs[:6], nearest, *rollout.logprobs[7:]])
    else:
        changed = replace(rollout, version_spans=(span._replace(end=11),))
    oracle = Oracle(7)
    oracle.check([rollouts[0], changed])
    assert len(oracle.violations) == 1, oracle.violations


def test_a_fault_strikes_once_at_its_point():
    reported = []
    points = FaultPoints(lambda *what: reported.append(what))
    points.arm(Fault("mid-update", "raise", skip=2))
    points.reached("locked")
    points.reached("mid-update")
    points.reached("mid-update")
    with pytest.raises(InjectedFault, match="mid-update"):
        points.reached("mid-update")
    points.reached("mid-update")
    assert reported == [("mid-update", "raise")]


def test_faults_are_a_function_of_the_seed():
    def draw(seed):
        rng = random.Random(seed)
        return [draw_fault(rng, TRAINER_POINTS, 5) for _ in range(200)]

    assert draw(1) == draw(1) != draw(2)
    assert {fault.point for fault in draw(1)} == set(TRAINER_POINTS)
