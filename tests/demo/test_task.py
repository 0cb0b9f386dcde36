"""The task: right solutions, tokens that round-trip, answers that cannot be faked."""

from __future__ import annotations

import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym import get_score_answer_fn

from trace_compile.demo.task import (
    BEGIN,
    END,
    PAD,
    VOCABULARY,
    ChainSums,
    answer_of,
    decode,
    encode,
    prompt_batch,
    solution_batch,
)
from trace_compile.errors import TraceCompileError

TASK = ChainSums(terms=(2, 5), digits=(1, 3))


@given(st.integers(0, 10**6), st.integers(0, 7), st.integers())
def test_every_order_of_terms_is_a_solution_by_reasoning_gyms_own_scorer(start: int, seed: int, order: int) -> None:
    (problem,) = TASK.problems("sft", seed, start, 1)
    solution = problem.solution(random.Random(order))
    answer = answer_of(solution)
    assert get_score_answer_fn("chain_sum")(answer, problem.entry) == 1.0
    assert TASK.reward(problem, solution) == 1.0
    assert len(solution) <= TASK.response_length
    assert 1 + len(problem.prompt) <= TASK.prompt_length


def test_a_solution_writes_out_every_running_value() -> None:
    for problem in TASK.problems("sft", 3, 0, 50):
        total, terms = 0, list[int]()
        for step in problem.solution(random.Random(1)).removesuffix(".").split("="):
            value, term = re.fullmatch(r"(-?\d+)([+-]\d+)?", step).groups()  # type: ignore[union-attr]
            terms += [int(value)] if not terms else []
            assert int(value) == total or len(terms) == 1
            total = int(value) + int(term or 0)
            terms += [int(term)] if term else []
        assert sorted(terms) == sorted(problem.terms)
        assert total == sum(problem.terms)


def test_wrong_answers_get_less() -> None:
    for problem in TASK.problems("rl", 0, 0, 50):
        right = int(problem.entry["answer"])
        assert TASK.reward(problem, f"0+0={right + 1}.") < 1.0
        assert TASK.reward(problem, f"0+0={right}.") == 1.0


def test_streams_repeat_and_differ() -> None:
    first = TASK.problems("rl", 0, 10, 20)
    assert [p.prompt for p in first] == [p.prompt for p in TASK.problems("rl", 0, 0, 40)[10:30]]
    prompts = {
        (split, seed): tuple(p.prompt for p in TASK.problems(split, seed, 0, 30))
        for split in ("sft", "rl", "eval")
        for seed in (0, 1)
    }
    assert len(set(prompts.values())) == 6


@given(st.text(alphabet=".=+-0123456789"))
def test_tokens_round_trip(text: str) -> None:
    ids = encode(text)
    assert decode(ids) == text
    assert all(0 <= index < len(VOCABULARY) for index in ids)


@pytest.mark.parametrize("text", ["1 + 2", "x", "1\n", "１", "−3"])
def test_encode_names_characters_without_a_token(text: str) -> None:
    with pytest.raises(TraceCompileError, match="no token"):
        encode(text)


@pytest.mark.parametrize("bad", [-1, len(VOCABULARY), 10**9])
def test_decode_refuses_ids_outside_the_vocabulary(bad: int) -> None:
    with pytest.raises(TraceCompileError, match=str(bad)):
        decode([6, bad])


@given(st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=40))
def test_any_tokens_decode_and_score(ids: list[int]) -> None:
    (problem,) = TASK.problems("eval", 0, 0, 1)
    assert 0.0 <= TASK.reward(problem, decode(ids)) <= 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("1+2=3.", "3"),
        ("5-34=-29.", "-29"),
        ("7.", "7"),
        ("1+2=3.9=4.", "3"),  # what follows the full stop does not count
        ("1+2=3", None),
        ("", None),
        (".", None),
        ("1+2=.", None),
        ("1+2=+3.", None),
        ("1+2=3-1.", None),
        ("1+2=--3.", None),
        ("1+2=<pad>3.", None),
        ("1+2=3<bos>.", None),
    ],
)
def test_answer_is_the_integer_before_the_first_full_stop(response: str, answer: str | None) -> None:
    assert answer_of(response) == answer


def test_batches_are_padded_on_the_side_that_they_say() -> None:
    problems = TASK.problems("rl", 1, 0, 16)
    ids, mask = prompt_batch(problems, TASK.prompt_length)
    for row, keep, problem in zip(ids, mask, problems):
        assert decode(row[keep.bool()].tolist()) == VOCABULARY[BEGIN] + problem.prompt
        assert bool((keep.diff() >= 0).all()) and bool((row[keep == 0] == PAD).all())
    length = TASK.prompt_length + TASK.response_length
    ids, target = solution_batch(problems, random.Random(0), length)
    assert ids.shape == target.shape == (16, length)
    for row, solved, problem in zip(ids, target, problems):
        assert row[0] == BEGIN and int(row[row != PAD][-1]) == END
        assert TASK.reward(problem, decode(row[solved].tolist())) == 1.0
        assert torch.equal(solved, (torch.arange(length) > len(problem.prompt)) & (row != PAD))
