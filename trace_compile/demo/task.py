"""The demo's task: reasoning-gym's chain sums, one token per character, with the working written out.

Problems and rewards are reasoning-gym's own (``chain_sum``: generator and ``score_answer``). A prompt is the bare
expression, ``12-34+5=``. A solution adds the signed terms in any order, writing every running value, and stops at the
full stop: ``5-34=-29+12=-17.``; the answer is what stands between the last ``=`` and the full stop. Every order is
right, so even a perfect policy keeps entropy, which the comparison of rollout and trainer needs.

Invariants: token ids are ``VOCABULARY`` positions; ``PAD`` never stands inside a prompt or a solution; items of
different splits never share a seed (reasoning-gym seeds item ``i`` with ``seed + i``, so splits are far apart).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import torch
from reasoning_gym import create_dataset
from torch import Tensor

from trace_compile.errors import TraceCompileError

PAD, BEGIN, END = 0, 1, 2
VOCABULARY = ("<pad>", "<bos>", ".", "=", "+", "-", *"0123456789")
_IDS = {symbol: index for index, symbol in enumerate(VOCABULARY)}
_SPLITS = {"sft": 0, "rl": 1 << 40, "eval": 1 << 41}
_STREAM = 1 << 24  # items per (split, seed): streams of different seeds do not overlap
_INTEGER = re.compile(r"-?[0-9]+")


def encode(text: str) -> list[int]:
    """Token ids of ``text``, one per character. Raises ``TraceCompileError`` naming a character without a token."""
    unknown = sorted(set(text) - set(_IDS))
    if unknown:
        raise TraceCompileError(f"no token for {unknown} in {text!r}; the task's characters are '.=+-' and digits")
    return [_IDS[character] for character in text]


def decode(ids: list[int]) -> str:
    """Text of ``ids``; special tokens read ``<pad>``/``<bos>``, so a response holding them can never pass as a number.

    Raises ``TraceCompileError`` for an id outside the vocabulary.
    """
    bad = [index for index in ids if not 0 <= index < len(VOCABULARY)]
    if bad:
        raise TraceCompileError(f"token ids {bad[:4]} are outside the vocabulary of {len(VOCABULARY)}")
    return "".join(VOCABULARY[index] for index in ids)


@dataclass(frozen=True)
class Problem:
    """One chain sum. ``entry`` is reasoning-gym's own record, kept for its scorer."""

    prompt: str
    terms: tuple[int, ...]
    entry: dict[str, Any]

    def solution(self, order: random.Random) -> str:
        """A right working that takes the terms in the order drawn from ``order``."""
        terms = list(self.terms)
        order.shuffle(terms)
        total, text = terms[0], str(terms[0])
        for term in terms[1:]:
            total += term
            text += f"{term:+d}={total}"
        return text + VOCABULARY[END]


@dataclass(frozen=True)
class ChainSums:
    """Chain sums with ``terms`` (least, most) terms of ``digits`` (least, most) digits each."""

    terms: tuple[int, int] = (3, 4)
    digits: tuple[int, int] = (1, 2)

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt: begin token, signed terms (the first has no sign), equals sign."""
        return 1 + self.terms[1] * (self.digits[1] + 1)

    @property
    def response_length(self) -> int:
        """Tokens of the longest solution, the full stop included."""
        width = self.digits[1] + 1  # a signed term
        value = 1 + len(str(self.terms[1] * (10 ** self.digits[1] - 1)))  # a signed running value
        return width + (self.terms[1] - 1) * (width + 1 + value) + 1

    def problems(self, split: str, seed: int, start: int, count: int) -> list[Problem]:
        """Items ``start .. start+count-1`` of the stream (``split``, ``seed``); the same call gives the same items."""
        dataset = create_dataset(
            "chain_sum",
            min_terms=self.terms[0],
            max_terms=self.terms[1],
            min_digits=self.digits[0],
            max_digits=self.digits[1],
            seed=_SPLITS[split] + seed * _STREAM,
            size=_STREAM,
        )
        return [_problem(dataset[index]) for index in range(start, start + count)]

    def reward(self, problem: Problem, response: str) -> float:
        """reasoning-gym's score in [0, 1] of the answer in ``response``; 0 if that holds no finished integer answer."""
        answer = answer_of(response)
        return 0.0 if answer is None else float(_scorer().score_answer(answer, problem.entry))


def answer_of(response: str) -> str | None:
    """The integer between the last ``=`` and the first full stop; None if there is no full stop or no such integer."""
    working, stop, _ = response.partition(VOCABULARY[END])
    answer = working.rpartition("=")[2]
    return answer if stop and _INTEGER.fullmatch(answer) else None


def prompt_batch(problems: list[Problem], length: int) -> tuple[Tensor, Tensor]:
    """Left-padded prompts: ids i64 ``[B, length]`` and attention mask i64 ``[B, length]``."""
    rows = [[BEGIN, *encode(problem.prompt)] for problem in problems]
    ids = torch.tensor([[PAD] * (length - len(row)) + row for row in rows])
    return ids, (ids != PAD).long()


def solution_batch(problems: list[Problem], order: random.Random, length: int) -> tuple[Tensor, Tensor]:
    """Right-padded prompt + solution: ids i64 ``[B, length]`` and the bool mask ``[B, length]`` of solution tokens."""
    ids = torch.full((len(problems), length), PAD)
    target = torch.zeros(len(problems), length, dtype=torch.bool)
    for row, problem in enumerate(problems):
        prompt, solution = [BEGIN, *encode(problem.prompt)], encode(problem.solution(order))
        ids[row, : len(prompt) + len(solution)] = torch.tensor(prompt + solution)
        target[row, len(prompt) : len(prompt) + len(solution)] = True
    return ids, target


def _problem(entry: dict[str, Any]) -> Problem:
    expression = entry["metadata"]["expression"].replace(" ", "")
    return Problem(expression + "=", tuple(int(term) for term in re.findall(r"[+-]?[0-9]+", expression)), entry)


def _scorer() -> Any:
    return create_dataset("chain_sum", seed=0, size=1)
