"""Checks of single fields of a configuration, with errors that name them."""

from __future__ import annotations


def at_least(name: str, value: float, minimum: float, reason: str = "") -> None:
    """ValueError naming the field unless value >= minimum; reason: why, in brackets."""
    if not value >= minimum:
        because = f" ({reason})" if reason else ""
        raise ValueError(f"{name} must be at least {minimum}{because}, got {value}")


def positive(name: str, value: float) -> None:
    """ValueError naming the field unless the value is positive and finite."""
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number, got {value}")
