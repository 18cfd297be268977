"""Steps that were written down: the model's forward without Python between its kernels.

    step's tokens ──► model.embed ──► recording.replay(rows) ──► hidden states
                                         ▲ written down once from model.transform

A forward of the module is recorded once (`attention/native/recording.py`), for more rows than a
usual step has, and serves every smaller step: decodes, chunks, mixed. It reads the parameters and
the KV pages where they lie, so an update in place is seen like any other. The first replay of a
recording is held against the module's own forward, bit for bit.

As a captured CUDA graph does, it knows the module as it was. So before every replay it is looked
up whether that still holds, and the module itself runs whenever it does not: a forward hook, a
method that was replaced, other operators. Parameters, pages or angles that have moved, and modules
that were exchanged, make a new recording.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from attention import AttentionBackend, AttentionMetadata, PagedAttention
from attention.native import NativeAttention
from attention.native.recording import NotRecordable, Recorder, Recording
from kvcache.storage import KVStorage
from rollout.model import Decoder
from rollout.model.native import NativeOperators
from rollout.model.rotary import Rotation

logger = logging.getLogger(__name__)

CAPACITY = 256
"""Rows of a recording. In a step of more, Python's part is small."""
_FORWARD = Decoder.forward


class _Modules:
    """What of a module tree a recording relies on, in lists that are quick to read."""

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._parameters = [(m._parameters, name) for m in modules for name in m._parameters]
        self._children = [(m._modules, name) for m in modules for name in m._modules]
        self._hooks = [d for m in modules for d in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooks += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._own = [vars(m) for m in modules]
        self._forwards: dict[type[nn.Module], object] = {type(m): type(m).forward for m in modules}
        self._forwards[type(root)] = _FORWARD

    @property
    def watched(self) -> bool:
        """Whether somebody wants to see or change what a forward does."""
        return (
            any(self._hooks)
            or any("forward" in own for own in self._own)
            or any(kind.forward is not forward for kind, forward in self._forwards.items())
        )

    def places(self) -> list[int]:
        """Where the parameters lie, and which modules there are."""
        found = [own[name] for own, name in self._parameters]
        addresses = [0 if p is None else p.data_ptr() for p in found]
        return addresses + [id(own.get(name)) for own, name in self._children]


class RecordedForward:
    """Stands for `model(input_ids, positions, attention)` where that can be written down.

    One step at a time, under `no_grad`. The hidden states it returns are valid until the next call.
    """

    def __init__(
        self, model: Decoder, storage: KVStorage, backend: AttentionBackend, group: int
    ) -> None:
        self._model, self._storage, self._backend, self._group = model, storage, backend, group
        self._recording: Recording | None = None
        self._places: list[int] = []
        self._modules = _Modules(model)
        self._refused = False

    def __call__(
        self, input_ids: Tensor, positions: Tensor, attention: PagedAttention
    ) -> Tensor | None:
        """Hidden states as of the model's forward; None where the model has to do it itself."""
        model = self._model
        if self._refused or len(input_ids) > CAPACITY or not self._is_kernels:
            return None
        if self._modules.watched:
            return None
        x, rotation = model.embed(input_ids, positions)
        places = self._where(rotation)
        if self._recording is not None and places == self._places:
            return self._replay(x, rotation, attention)
        self._modules = _Modules(model)
        if self._modules.watched:
            return None
        try:
            self._record(rotation)
        except NotRecordable as error:
            self._refuse(f"{error}")
            return None
        self._places = self._where(rotation)
        expected = model.transform(model.operators, x, rotation, attention)
        if torch.equal(self._replay(x, rotation, attention), expected):
            return expected
        self._refuse("its first replay differs from the module's forward")
        return None

    @property
    def _is_kernels(self) -> bool:
        """Whether model and attention are made of kernels that can be recorded."""
        native = type(self._model.operators) is NativeOperators
        return native and type(self._backend) is NativeAttention

    def _refuse(self, why: str) -> None:
        """The module runs from now on; it also stores again what a wrong replay may have stored."""
        logger.warning("steps of this model are not recorded, Python runs each: %s", why)
        self._refused, self._recording = True, None

    def _where(self, rotation: Rotation) -> list[int]:
        pages = [page.data_ptr() for page in self._storage.pages]
        angles = [rotation.cos.data_ptr(), rotation.sin.data_ptr()]
        return self._modules.places() + pages + angles

    def _record(self, rotation: Rotation) -> None:
        model, pages = self._model, self._storage.pages
        self._recording = None
        self._positions = torch.zeros(CAPACITY, dtype=torch.int64)
        self._x = torch.zeros(CAPACITY, model.config.hidden_size)
        recorder = Recorder(
            [*model.parameters(), *pages, rotation.cos, rotation.sin, self._positions, self._x]
        )
        one = np.ones(1, np.int64)
        metadata = AttentionMetadata(np.arange(2), one, np.zeros((1, 1), np.int64), 1)
        attention = PagedAttention(metadata, pages, NativeAttention(recorder), self._group)
        self._plan = attention.plan
        angles = Rotation(self._positions, rotation.cos, rotation.sin)
        self._hidden = model.transform(NativeOperators(recorder), self._x, angles, attention)
        self._recording = recorder.recording()

    def _replay(self, x: Tensor, rotation: Rotation, attention: PagedAttention) -> Tensor:
        assert self._recording is not None
        rows = len(x)
        self._x[:rows] = x
        self._positions[:rows] = rotation.positions
        self._plan.become(attention.plan)
        self._recording.replay(rows)
        return self._hidden[:rows]
