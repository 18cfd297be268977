"""Whether the processes of one run read the same weights and compute the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from rollout.exactness import Exactness, ExactnessRefused, alike
from rollout.policy import WeightsError
from trainer_bridge.receipt import WeightsEcho


class WeightsDiffer(WeightsError):
    """Processes of one run do not read the same weights."""


def check_same_weights(
    echoes: Mapping[str, WeightsEcho], node_of: Callable[[str], int] = lambda name: 0
) -> None:
    """`WeightsDiffer` unless all say the same; the memory is the same within a node, and no two
    nodes have one."""
    first = next(iter(echoes), "")
    first_of: dict[int, str] = {}
    for name, echo in echoes.items():
        node = node_of(name)
        for other in (first, first_of.setdefault(node, name)):
            said = echoes[other]
            if echo != (said if node_of(other) == node else replace(said, memory=echo.memory)):
                raise WeightsDiffer(f"{name} reads {described(echo)}, {other} {described(said)}")
    memories = [echoes[name].memory for name in first_of.values()]
    if len(set(memories)) < len(memories):
        raise WeightsDiffer(f"{', '.join(first_of.values())} read one memory on several nodes")


def described(echo: WeightsEcho) -> str:
    """For an error message."""
    return (
        f"policy version {echo.version}, {echo.tensors} tensors in memory {echo.memory[:8]}"
        + (f", checksum {echo.checksum}" if echo.checksum else "")
    )


def check_same_bits(exactness: Mapping[str, Exactness]) -> None:
    """`ExactnessRefused` if processes whose mode is on have probed the same weights to other
    bits."""
    groups = alike(exactness)
    if len(groups) > 1:
        sides = " and ".join("{" + ", ".join(names) + "}" for names in groups)
        raise ExactnessRefused(
            f"{sides} compute the same probe on the same weights to different bits: their "
            "machines, compilers or libraries differ. Run them on equal machines, or with "
            "EngineConfig(exact=False)"
        )
