"""On which nodes of a Ray cluster the processes of a run go, and what Ray sets aside for them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.remote import ActorTimeout

HOME = 0
"""The node of the trainer and its weights."""
_A_LITTLE = 0.001


@dataclass(frozen=True, slots=True)
class Placement:
    """nodes: machines. The trainer and its weights are on the first, which is the driver's own if
    that has what they ask for; rollout actors are dealt to all in turn. Every further node holds a
    mirror of the weights, for its rollout actors to read. Model folder and checkpoints must lie
    where all nodes see them.

    trainer_gpus, rollout_gpus: GPUs that Ray sets aside for the trainer and for each rollout actor;
    whole ones, or a fraction below 1 of one that they share.
    """

    nodes: int = 1
    trainer_gpus: float = 0.0
    rollout_gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {self.nodes}")
        for name in ("trainer_gpus", "rollout_gpus"):
            gpus = getattr(self, name)
            if gpus < 0 or (gpus > 1 and gpus != int(gpus)):
                raise ValueError(f"{name} must be a fraction of 1 or a whole number, got {gpus}")

    def node_of(self, index: int) -> int:
        """The node of the rollout actor of that number."""
        return index % self.nodes


class Reservation:
    """A placement group of one bundle for each node: all of them, or an error that says what there
    is instead. If a node is lost, Ray looks for another to take its place.

    No logical CPUs are reserved but a thousandth, since a bundle must ask for something: trainer
    and engines take turns on the same cores.
    """

    def __init__(self, placement: Placement, rollout_actors: int, timeout_s: float) -> None:
        self._placement = placement
        self._actors = [0] * placement.nodes
        for index in range(rollout_actors):
            self._actors[placement.node_of(index)] += 1
        bundles = [self._bundle(node) for node in range(placement.nodes)]
        self._group: PlacementGroup = placement_group(
            bundles,
            strategy="STRICT_SPREAD" if placement.nodes > 1 else "STRICT_PACK",
            bundle_label_selector=[_driver_node_if_fit(bundles[HOME]), *({} for _ in bundles[1:])],
        )
        if not self._group.wait(timeout_s):
            self.release()
            there = "; ".join(_described(node["Resources"]) for node in _alive_nodes())
            raise ActorTimeout(
                f"Ray has found no {placement.nodes} node(s) with room for {bundles} within "
                f"{timeout_s:.0f} s. Its nodes: {there}. Ask for less, add nodes with `ray start`, "
                "or see `ray status` for what else runs on them"
            )

    def actor(self, kind: type, node: int, threads: int, gpus: float = 0.0) -> Any:
        """`kind` as a Ray actor on that node.

        OpenMP workers sleep while they wait: where cores are contended, spinning ones made a
        training step seven times as slow (scripts/bench/NOTES.md).
        """
        return ray.remote(kind).options(
            num_cpus=0,
            num_gpus=gpus,
            max_concurrency=8,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, node),
            runtime_env={
                "env_vars": {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
            },
        )

    def trainer(self, kind: type, threads: int) -> Any:
        """`kind` as a Ray actor with the trainer's share of the first node."""
        return self.actor(kind, HOME, threads, self._placement.trainer_gpus)

    def rollout(self, kind: type, node: int, threads: int | None) -> Any:
        """`kind` as a Ray actor with a rollout actor's share of a node; threads: None = of the
        cores."""
        share = threads or max(1, (os.cpu_count() or 1) // self._actors[node])
        return self.actor(kind, node, share, self._placement.rollout_gpus), share

    def has(self, node: int) -> bool:
        """Whether the node is there; False after it was lost, until Ray has found another."""
        placed = placement_group_table(self._group)
        found = placed["bundles_to_node_id"].get(node)
        return placed["state"] == "CREATED" and any(n["NodeID"] == found for n in _alive_nodes())

    def release(self) -> None:
        """Give the bundles back; ends what still runs in them. Idempotent."""
        try:
            remove_placement_group(self._group)
        except RayError:
            pass

    def _bundle(self, node: int) -> dict[str, float]:
        gpus = self._actors[node] * self._placement.rollout_gpus
        gpus += self._placement.trainer_gpus * (node == HOME)
        return {"CPU": _A_LITTLE} | ({"GPU": gpus} if gpus else {})


def _driver_node_if_fit(bundle: dict[str, float]) -> dict[str, str]:
    """A label selector for the driver's node, unless that could never take the bundle."""
    here = ray.get_runtime_context().get_node_id()
    for node in _alive_nodes():
        has = node["Resources"]
        if node["NodeID"] == here and all(has.get(k, 0.0) >= v for k, v in bundle.items()):
            return {"ray.io/node-id": here}
    return {}


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _described(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"
