"""The embedded job: disjoint splits, right demonstrations, an exact reward, a loadable policy."""

import itertools
from collections import Counter
from decimal import Decimal

import pytest
import reasoning_gym
import torch
import transformers

from attention import AttentionMetadata, PackedAttention, select_backend
from recipes.config import TaskConfig
from recipes.tasks.catalog import load_task
from recipes.tasks.embedded import (
    GUESS_ERROR,
    GUESS_SHARE,
    EmbeddedTask,
    build_policy_folder,
    character_tokenizer,
    exact_match,
    is_heldout,
    load,
    worked,
)
from recipes.tasks.task import Demonstrates
from rollout.model.checkpoint import load_pretrained

TWO_DIGITS = TaskConfig(train_size=200, heldout_size=100, min_digits=2, max_digits=2)


@pytest.fixture(scope="module")
def task():
    return load(TWO_DIGITS, seed=3)


def numbers(prompt):
    return tuple(sorted(int(n) for n in prompt.rstrip("=").replace("-", "+").split("+")))


def test_sizes_and_distinctness(task):
    assert len(set(task.train["prompt"])) == 200
    assert len(set(task.heldout["prompt"])) == 100


def test_no_held_out_numbers_are_trained_on(task):
    """Not even in another order, with other signs, as a demonstration, or under another seed."""
    other = load(TWO_DIGITS, seed=4)
    demonstrated = [prompt for prompt, _ in task.demonstrations(5000, 0)]
    trained = {numbers(p) for p in [*task.train["prompt"], *other.train["prompt"], *demonstrated]}
    held_out = {numbers(p) for p in [*task.heldout["prompt"], *other.heldout["prompt"]]}
    assert not trained & held_out
    unsplit = reasoning_gym.create_dataset(
        "chain_sum", seed=1, size=5000, min_terms=2, max_terms=2, min_digits=2, max_digits=2
    )
    drawn = {numbers(e["metadata"]["expression"].replace(" ", "")) for e in unsplit}
    assert drawn & held_out, "control: without the split the held-out numbers do come up"


def test_the_side_depends_on_the_numbers_alone():
    for a, b in itertools.product(range(10, 40, 3), range(50, 90, 7)):
        spellings = [f"{a} + {b}", f"{b} + {a}", f"{a} - {b}", f"{b} - {a}", f"{a}-{b}"]
        assert len({is_heldout(spelling) for spelling in spellings}) == 1
    sides = Counter(is_heldout(f"{a} + {b}") for a in range(10, 100) for b in range(a, 100))
    assert 0.08 < sides[True] / sides.total() < 0.12


def test_seeds(task):
    again, other = load(TWO_DIGITS, seed=3), load(TWO_DIGITS, seed=4)
    assert again.train["prompt"] == task.train["prompt"] != other.train["prompt"]
    assert task.heldout["prompt"] == other.heldout["prompt"], "every run is judged by the same"
    assert list(task.demonstrations(50, 7)) == list(task.demonstrations(50, 7))
    assert list(task.demonstrations(50, 7)) != list(task.demonstrations(50, 8))
    shared = set(task.train["prompt"]) & set(other.train["prompt"])
    assert len(shared) < 50, "neighbouring seeds are different draws, not the same one shifted"


def test_answers_agree_with_the_generator_and_its_scorer(task):
    scorer = reasoning_gym.create_dataset("chain_sum", seed=0, size=1)
    for row in task.train:
        first, second = (int(n) for n in row["expression"].replace(" - ", " + ").split(" + "))
        value = first - second if " - " in row["expression"] else first + second
        assert Decimal(row["answer"]) == value
        assert row["question"].endswith(f"{row['expression']} =")
        assert scorer.score_answer(row["answer"], dict(row)) == 1.0


@pytest.mark.parametrize(
    ("expression", "completion"),
    [
        ("42 - 25", "\n4-2=2\n2-5=-3\n17"),
        ("20 - 68", "\n2-6=-4\n0-8=-8\n-48"),
        ("84 + 96", "\n8+9=17\n4+6=10\n180"),
        ("8 - 8", "\n8-8=0\n0"),
        ("12 + 47 - 30", "\n1+4-3=2\n2+7-0=9\n29"),
        ("123 - 456", "\n1-4=-3\n2-5=-3\n3-6=-3\n-333"),
    ],
)
def test_worked(expression, completion):
    assert worked(expression) == completion


def test_worked_refuses_ragged_numbers():
    with pytest.raises(ValueError, match="equally many digits, got '7 \\+ 12'"):
        worked("7 + 12")


def test_demonstrations_are_a_mixture(task):
    """The work is right and earns the reward; a guess is right one time in 2 * GUESS_ERROR + 1."""
    pairs = list(task.demonstrations(4000, 1))
    guesses = [(p, c) for p, c in pairs if c.startswith(" ")]
    works = [(p, c) for p, c in pairs if c.startswith("\n")]
    assert len(guesses) + len(works) == 4000
    assert abs(len(guesses) / 4000 - GUESS_SHARE) < 0.03

    def rows(pairs):
        return [{"answer": worked(p.rstrip("=")).rpartition("\n")[2]} for p, _ in pairs]

    assert set(exact_match([""] * len(works), [c for _, c in works], rows(works))) == {1.0}
    rewards = exact_match([""] * len(guesses), [c for _, c in guesses], rows(guesses))
    assert abs(sum(rewards) / len(guesses) - 1 / (2 * GUESS_ERROR + 1)) < 0.03


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("17", 1.0),
        (" 17", 1.0),
        ("\n4-2=2\n2-5=-3\n17", 1.0),
        ("\nanything\n17", 1.0),
        ("-17", 0.0),
        ("117", 0.0),
        ("017", 0.0),
        ("17\n", 0.0),
        ("\n4-2=2\n2-5=17", 0.0),
        ("", 0.0),
    ],
)
def test_exact_match(completion, reward):
    assert exact_match(["42-25="], [completion], [{"answer": "17"}]) == [reward]


def test_exact_match_withholds_what_the_generator_gives_for_free():
    """Control: reasoning-gym's own score rewards an answer with the wrong sign."""
    entry = {"answer": "1"}
    scorer = reasoning_gym.create_dataset("chain_sum", seed=0, size=1)
    assert scorer.score_answer("-1", entry) == 0.5
    assert exact_match([""], ["-1"], [entry]) == [0.0]


def test_everything_the_task_writes_is_in_the_alphabet(task):
    tokenizer = character_tokenizer()
    unknown = tokenizer.encode("?")
    assert len(unknown) == 1
    for prompt, completion in task.demonstrations(200, 0):
        for text in (prompt, completion):
            ids = tokenizer.encode(text)
            assert len(ids) == len(text) and unknown[0] not in ids
            assert tokenizer.decode([*ids, *tokenizer.eos_token_ids]) == text


def test_it_is_a_task_that_demonstrates():
    loaded = load_task(TWO_DIGITS, 3)
    assert isinstance(loaded, EmbeddedTask) and isinstance(loaded, Demonstrates)


def test_too_few_problems_say_so():
    with pytest.raises(ValueError, match=r"different heldout problems.*heldout_size is 100"):
        load(TaskConfig(train_size=5, heldout_size=100, min_digits=1, max_digits=1), 0)


def test_policy_folder(tmp_path):
    """The folder is a function of the seed, and transformers reads the same policy from it."""
    folder = build_policy_folder(tmp_path / "policy", seed=1)
    assert folder == tmp_path / "policy"
    policy, tokenizer = load_pretrained(folder)
    assert tokenizer.eos_token_ids == (tokenizer.encode("<eos>")[0],)
    again, _ = load_pretrained(build_policy_folder(tmp_path / "again", seed=1))
    other, _ = load_pretrained(build_policy_folder(tmp_path / "other", seed=2))
    for a, b, c in zip(policy.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.dim() == 1 or not torch.equal(a, c)

    text = "42-25=\n4-2=2\n2-5=-3\n17"
    ids = tokenizer.encode(text)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    assert reference(text)["input_ids"] == ids
    assert reference.decode(ids) == text
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert oracle.generation_config.eos_token_id in (1, [1])
    tokens = torch.tensor(ids)
    with torch.no_grad():
        expected = oracle(tokens[None]).logits[0]
        metadata = AttentionMetadata.packed([len(ids)])
        attention = PackedAttention(metadata, select_backend(), 2, torch.device("cpu"))
        hidden = policy(tokens, torch.arange(len(ids)), attention)
        torch.testing.assert_close(policy.logits(hidden), expected, rtol=1e-4, atol=1e-4)
