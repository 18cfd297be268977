"""What processes say they read, compared within a node and between nodes."""

from __future__ import annotations

import pytest

from trainer_bridge import WeightsDiffer, WeightsEcho
from trainer_bridge.agreement import check_same_weights


def echo(memory: str = "a", version: int = 7, checksum: str = "c", tensors: int = 12):
    return WeightsEcho(version, tensors, memory, checksum)


def node_of(name: str) -> int:
    return {"trainer": 0, "rollout-0": 0, "mirror-1": 1, "rollout-1": 1}[name]


AGREED = {
    "trainer": echo("a"), "mirror-1": echo("b"), "rollout-0": echo("a"), "rollout-1": echo("b"),
}  # fmt: skip


def test_one_memory_for_each_node():
    check_same_weights(AGREED, node_of)
    check_same_weights({})
    check_same_weights({"trainer": echo(), "rollout-0": echo()})


@pytest.mark.parametrize("name", AGREED)
@pytest.mark.parametrize("change", [{"version": 6}, {"checksum": "d"}, {"tensors": 11}])
def test_a_process_that_reads_something_else_is_named(name, change):
    memory = AGREED[name].memory
    with pytest.raises(WeightsDiffer, match="trainer" if name == "trainer" else name):
        check_same_weights(AGREED | {name: echo(memory, **change)}, node_of)


@pytest.mark.parametrize("name", AGREED)
def test_another_memory_on_the_same_node_is_seen(name):
    with pytest.raises(WeightsDiffer, match="memory z"):
        check_same_weights(AGREED | {name: echo("z")}, node_of)


def test_one_memory_on_two_nodes_is_a_lie():
    with pytest.raises(WeightsDiffer, match="trainer, mirror-1 read one memory on several nodes"):
        check_same_weights(dict.fromkeys(AGREED, echo()), node_of)
