"""Taking in what a step sampled, torch-free: tokens, log-probs, version spans, ends."""

from __future__ import annotations

import numpy as np

from rollout.request import Request, ranked
from rollout.running import RunningBatch
from rollout.sampling_rows import NOTHING_LEFT, SampledRows
from rollout.step_plan import Committed, IntColumn, StepPlan
from rollout.stopping import check_stop


def take_results(
    batch: RunningBatch,
    plan: StepPlan,
    sampled: SampledRows,
    version: int,
    eos_token_ids: frozenset[int],
) -> Committed:
    """Write the step of policy version `version` into the columns; who has ended and why.

    Row i of `sampled` belongs to `plan.sampled_rows[i]`. Ended requests have their reasons and
    keep their rows. Lengths move last: a row interrupted before that is as it was.
    """
    rows, tokens = plan.sampled_rows, sampled.tokens
    good = tokens >= 0
    ended = _failed(batch, rows[~good], tokens[~good], version) if not good.all() else []
    rows, tokens = rows[good], tokens[good]
    at = batch.num_tokens[rows]
    output_start = at - batch.num_prompt_tokens[rows]
    for index in np.flatnonzero(batch.version[rows] != version).tolist():
        row = int(rows[index])
        batch.request(row).spans.append((version, int(output_start[index])))
        batch.version[row] = version
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        top = zip(rows.tolist(), sampled.top_ids[good], sampled.top_logprobs[good], strict=True)
        for row, ids, logprobs in top:
            if batch.num_top[row]:
                batch.request(row).top.append(ranked(ids, logprobs, int(batch.num_top[row])))
    batch.tokens[rows, at] = tokens
    batch.logprobs[rows, at] = sampled.logprobs[good]
    batch.sampling_logprobs[rows, at] = sampled.sampling_logprobs[good]
    batch.num_computed[plan.rows] += plan.num_new
    batch.num_tokens[rows] = at + 1
    may_end = (at + 1 >= batch.stop_length[rows]) | batch.watched[rows]
    may_end |= np.isin(tokens, batch.stop_ids)
    for index in np.flatnonzero(may_end).tolist():
        request = batch.request(int(rows[index]))
        if check_stop(request, int(tokens[index]), int(at[index]) + 1, eos_token_ids):
            ended.append(request)
    return Committed(ended, rows[output_start == 0], len(rows))


def _failed(
    batch: RunningBatch, rows: IntColumn, marks: IntColumn, version: int
) -> list[Request]:
    """Rows that got no token: their requests end by name, with the tokens so far."""
    failed = [batch.request(row) for row in rows.tolist()]
    for request, row, mark in zip(failed, rows.tolist(), marks.tolist(), strict=True):
        position = int(batch.num_tokens[row])
        if mark == NOTHING_LEFT:
            request.fail(
                "error",
                "no_token_allowed",
                f"allowed_token_ids, bad_words and min_tokens leave no token for position "
                f"{position}; the tokens so far are kept",
            )
        else:
            request.fail(
                "error",
                "non_finite_logits",
                f"the model's logits at position {position} are not finite under "
                f"policy version {version}; the tokens so far are kept",
            )
    return failed
