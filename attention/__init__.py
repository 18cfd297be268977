"""Attention for both sides of Lockstep: packed rows under autograd, paged steps of the engine."""

from attention.backends import Attention, AttentionBackend, select_backend
from attention.metadata import AttentionMetadata
from attention.packed import PackedAttention
from attention.paged import PagedAttention

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionMetadata",
    "PackedAttention",
    "PagedAttention",
    "select_backend",
]
