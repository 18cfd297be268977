"""The settings of the engines of one pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`RolloutEngine`'s settings, as they travel to rollout actors; names and defaults are its.

    operators: name of the model's operators; None = the best that serve. Trainer and actors of a
        run get the same ones, and the same attention backend.
    num_threads: CPU threads of one actor; None = the machine's cores shared among the actors.
    """

    max_batch_size: int = 64
    max_seq_len: int | None = None
    attention_backend: str | None = None
    operators: str | None = None
    exact: bool | None = None
    enforce_eager: bool = False
    in_flight: str = "recompute"
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"EngineConfig.{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"EngineConfig.num_threads must be at least 1, got {self.num_threads}")
