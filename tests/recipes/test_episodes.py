"""R1: conversations, token in, token out; each a function of its own row, seed and number."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import tiny_run
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from recipes.environment import Done, Observation, encode_observation, end_of_turn
from recipes.episodes import run_episodes, sample_rows
from recipes.errors import RunError
from recipes.rewards import RewardError, score_rollouts
from recipes.tasks import calculator
from recipes.tasks.task import with_rewards
from rollout import RolloutBatch, RolloutEngine, SamplingParams, Tokenizer, load_pretrained
from tests.rollout.test_tokenizer import CHATML, write_folder
from trainer_bridge import score

torch.set_num_threads(1)
PARAMS = SamplingParams(n=3, max_tokens=24, seed=5)
ROWS = [{"prompt": f"{a}{b}=", "letter": b} for a in "abc" for b in "abc"]


@dataclass
class Echo:
    """Answers `=` and how often it was asked, in letters, until it has been asked `turns` times."""

    turns: int = 3
    heard: list = field(default_factory=list)

    def reset(self, row):
        return row["prompt"]

    def step(self, token_ids, text):
        self.heard.append((list(token_ids), text))
        if len(self.heard) == self.turns:
            return Done(1.0)
        return Observation("=" + "abcdefgh"[len(self.heard)], 0.25)


@pytest.fixture
def loaded(policy):
    model, tokenizer = load_pretrained(policy)
    return model, tokenizer, tiny_run.LocalPool(RolloutEngine(model, tokenizer, block_size=4))


def recording(pool, calls):
    def run_batch(prompts, params, *, session_ids=None):
        calls.append((prompts, params, session_ids))
        return pool.run_batch(prompts, params, session_ids=session_ids)

    return run_batch


def test_a_conversation_is_what_was_sampled_and_what_was_said(loaded):
    """The policy reads on from its own ids; what it was told is marked, in its place."""
    model, tokenizer, pool = loaded
    calls, made = [], []

    def environment():
        made.append(Echo())
        return made[-1]

    batch, earned = run_episodes(recording(pool, calls), tokenizer, environment, ROWS, PARAMS, 9)
    assert len(batch) == len(earned) == 27 and len(made) == 27
    assert batch.prompt_index.tolist() == np.repeat(np.arange(9), 3).tolist()
    (first, _, sessions), *later = calls
    assert first == [tokenizer.encode(row["prompt"]) for row in ROWS]
    assert sessions == list(range(9))
    for _, params, session_ids in later:
        assert all(p.n == 1 for p in params) and session_ids == sorted(session_ids)
    finished = 0
    for rollout, env, reward in zip(batch, made, earned, strict=True):
        expected, mask = [], []
        for turn, (token_ids, text) in enumerate(env.heard):
            assert text == tokenizer.decode(token_ids)
            expected += token_ids
            mask += [True] * len(token_ids)
            if turn < 2:
                answer = tokenizer.encode("=" + "abcdefgh"[turn + 1])
                expected += answer
                mask += [False] * len(answer)
        if rollout.finish_reason == "stop":
            assert rollout.token_ids == expected and rollout.response_mask == mask
            assert reward == 1.5
            finished += 1
        else:  # the last turn had no room, or did not end
            size = min(len(expected), len(rollout.token_ids))
            assert rollout.finish_reason == "length" and reward == 0.25 * len(env.heard)
            assert rollout.token_ids[:size] == expected[:size]
            assert len(rollout.token_ids) <= 24
    assert 5 < finished < 27, "both kinds occurred"
    scored = torch.cat(score(model, batch)).detach()
    assert torch.equal(scored, torch.from_numpy(batch.logprobs[batch.response_mask]))


def test_the_kv_of_earlier_turns_is_found_again(loaded):
    """K15, through the driver: all full blocks of what a conversation had before."""
    _, tokenizer, pool = loaded
    calls = []
    run_batch = recording(pool, calls)
    hits = []

    def counting(prompts, params, *, session_ids=None):
        before = pool.engine.get_stats()["prefix_hit_tokens"]
        found = run_batch(prompts, params, session_ids=session_ids)
        hits.append(pool.engine.get_stats()["prefix_hit_tokens"] - before)
        return found

    params = SamplingParams(n=1, max_tokens=40, seed=1)
    run_episodes(counting, tokenizer, Echo, ROWS, params, 9)
    contexts, *_ = calls[1]
    assert len(contexts) > 3
    earlier = [len(context) - 2 for context in contexts]  # two tokens were said to it
    assert hits[1] == sum((length - 1) // 4 * 4 for length in earlier)


def test_ids_are_never_encoded_again(loaded, monkeypatch):
    """A tokenizer that would write the same text with other ids: `ab` is one token, or two."""
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "$": 3}, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["$"])
    tokenizer = Tokenizer(backend.to_str(), {"eos_token": "$"}, None, (3,))
    assert tokenizer.encode("ab") == [2] != [0, 1]
    contexts = []

    def run_batch(prompts, params, *, session_ids=None):
        """Says `a`, `b` as two tokens, every time."""
        contexts.extend(prompts)
        demonstrations = RolloutBatch.from_demonstrations(prompts, [[0, 1, 3]] * len(prompts))
        return demonstrations

    batch, _ = run_episodes(
        run_batch, tokenizer, Echo, [{"prompt": "ab"}], SamplingParams(max_tokens=50), 9
    )
    answers = [tokenizer.encode("=b"), tokenizer.encode("=c")]
    said = [0, 1, 3]
    assert contexts == [[2], [2, *said, *answers[0]], [2, *said, *answers[0], *said, *answers[1]]]
    assert batch[0].token_ids == [*said, *answers[0], *said, *answers[1], *said]
    text = tokenizer.decode(contexts[1])
    assert tokenizer.encode(text) != contexts[1], "the control: written again, other ids"


def test_each_is_a_function_of_its_own_row_seed_and_number(loaded):
    """Not of which others are still open, of their order, or of how many there are."""
    _, tokenizer, pool = loaded
    made = []

    def mixed():
        made.append(Echo(turns=3 if len(made) < 3 else 1 + len(made) % 2))
        return made[-1]

    def run(rows=ROWS, environment=Echo, params=PARAMS):
        return list(run_episodes(pool.run_batch, tokenizer, environment, rows, params, 9)[0])

    all_long, some_short = run(), run(environment=mixed)
    assert all_long[:3] == some_short[:3]
    assert all_long[3:] != some_short[3:]
    backwards = run(ROWS[::-1])
    fewer = run(params=replace(PARAMS, n=2))
    without = [replace(rollout, prompt_index=0) for rollout in all_long]
    for row in range(9):
        mine = without[3 * row : 3 * row + 3]
        assert [replace(r, prompt_index=0) for r in backwards[3 * (8 - row) :][:3]] == mine
        assert [replace(r, prompt_index=0) for r in fewer[2 * row :][:2]] == mine[:2]
        assert run(ROWS[row : row + 1]) == mine
    assert max(len(rollout.version_spans) for rollout in all_long) > 1


def test_bounds(loaded):
    """Of turns, of tokens, of the engine's context; what was earned by then remains."""
    model, tokenizer, pool = loaded
    one, earned = run_episodes(pool.run_batch, tokenizer, Echo, ROWS, PARAMS, 1)
    assert one.num_turns.tolist() == [1] * 27 and one.response_mask.all()
    ended = [r.stop_reason for r in one if r.finish_reason == "length"]
    assert "max_turns" in ended and set(ended) <= {"max_turns", "max_tokens"}
    stopped = [reward for r, reward in zip(one, earned, strict=True)
               if r.stop_reason == "max_turns"]  # fmt: skip
    assert set(stopped) == {0.25}

    short = SamplingParams(n=3, max_tokens=4, seed=5)
    few, _ = run_episodes(pool.run_batch, tokenizer, Echo, ROWS, short, 9)
    assert few.lengths.max() <= 4 and few.num_turns.max() > 1
    assert {r.finish_reason for r in few} == {"length"}
    assert all(few.response_mask[end - 1] for end in few.offsets[1:]), "the policy's is the last"

    narrow = tiny_run.LocalPool(RolloutEngine(model, tokenizer, max_seq_len=12))
    cut, _ = run_episodes(
        narrow.run_batch, tokenizer, lambda: Echo(9), ROWS, SamplingParams(seed=5), 9
    )
    assert {(r.finish_reason, r.stop_reason) for r in cut} <= {("length", "context")}
    assert max(len(r.prompt_token_ids + r.token_ids) for r in cut) <= 12
    assert {r.error_reason for r in cut} <= {None, "prompt_too_long"}


def test_one_that_was_aborted_or_failed_has_no_reward(loaded):
    _, tokenizer, pool = loaded

    def run_batch(prompts, params, *, session_ids=None):
        found = pool.run_batch(prompts, params)
        if isinstance(params, SamplingParams):
            return found
        rollouts = list(found)
        aborted = RolloutBatch.from_rollouts(rollouts[:1])
        spoilt = [r if i else aborted_one(aborted[0]) for i, r in enumerate(rollouts)]
        return RolloutBatch.from_rollouts(spoilt)

    def aborted_one(rollout):
        return replace(rollout, finish_reason="aborted")

    batch, earned = run_episodes(run_batch, tokenizer, Echo, ROWS, PARAMS, 9)
    aborted = [i for i, r in enumerate(batch) if r.finish_reason == "aborted"]
    assert aborted and all(earned[i] is None for i in aborted)
    assert batch.num_turns[aborted].max() > 1, "what was said before stays"
    too_long = [{"prompt": "a" * 99}]
    batch, earned = run_episodes(pool.run_batch, tokenizer, Echo, too_long, PARAMS, 9)
    assert {r.finish_reason for r in batch} == {"rejected"} and earned == [None] * 3


class Frail(Echo):
    """Fails in the second turn of every other conversation."""

    count, closed = 0, 0
    share = 2

    def __init__(self):
        super().__init__()
        Frail.count += 1
        self.fails = Frail.count % self.share == 0

    def step(self, token_ids, text):
        if self.fails and len(self.heard) == 1:
            raise TimeoutError("the tool did not answer")
        return super().step(token_ids, text)

    def close(self):
        Frail.closed += 1


class AlwaysFrail(Frail):
    share = 1


class Careless(Echo):
    def step(self, token_ids, text):
        return "a", 0.5


def test_an_environment_that_fails_spoils_its_own_conversation(loaded):
    """R6: the batch says which and why; the others are what they would have been. Where all fail
    the run must not go on as if there were nothing to learn."""
    _, tokenizer, pool = loaded
    params = replace(PARAMS, max_tokens=60)
    whole, _ = run_episodes(pool.run_batch, tokenizer, Echo, ROWS, params, 9)
    batch, earned = run_episodes(pool.run_batch, tokenizer, Frail, ROWS, params, 9)
    assert Frail.closed == Frail.count == 27
    failed = [i for i, r in enumerate(batch) if r.finish_reason == "error"]
    assert len(failed) > 5 and all(i % 2 for i in failed)
    for i, rollout in enumerate(batch):
        if i in failed:
            assert rollout.error_reason == "environment_failed" and earned[i] is None
            assert rollout.error_message == "TimeoutError: the tool did not answer"
            assert rollout.token_ids == whole[i].token_ids[: len(rollout.token_ids)]
        else:
            assert rollout == whole[i]
    with pytest.raises(RunError, match="failed in each of the 3 conversations, first with Timeout"):
        run_episodes(pool.run_batch, tokenizer, AlwaysFrail, ROWS[:1], params, 9)
    with pytest.raises(TypeError, match=r"Careless.step must return an Observation or Done, got t"):
        run_episodes(pool.run_batch, tokenizer, Careless, ROWS, params, 9)


class Fickle(Echo):
    count = 0

    def reset(self, row):
        Fickle.count += 1
        return "ab"[Fickle.count % 2] + "="


def test_one_row_one_prompt(loaded):
    _, tokenizer, pool = loaded
    with pytest.raises(ValueError, match="environments of row 0 begin with different prompts"):
        run_episodes(pool.run_batch, tokenizer, Fickle, ROWS, PARAMS, 9)


def test_a_turn_that_belongs_to_another_conversation_is_noticed(loaded):
    """R1: the check when a turn is appended."""
    _, tokenizer, pool = loaded

    def disordered(prompts, params, *, session_ids=None):
        found = pool.run_batch(prompts, params)
        if isinstance(params, SamplingParams):
            return found
        return RolloutBatch.from_rollouts(list(found)[::-1])

    with pytest.raises(ValueError, match="turn 2 of a conversation was sampled after other tokens"):
        run_episodes(disordered, tokenizer, Echo, ROWS, PARAMS, 9)


@dataclass(frozen=True)
class EchoTask(tiny_run.RepeatTask):
    rewards: dict = field(default_factory=dict)

    def environment(self):
        return Echo()


def test_the_environments_reward_is_one_more_column(loaded):
    _, tokenizer, pool = loaded
    task = with_rewards(EchoTask(), {"length": lambda p, texts, r: [len(t) / 8 for t in texts]})
    batch, earned = sample_rows(pool.run_batch, tokenizer, task, ROWS, PARAMS, 9)
    texts, table = score_rollouts(task.rewards, tokenizer, ROWS, batch, earned)
    assert list(table.columns) == ["environment", "length"]
    assert table.total == [e + len(t) / 8 for e, t in zip(earned, texts, strict=True)]
    unscored = [None, *earned[1:]]  # cannot be scored, whatever the functions say
    assert score_rollouts(task.rewards, tokenizer, ROWS, batch, unscored)[1].total[0] is None
    with pytest.raises(RewardError, match="a reward function is called 'environment'"):
        score_rollouts({"environment": lambda *_: []}, tokenizer, ROWS, batch.select([]), [])
    with pytest.raises(RewardError, match="the environment: reward of sample 1 is nan"):
        score_rollouts({}, tokenizer, ROWS, batch, [0.0, float("nan"), *earned[2:]])
    plain, nothing = sample_rows(
        pool.run_batch, tokenizer, tiny_run.RepeatTask(), ROWS, PARAMS, 9
    )
    assert nothing is None and plain.num_turns.max() == 1


ANSWER = [{"role": "tool", "content": "42"}]
LLAMA_3 = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n\n' + m['content'] + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' </s>' }}{% endif %}{% endfor %}"
)
HARMONY = LLAMA_3.replace("<|eot|>", "<|end|>")


def chat_tokenizer(template, special, ends):
    """One token per character beside the special ones; `ends`: those that end a generation."""
    characters = sorted({*"".join(special), *template, *"usertoolassistant two42hello?abcdef"})
    words = {word: i for i, word in enumerate([*special, *characters])}
    backend = Backend(models.BPE(vocab=words, merges=[], unk_token=special[0]))
    backend.add_special_tokens(list(special))
    backend.decoder = decoders.Fuse()
    ids = tuple(words[end] for end in ends)
    return Tokenizer(backend.to_str(), {"eos_token": ends[0]}, template, ids)


@pytest.mark.parametrize(
    ("template", "special", "ends", "end", "role"),
    [
        (
            CHATML, ("<|im_start|>", "<|im_end|>", "<|e|>"), ("<|im_end|>", "<|e|>"), "<|im_end|>",
            "tool",
        ),
        (LLAMA_3, ("<|start|>", "<|eot|>", "<|e|>"), ("<|e|>", "<|eot|>"), "<|eot|>", "tool"),
        (LLAMA_2, ("<s>", "</s>"), ("</s>",), "</s>", "user"),
    ],
    ids=["chatml", "llama 3", "llama 2"],
)  # fmt: skip
def test_chat_messages_follow_the_template(template, special, ends, end, role):
    """Said turn by turn it is what the template writes for the whole conversation, whichever of
    the tokens that end a generation the template uses, and whatever stands before it."""
    tokenizer = chat_tokenizer(template, special, ends)
    (closing,) = tokenizer.encode(end)
    assert end_of_turn(tokenizer, chat=True) == [closing]
    assert end_of_turn(tokenizer, chat=False) == list(tokenizer.eos_token_ids[:1])
    chat, answer = [{"role": "user", "content": "hello"}], [{"role": role, "content": "42"}]
    whole = [*chat, {"role": "assistant", "content": "two"}, *answer]
    space = tokenizer.encode(" ") if template is LLAMA_2 else []
    turn = [*space, *tokenizer.encode("two"), *space, closing]
    heard = encode_observation(tokenizer, answer, closing)
    assert tokenizer.apply_chat_template(chat) + turn + heard == (
        tokenizer.apply_chat_template(whole)
    )
    cut = encode_observation(tokenizer, answer, turn[-2])  # no end of turn yet
    assert cut[-len(heard) :] == heard and closing in cut[: -len(heard)]
    assert encode_observation(tokenizer, "42", closing) == tokenizer.encode("42")


def test_an_end_of_generation_that_is_not_the_templates_stands_for_it():
    """The turn ended; it does not end a second time."""
    tokenizer = chat_tokenizer(HARMONY, ("<|start|>", "<|end|>", "<|return|>"), ("<|return|>",))
    (end,) = tokenizer.eos_token_ids
    heard = encode_observation(tokenizer, ANSWER, end)
    assert heard == tokenizer.encode("<|start|>tool\n\n42<|end|><|start|>assistant\n\n")
    assert end_of_turn(tokenizer, chat=True) == [end]


def test_a_message_that_the_template_drops_is_refused():
    tokenizer = chat_tokenizer(LLAMA_2, ("<s>", "</s>"), ("</s>",))
    with pytest.raises(ValueError, match="leaves out a message of role 'tool'"):
        encode_observation(tokenizer, ANSWER, 1)


def test_a_template_that_changes_the_assistants_words_is_refused(tmp_path):
    text, settings, _, eos = Tokenizer.from_folder(write_folder(tmp_path / "chat"))._arguments
    shouting = CHATML.replace("message['content']", "message['content'] | upper")
    tokenizer = Tokenizer(text, settings, shouting, eos)
    with pytest.raises(ValueError, match="does not show an assistant's words as they are"):
        encode_observation(tokenizer, ANSWER, 2)


def test_the_calculator():
    for question, answer in (
        ("48+75=", "123"), ("48-75=", "-27"), ("-27+3=", "-24"), ("1+2+3=", ""), ("=", ""),
        ("12=", ""), ("1 + 2=", ""), ("--1+2=", ""),
    ):  # fmt: skip
        assert calculator.calculated(question) == answer
    turns = calculator.asked("48 + 75 - 69")
    assert turns == ["48+75=", "123\n", "123-69=", "54\n", "54"]
    environment = calculator.Calculator()
    assert environment.reset({"prompt": "48+75-69=", "answer": "54"}) == "48+75-69="
    for said, heard in (turns[:2], turns[2:4]):
        assert environment.step([], said) == Observation(heard)
    assert environment.step([], "54") == environment.step([], " 54") == Done(1.0)
    assert environment.step([], "55") == environment.step([], "") == Done(0.0)
