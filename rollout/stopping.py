"""When a sample ends, and why."""

from __future__ import annotations

from rollout.request import Request
from rollout.sampling import SamplingParams


def stop_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Token ids that end a request."""
    if params.ignore_eos:
        return frozenset(params.stop_token_ids)
    return eos_token_ids.union(params.stop_token_ids)


def check_stop(
    request: Request, token: int, num_tokens: int, eos_token_ids: frozenset[int]
) -> bool:
    """Set finish and stop reason if `token`, the last of `num_tokens`, ends the request.

    Stop beats length, and a stop id beats a stop string. Takes the token into the request's text.
    """
    params, text = request.params, request.detokenizer
    stop_string = None if text is None else text.push(token)
    if token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos):
        request.finish_reason, request.stop_reason = "stop", token
    elif stop_string is not None:
        request.finish_reason, request.stop_reason = "stop", stop_string
    elif num_tokens >= request.max_total_tokens:
        limit = params.max_tokens
        by_request = limit is not None and num_tokens - request.num_prompt_tokens >= limit
        request.finish_reason = "length"
        request.stop_reason = "max_tokens" if by_request else "context"
    return request.finish_reason is not None
