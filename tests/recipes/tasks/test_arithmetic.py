"""The arithmetic task: disjoint splits, reproducible, and a reward that agrees with the oracle."""

import pytest
import reasoning_gym
from datasets import Dataset

from recipes.config import TaskConfig
from recipes.tasks.arithmetic import (
    GENERATORS,
    ArithmeticTask,
    arithmetic_task,
    correct,
    extract_number,
)
from recipes.tasks.catalog import load_task
from recipes.tasks.task import Task, assert_disjoint, prompt_text


@pytest.fixture(scope="module", params=GENERATORS)
def task(request):
    return arithmetic_task(request.param, train_size=60, heldout_size=20, seed=5)


def prompts(dataset):
    return [prompt_text(prompt) for prompt in dataset["prompt"]]


def test_sizes_and_distinctness(task):
    assert len(set(prompts(task.train))) == 60
    assert len(set(prompts(task.heldout))) == 20


def test_disjoint_across_seeds():
    """By construction: the training prompts of any seed avoid the held-out prompts of any other.
    Two neighbouring seeds of the generator itself share nearly all their questions."""
    tasks = [arithmetic_task(train_size=200, heldout_size=50, seed=seed) for seed in range(3)]
    trained = {prompt for task in tasks for prompt in prompts(task.train)}
    held_out = {prompt for task in tasks for prompt in prompts(task.heldout)}
    assert not trained & held_out
    first, second = (
        {row["question"] for row in reasoning_gym.create_dataset("chain_sum", seed=s, size=50)}
        for s in (0, 1)
    )
    assert len(first & second) >= 48


def test_overlap_is_found(task):
    with pytest.raises(ValueError, match="held-out row 0 is also a training prompt"):
        ArithmeticTask("broken", task.train, Dataset.from_list([task.train[3]]))


def test_same_seed_same_rows(task):
    again = arithmetic_task(task.name, train_size=60, heldout_size=20, seed=5)
    other = arithmetic_task(task.name, train_size=60, heldout_size=20, seed=5000)
    assert prompts(task.train) == prompts(again.train)
    assert prompts(task.heldout) == prompts(again.heldout)
    assert prompts(task.train) != prompts(other.train)


def test_the_answers_are_right(task):
    for row in task.train:
        completion = f"The answer is {row['answer']}."
        assert correct([""], [completion], [row]) == [1.0]
        assert correct([""], [f"{int(row['answer']) + 1}"], [row]) == [0.0]


def test_it_is_a_task(task):
    loaded: Task = load_task(TaskConfig(name=task.name, train_size=60, heldout_size=20), 5)
    assert_disjoint(loaded)
    assert prompts(loaded.train) == prompts(task.train)
    assert loaded.train[0]["prompt"][0]["role"] == "user"


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("12", "12"),
        ("7 + 5 = 12", "12"),
        ("7 + 5 = 12.", "12"),
        ("12 = 7 + 5", "7"),
        ("-4", "-4"),
        ("5 - 9 = -4", "-4"),
        ("12-5", "5"),
        ("The answer is: **1,234**", "1234"),
        ("The answer is $3.50", "3.50"),
        ("\\boxed{-7} since 3 is odd", "-7"),
        ("<answer> 42 </answer> and 8", "42"),
        ("so\n#### 9", "9"),
        ("first 3, then 8", "8"),
        ("1,2", "2"),
        ("x2", None),
        ("no number", None),
        ("", None),
    ],
)
def test_extract_number(completion, number):
    assert extract_number(completion) == number


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [("+07.0", "7", 1.0), ("120", "12", 0.0), ("1,200", "1200", 1.0), ("nothing", "0", 0.0)],
)
def test_correct_compares_values(completion, answer, reward):
    """120 for 12 earns nothing: the generator's own scorer would pay 2/3 for containing it."""
    assert correct([""], [completion], [{"answer": answer}]) == [reward]


def test_correct_agrees_with_the_generators_scorer(task):
    """1.0 exactly where the oracle's score of the extracted number is 1.0."""
    oracle = reasoning_gym.create_dataset("chain_sum", seed=0, size=1)
    for row in task.train.select(range(20)):
        for completion in (row["answer"], f"{row['answer']}0", f"0{row['answer']}", "3"):
            number = extract_number(completion)
            expected = oracle.score_answer(number, row) >= 1.0
            assert correct([""], [completion], [row]) == [float(expected)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator": "gcd"}, "generator must be one of chain_sum, basic_arithmetic, got 'gcd'"),
        ({"train_size": 0}, "must be at least 1, got 0, 100"),
        ({"max_digits": 1, "train_size": 5000}, "distinct train questions .* train_size is 5000"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        arithmetic_task(**options)
