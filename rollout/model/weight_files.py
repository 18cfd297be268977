"""The safetensors files of a model folder, read tensor by tensor and written in shards."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollout.model.files import CheckpointError, read_json, write_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Which file holds each tensor, and its shape. Only headers have been read."""

    folder: Path
    files: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, folder: Path) -> "WeightFiles":
        """CheckpointError when there are no weights, a shard is missing, cut off or contradicts the
        index, or a tensor is not stored as plain floating point."""
        expected: Mapping[str, str] | None = None
        if (folder / _SINGLE).exists():
            names = [_SINGLE]
        elif (folder / _INDEX).exists():
            expected = read_json(folder / _INDEX).get("weight_map")
            if not isinstance(expected, dict) or not expected:
                raise CheckpointError(f"{folder / _INDEX} has no weight_map")
            names = sorted(set(expected.values()))
        else:
            raise CheckpointError(_no_weights(folder))
        files: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            with _opened(folder / name) as handle:
                for key in handle.keys():
                    piece = handle.get_slice(key)
                    if piece.get_dtype() not in _FLOATS:
                        raise CheckpointError(
                            f"{folder / name}: {key} is stored as {piece.get_dtype()}; quantised "
                            "weights are not supported, convert them to bf16 or fp32 first"
                        )
                    if key in files:
                        raise CheckpointError(f"{key} is both in {files[key]} and {name}")
                    files[key], shapes[key] = name, tuple(piece.get_shape())
        if expected is not None and expected != files:
            keys = expected.keys() | files.keys()
            wrong = min(key for key in keys if expected.get(key) != files.get(key))
            raise CheckpointError(
                f"{folder / _INDEX} places {wrong} in {expected.get(wrong, 'no file')}, "
                f"but it is in {files.get(wrong, 'no file')}"
            )
        return cls(folder, files, shapes)

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields the named tensors file by file; one tensor is in memory at a time."""
        for file in sorted({self.files[name] for name in names}):
            with _opened(self.folder / file) as handle:
                for name in names:
                    if self.files[name] == file:
                        yield name, handle.get_tensor(name)


def write_weights(
    folder: Path, tensors: Sequence[tuple[str, Tensor]], max_shard_bytes: int
) -> None:
    """Writes `tensors` as one safetensors file, or as numbered shards with an index.

    A shard holds at most `max_shard_bytes` of data, except that a larger tensor has its own.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
        total += size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = _SINGLE
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        contiguous = {key: tensor.contiguous() for key, tensor in shard.items()}
        try:
            save_file(contiguous, folder / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / _INDEX, index)


def save_state(state: Any, path: Path) -> None:
    """`torch.save`, with the OSError of the disk: torch's own does not tell that it is full."""
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, OSError):
                    raise OSError(cause.errno, cause.strerror, str(path)) from error
                cause = cause.__context__
            raise


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist, though the index names it") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file (cut off or damaged: {error}); fetch it again"
        ) from error


def _no_weights(folder: Path) -> str:
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        return (
            f"{folder} has no {_SINGLE}, only {pickled[0]}, which could run code when loaded; "
            "save the model again as safetensors"
        )
    return f"{folder} has neither {_SINGLE} nor {_INDEX}"
