"""Where each parameter of a module lies in a flat piece of memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import nn

ALIGNMENT = 64


@runtime_checkable
class AdjacentParameters(Protocol):
    """A module that says which of its parameters must lie back to back, in which order."""

    def adjacent_parameters(self) -> Sequence[tuple[str, ...]]: ...


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: `offset` in bytes from the start of the weights."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def __post_init__(self) -> None:
        if self.numel < 1:
            raise ValueError(f"tensor {self.name!r} is empty: shape {self.shape}")
        if self.offset < 0 or self.offset % self.dtype.itemsize:
            raise ValueError(
                f"tensor {self.name!r}: offset {self.offset} is not a multiple of "
                f"{self.dtype.itemsize}, the size of {self.dtype}"
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The manifest of an arena: entries in the order of their offsets, and tied names.

        | q k v |··| o |··| gate up |··| down |···   a group is packed, its start is 64-byte aligned

    `aliases` maps a tied name to the entry that holds its bytes. Pickleable.
    """

    entries: tuple[TensorEntry, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError("entries is empty: the module has no parameters")
        names = [entry.name for entry in self.entries]
        if len(set(names)) != len(names):
            raise ValueError("entries holds a name twice")
        for before, after in zip(self.entries, self.entries[1:], strict=False):
            if after.offset < before.end:
                raise ValueError(f"entries overlap: {before.name!r} and {after.name!r}")
        for alias, name in self.aliases.items():
            if alias in names or name not in names:
                raise ValueError(f"alias {alias!r} -> {name!r} does not lead to an entry")

    @property
    def total_bytes(self) -> int:
        """Bytes of the weights with their padding."""
        return _aligned(self.entries[-1].end)

    @classmethod
    def for_module(cls, module: nn.Module) -> ArenaLayout:
        """The layout of `module`'s parameters. Reads names, shapes and dtypes only, so a module on
        the meta device will do. Buffers are not part of it: each process keeps its own."""
        first_name: dict[int, str] = {}
        parameters: dict[str, nn.Parameter] = {}
        aliases: dict[str, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in first_name:
                aliases[name] = first_name[id(parameter)]
            else:
                first_name[id(parameter)] = name
                parameters[name] = parameter
        groups = _groups(module, parameters)

        entries: list[TensorEntry] = []
        placed: set[str] = set()
        end = 0
        for name in parameters:
            if name in placed:
                continue
            end = _aligned(end)
            for member in groups.get(name, (name,)):
                tensor = parameters[member]
                entry = TensorEntry(member, tensor.dtype, tuple(tensor.shape), end)
                entries.append(entry)
                placed.add(member)
                end = entry.end
        return cls(tuple(entries), aliases)

    def digest(self) -> bytes:
        """32 bytes that are equal for equal layouts, in every process."""
        hasher = hashlib.blake2b(digest_size=32)
        for entry in self.entries:
            hasher.update(repr((entry.name, str(entry.dtype), entry.shape, entry.offset)).encode())
        hasher.update(repr(sorted(self.aliases.items())).encode())
        return hasher.digest()


def _groups(
    module: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> dict[str, tuple[str, ...]]:
    """Each grouped name -> its whole group."""
    groups: dict[str, tuple[str, ...]] = {}
    if not isinstance(module, AdjacentParameters):
        return groups
    for group in module.adjacent_parameters():
        for name in group:
            if name not in parameters:
                raise ValueError(f"adjacent_parameters names {name!r}, which is unknown or tied")
            if name in groups:
                raise ValueError(f"adjacent_parameters names {name!r} twice")
            groups[name] = tuple(group)
        if len({parameters[name].dtype for name in group}) > 1:
            raise ValueError(f"adjacent parameters {group} differ in dtype")
    return groups


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
