"""A naive engine to compare the real one with: one sequence, no cache, a full forward per token.

Everything is written as the definitions read, in float64 and plain Python, and shares nothing with
the engine but the model, exact attention and the noise. It says how near each of its decisions was
to going the other way, because the engine computes in fp32.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from attention import AttentionMetadata, PackedAttention
from rollout import Decoder, SamplingParams, Tokenizer
from rollout.model import attention_for
from rollout.model.operators import select_operators
from rollout.noise import noise_key, uniforms

NEVER = -math.inf


class Choice(NamedTuple):
    """One token.

    logprob, sampling_logprob: float64, by definition. exact_logprob: of the logits as the model
    gave them, in fp32 by `rollout.logprobs`, to be compared bit for bit. margin: how far, about in
    probability, another choice was. distribution: log-probs `[vocab]` before edits.
    """

    token: int
    logprob: float
    sampling_logprob: float
    exact_logprob: float
    margin: float
    distribution: list[float]


@dataclass(frozen=True, slots=True)
class NaiveResult:
    """One sample; its choices are the output tokens, the stop token included."""

    choices: list[Choice]
    finish_reason: str
    stop_reason: int | str | None
    text: str | None

    @property
    def token_ids(self) -> list[int]:
        return [choice.token for choice in self.choices]


def naive_rollout(
    model: Decoder,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    sample_index: int,
    seed: int,
    max_total_tokens: int,
    eos_token_ids: Sequence[int],
    tokenizer: Tokenizer | None = None,
) -> NaiveResult:
    """max_total_tokens: prompt + output, whatever limits it. "error" ends a sample that has no
    token left to choose."""
    prompt, output = list(prompt_ids), list[int]()
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    bad_words = encoded_words(params, tokenizer)
    stream = noise_key(seed, prompt, sample_index)
    choices: list[Choice] = []
    text = ""
    reason: tuple[str, int | str | None] | None = None
    while reason is None:
        row = last_logits(model, prompt + output)
        edited = edited_logits(row.tolist(), params, prompt, output, stop_ids, bad_words)
        if max(edited) == NEVER:
            reason = "error", None
            break
        position = np.array([len(prompt) + len(output)])
        u = float(uniforms(np.array([stream], np.uint64), position)[0])
        choices.append(choose(row, edited, params, u))
        output.append(choices[-1].token)

        stop = None
        if params.needs_text:
            assert tokenizer is not None
            num_old, text = len(text), tokenizer.decode(output)
            if len(output) > params.min_tokens:
                stop = first_stop(text, num_old, params.stop)
        if output[-1] in stop_ids:
            reason = "stop", output[-1]
        elif stop is not None:
            reason = "stop", stop[1]
        elif len(output) == params.max_tokens:
            reason = "length", "max_tokens"
        elif len(prompt) + len(output) == max_total_tokens:
            reason = "length", "context"
        if stop is not None:
            text = text[: stop[0]] + stop[1] * params.include_stop_str_in_output
    return NaiveResult(choices, *reason, text if params.needs_text else None)


def naive_prompt_logprobs(
    model: Decoder, prompt_ids: Sequence[int], temperature: float
) -> list[list[float]]:
    """Log-probs `[len(prompt) - 1][vocab]` after each prompt token but the last."""
    rows = all_logits(model, list(prompt_ids))[:-1].tolist()
    return [log_softmax([x / temperature for x in row]) for row in rows]


def all_logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    """Logits `[len(ids), vocab]` of a forward over all of them with exact attention."""
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    metadata = AttentionMetadata.packed([len(ids)])
    attention = PackedAttention(metadata, attention_for(model), group, torch.device("cpu"))
    with torch.no_grad():
        return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), attention))


def last_logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    return all_logits(model, ids)[-1]


def choose(row: torch.Tensor, edited: list[float], params: SamplingParams, u: float) -> Choice:
    """The token at `u` of the edited logits, with the log-probs of `row`, which is unedited."""
    temperature = params.temperature or 1.0
    distribution = log_softmax([x / temperature for x in row.tolist()])
    if params.greedy:
        token, margin = best(edited)
        sampling_logprob = 0.0
    else:
        probs, of_filters = kept_probs([x / temperature for x in edited], params)
        token, of_draw = drawn(probs, u)
        sampling_logprob, margin = math.log(probs[token]), min(of_filters, of_draw)
    exact = exact_logprob(row, temperature, token)
    return Choice(token, distribution[token], sampling_logprob, exact, margin, distribution)


def exact_logprob(row: torch.Tensor, temperature: float, token: int) -> float:
    vocabulary = select_operators(None, row.device, row.dtype).vocabulary
    logits, t = row.unsqueeze(0), torch.tensor([temperature])
    lse, _ = vocabulary.log_normalizers(logits, t)
    return float(vocabulary.gather(logits, t, torch.tensor([token]), lse))


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    total = math.log(sum(math.exp(x - top) for x in logits))
    return [x - top - total for x in logits]


def encoded_words(params: SamplingParams, tokenizer: Tokenizer | None) -> list[list[int]]:
    words: list[list[int]] = []
    for word in params.bad_words:
        if isinstance(word, str):
            assert tokenizer is not None
            words += [tokenizer.encode(word), tokenizer.encode(" " + word)]
        else:
            words.append(list(word))
    return words


def edited_logits(
    logits: list[float],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    stop_ids: set[int],
    bad_words: list[list[int]],
) -> list[float]:
    """Allowed ids, bad words, min_tokens, bias, penalties; a banned logit stays banned."""
    edited = list(logits)
    bias = dict(params.logit_bias)
    for token in range(len(edited)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            edited[token] = NEVER
        for word in bad_words:
            if token == word[-1] and ends_with(output, word[:-1]):
                edited[token] = NEVER
        if len(output) < params.min_tokens and token in stop_ids:
            edited[token] = NEVER
        edited[token] += bias.get(token, 0.0)
    for token in {*prompt, *output}:
        if edited[token] > 0:
            edited[token] /= params.repetition_penalty
        else:
            edited[token] *= params.repetition_penalty
    for token, count in Counter(output).items():
        edited[token] -= params.frequency_penalty * count + params.presence_penalty
    return edited


def ends_with(output: list[int], ids: list[int]) -> bool:
    return not ids or output[-len(ids) :] == ids


def kept_probs(scaled: list[float], params: SamplingParams) -> tuple[list[float], float]:
    """Probabilities after min_p, top_k and top_p, and how near a token was to another fate:
    relative to its probability for the first two, of the whole for top_p."""
    probs = [math.exp(x) for x in log_softmax(scaled)]
    ranked = sorted((i for i in range(len(probs)) if probs[i] > 0), key=lambda i: (-probs[i], i))
    margin = 1.0
    if params.min_p > 0:
        least = params.min_p * probs[ranked[0]]
        margin = min([margin, *(abs(probs[i] / least - 1) for i in ranked[1:])])
        ranked = [i for i in ranked if probs[i] >= least]
    if 0 < params.top_k < len(ranked):
        last, next_one = (probs[i] for i in ranked[params.top_k - 1 : params.top_k + 1])
        margin = min(margin, last / next_one - 1)
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        left = sum(probs[i] for i in ranked)
        mass, count = 0.0, 0
        while count == 0 or mass < params.top_p * left:
            mass += probs[ranked[count]]
            margin = min(margin, abs(mass - params.top_p * left))
            count += 1
        ranked = ranked[:count]
    kept = sum(probs[i] for i in ranked)
    return [probs[i] / kept if i in ranked else 0.0 for i in range(len(probs))], margin


def drawn(probs: list[float], u: float) -> tuple[int, float]:
    """The first token whose cumulative probability exceeds u, and u's distance from the next."""
    cumulative = 0.0
    for token, p in enumerate(probs):
        if p > 0 and cumulative <= u < cumulative + p:
            return token, min(u - cumulative, cumulative + p - u)
        cumulative += p
    last = max(token for token, p in enumerate(probs) if p > 0)  # u lies in what rounding lost
    return last, 0.0


def best(logits: list[float]) -> tuple[int, float]:
    """The best token, the lower id among equals, and its lead in probability."""
    first, second = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:2]
    probs = [math.exp(x) for x in log_softmax(logits)]
    return first, probs[first] - probs[second]


def first_stop(text: str, num_old: int, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """Where a stop string begins that ends beyond `num_old`; the first of the first such."""
    found = [
        (start, order)
        for order, string in enumerate(stop)
        for start in range(len(text))
        if text.startswith(string, start) and start + len(string) > num_old
    ]
    if not found:
        return None
    start, order = min(found)
    return start, stop[order]
