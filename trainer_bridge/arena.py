"""One flat piece of memory per node that holds every weight once, for trainer and engines alike.

    layout = ArenaLayout.for_module(model)            # trainer
    arena = WeightArena.create(layout)
    arena.copy_from(model)
    arena.bind(model, requires_grad=True)

    arena = WeightArena.attach(handle)                # rollout actor, maps it read-only
    arena.bind(model_on_meta, requires_grad=False)

The trainer changes the bound parameters in place, inside the gate; everyone sees it. Nothing is
copied and nothing is sent.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rollout.policy import ParameterLeftArena, ReadOnlyWeights
from trainer_bridge.layout import ArenaLayout, TensorEntry
from trainer_bridge.memory import HEADER_BYTES, MemoryHandle, MemoryRegion

__all__ = ["ArenaHandle", "ArenaLayout", "TensorEntry", "WeightArena"]


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """What another process needs to attach. Pickleable; see `MemoryHandle` for how long it holds"""

    memory: MemoryHandle
    layout: ArenaLayout


class WeightArena:
    """The weights of one model on one node.

    Every tensor has a storage of its own over the mapping. Views of one big storage would look the
    same, but tools that find tied weights by comparing storages then drop all parameters but one.

    A process that attaches read-only has no right to write in its page table: a stray in-place
    operation there is a crash of that process, not silent corruption of everybody's weights.
    """

    def __init__(self, region: MemoryRegion, layout: ArenaLayout) -> None:
        self.layout = layout
        self.region = region
        self._entries = {entry.name: entry for entry in layout.entries}
        self._tensors: dict[str, torch.Tensor] = {}
        self._flat = self._from_mapping(torch.uint8, layout.total_bytes, 0)
        self._undo: torch.Tensor | None = None

    @classmethod
    def create(cls, layout: ArenaLayout, backing: str | Path = "memfd") -> WeightArena:
        """A zeroed arena. `backing`: "memfd", "private" (this process only), or a folder."""
        return cls(MemoryRegion.create(layout.total_bytes, layout.digest(), backing), layout)

    @classmethod
    def attach(cls, handle: ArenaHandle, writable: bool = False) -> WeightArena:
        """Map the arena of another process. `writable` is for the trainer alone."""
        region = MemoryRegion.attach(handle.memory, handle.layout.digest(), writable)
        return cls(region, handle.layout)

    @property
    def writable(self) -> bool:
        return self.region.writable

    def handle(self) -> ArenaHandle:
        """A handle through this process, whoever created the arena: a new trainer can come back
        through any engine that is still alive."""
        return ArenaHandle(self.region.handle(), self.layout)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name` (or a tied name) in the arena itself; the same object every time."""
        name = self.layout.aliases.get(name, name)
        if name not in self._tensors:
            entry = self._entries[name]
            flat = self._from_mapping(entry.dtype, entry.numel, entry.offset)
            self._tensors[name] = flat.view(entry.shape)
        return self._tensors[name]

    def copy_from(self, module: nn.Module) -> None:
        """Copies `module`'s parameters into the arena. Before the gate opens, or inside it."""
        self._require_writable()
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name in self._entries:
                self.tensor(name).copy_(parameters[name])

    def bind(self, module: nn.Module, requires_grad: bool) -> None:
        """Makes every parameter of `module` *be* the arena's tensor; its old values are dropped.

        Parameters on the same device and of the same dtype stay the same Python objects, so an
        optimizer that holds them goes on working; others (a module on the meta device) are replaced
        by new ones. Ties are kept. Buffers are left alone.
        """
        if requires_grad and not self.writable:
            raise ValueError("requires_grad=True on a read-only arena: nothing could be trained")
        by_name = dict(module.named_parameters(remove_duplicate=False))
        known = self._entries.keys() | self.layout.aliases.keys()
        if by_name.keys() != known:
            name = min(by_name.keys() ^ known)
            raise ValueError(f"module and arena differ: only one of them has {name!r}")
        if len({id(parameter) for parameter in by_name.values()}) != len(self._entries) or any(
            by_name[alias] is not by_name[name] for alias, name in self.layout.aliases.items()
        ):
            raise ValueError(
                f"module and arena tie different parameters; tied in the arena: "
                f"{dict(self.layout.aliases)}"
            )
        for name, old in by_name.items():
            tensor = self.tensor(name)
            if old.shape != tensor.shape:
                raise ValueError(
                    f"parameter {name!r} has shape {tuple(old.shape)}, "
                    f"the arena holds {tuple(tensor.shape)}"
                )
        fresh: dict[int, nn.Parameter] = {}
        for name, old in by_name.items():
            tensor = self.tensor(name)
            if old.device == tensor.device and old.dtype == tensor.dtype:
                old.data = tensor
                old.requires_grad_(requires_grad)
                continue
            if id(old) not in fresh:
                fresh[id(old)] = nn.Parameter(tensor, requires_grad=requires_grad)
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, fresh[id(old)])

    def check_bound(self, module: nn.Module) -> None:
        """Raises `ParameterLeftArena` unless every parameter lies where the arena has it."""
        base = self._flat.data_ptr()
        missing = self._entries.keys() | self.layout.aliases.keys()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            entry = self._entries.get(self.layout.aliases.get(name, name))
            if entry is None:
                raise ParameterLeftArena(
                    f"parameter {name!r} is not in the weight arena: it was added after the arena "
                    f"was laid out"
                )
            missing.discard(name)
            if (
                parameter.data_ptr() != base + entry.offset
                or parameter.dtype != entry.dtype
                or tuple(parameter.shape) != entry.shape
                or not parameter.is_contiguous()
            ):
                raise ParameterLeftArena(
                    f"parameter {name!r} left the weight arena, so the engines no longer see it; "
                    f"the likely call is {_likely_call(parameter, entry)}. Copy in place instead "
                    f"(parameter.copy_(new) under torch.no_grad()) and bind the module again"
                )
        if missing:
            raise ParameterLeftArena(f"parameter {min(missing)!r} was removed from the module")

    def take_undo(self) -> Callable[[], None]:
        """Copies all weights aside and returns a function that puts them back, bit for bit.

        The copy's memory is kept for the next call, which makes the earlier function worthless.
        """
        self._require_writable()
        if self._undo is None:
            self._undo = torch.empty_like(self._flat)
        kept = self._undo
        kept.copy_(self._flat)

        def put_back() -> None:
            self._flat.copy_(kept)

        return put_back

    def pieces(self, piece_bytes: int) -> Iterator[NDArray[np.uint8]]:
        """All bytes in order, as views of at most `piece_bytes`. Hold the gate while reading."""
        flat = self._flat.numpy()
        for start in range(0, len(flat), piece_bytes):
            yield flat[start : start + piece_bytes]

    def fill(self, pieces: Sequence[NDArray[np.uint8]]) -> None:
        """Overwrites all bytes with those of `pieces`, in order. Inside the gate, or before it
        opens. ValueError, and nothing written, unless there are exactly as many."""
        self._require_writable()
        flat = self._flat.numpy()
        if (found := sum(len(piece) for piece in pieces)) != len(flat):
            raise ValueError(f"pieces hold {found} bytes, the arena has {len(flat)}")
        start = 0
        for piece in pieces:
            flat[start : start + len(piece)] = piece
            start += len(piece)

    def checksum(self) -> str:
        """blake2b of all bytes, as hex: equal on every process that attached. Hold the gate."""
        with memoryview(self.region.mapping) as whole:
            weights = whole[HEADER_BYTES : HEADER_BYTES + self.layout.total_bytes]
            return hashlib.blake2b(weights, digest_size=16).hexdigest()

    def close(self, unlink: bool = False) -> None:
        """Gives up the arena; bound parameters stay readable until they are dropped.

        `unlink` deletes the file behind a folder backing.
        """
        self._tensors.clear()
        self._undo = None
        self._flat = torch.empty(0, dtype=torch.uint8)
        self.region.close(unlink)

    def _from_mapping(self, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so; here the page table refuses the write.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(
                self.region.mapping, dtype=dtype, count=count, offset=HEADER_BYTES + offset
            )

    def _require_writable(self) -> None:
        if not self.writable:
            raise ReadOnlyWeights("this process attached the arena read-only")


def _likely_call(parameter: torch.Tensor, entry: TensorEntry) -> str:
    if type(parameter.data).__name__ == "DTensor":
        return "fully_shard(model)"
    if tuple(parameter.shape) != entry.shape:
        return "resize_token_embeddings(), or another call that makes new parameters"
    if parameter.dtype != entry.dtype:
        return f"model.to({parameter.dtype})"
    if parameter.device.type != "cpu":
        return f'model.to("{parameter.device}")'
    if parameter.untyped_storage().nbytes() != entry.num_bytes:
        return "torch.nn.utils.vector_to_parameters()"
    return (
        'load_state_dict(..., assign=True), `parameter.data = ...`, model.to("cpu:0") or '
        "copy.deepcopy(model)"
    )
