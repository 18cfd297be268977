"""When a sample ends, and why."""

from __future__ import annotations

from rollout.request import Request


def stop_ids(request: Request, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Token ids that end this request."""
    own = request.params.stop_token_ids
    if request.params.ignore_eos:
        return frozenset(own)
    return eos_token_ids.union(own) if own else eos_token_ids


def check_stop(request: Request, eos_token_ids: frozenset[int]) -> bool:
    """Set finish and stop reason if the last token ends the request. Stop beats length."""
    token, params = request.tokens[-1], request.params
    if token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos):
        request.finish_reason, request.stop_reason = "stop", token
    elif params.max_tokens is not None and request.num_output_tokens >= params.max_tokens:
        request.finish_reason, request.stop_reason = "length", "max_tokens"
    elif len(request.tokens) >= request.max_total_tokens:
        request.finish_reason, request.stop_reason = "length", "context"
    return request.finish_reason is not None
