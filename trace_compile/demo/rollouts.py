"""Sampling responses, and laying the same tokens out again for the trainer.

The rollout pads prompts on the left and decodes token by token with a cache. The trainer sees whole sequences in
another order, in smaller batches, padded on the right: the batch shapes of practice.

Shapes: B sequences, P prompt tokens (padded), R response tokens (padded), L tokens of the longest trainer row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trace_compile.demo.task import END, PAD, ChainSums, Problem, decode, prompt_batch


@dataclass(frozen=True)
class Rollouts:
    """Sampled responses and how the rollout saw them.

    Attributes:
        ids: i64 ``[B, P+R]``. attention: i64 ``[B, P+R]``, 1 on prompt and response tokens.
        prompt_length: P.
        log_probs: f32 ``[B, R]``, the rollout's own log-probabilities of the tokens it sampled.
        sampled: bool ``[B, R]``, response tokens up to and including the full stop.
        rewards: f32 ``[B]`` in [0, 1].
    """

    ids: Tensor
    attention: Tensor
    prompt_length: int
    log_probs: Tensor
    sampled: Tensor
    rewards: Tensor

    @property
    def positions(self) -> Tensor:
        """Position ids i64 ``[B, P+R]``: those that generation gives to tokens after left padding."""
        return (self.attention.cumsum(1) - 1).clamp(min=0)

    @property
    def entropy(self) -> float:
        """Mean of ``-log p`` on sampled tokens, nats."""
        return -self.log_probs[self.sampled].mean().item()


@dataclass(frozen=True)
class TrainBatch:
    """Some rollouts as the trainer sees them: right-padded, without the last token, which nothing follows.

    Attributes:
        ids, attention: i64 ``[b, L]``. targets: i64 ``[b, L]``, the next token.
        loss_mask: bool ``[b, L]``, where the target is a sampled token.
        rollout_log_probs: f32 ``[b, L]``, 0 outside ``loss_mask``. advantages: f32 ``[b]``.
    """

    ids: Tensor
    attention: Tensor
    targets: Tensor
    loss_mask: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor


@torch.no_grad()
def sample(
    model: Any, task: ChainSums, problems: list[Problem], device: str, *, forced: Tensor | None = None
) -> Rollouts:
    """One response to each of ``problems`` (repeat a problem for a group), by cached decoding at temperature 1.

    A twin decodes by its own loop, any other model by ``generate()``; the log-probabilities are those of the very
    forwards that were sampled from. ``forced``, i64 ``[B, R]``: responses to take instead of sampling, so that several
    models decode the same tokens.
    """
    prompts, mask = (tensor.to(device) for tensor in prompt_batch(problems, task.prompt_length))
    length = task.response_length if forced is None else forced.shape[1]
    if hasattr(model, "sample"):
        found = model.sample(prompts, mask, max_new_tokens=length, forced=forced, eos_token_id=END, pad_token_id=PAD)
        ids, log_probs = found.ids, found.log_probs
    else:
        ids, log_probs = _generate(model, prompts, mask, length, forced)
    response = ids[:, task.prompt_length :]
    ended = (response == END).cumsum(1)
    sampled = (ended - (response == END).long()) == 0
    texts = [decode(row[keep].tolist()) for row, keep in zip(response.cpu(), sampled.cpu())]
    rewards = torch.tensor([task.reward(problem, text) for problem, text in zip(problems, texts)])
    attention = torch.cat([mask, sampled.long()], 1)
    return Rollouts(ids, attention, task.prompt_length, log_probs, sampled, rewards)


def _generate(model: Any, prompts: Tensor, mask: Tensor, length: int, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """ids i64 ``[B, P+R]`` and log-probabilities f32 ``[B, R]`` of the sampled tokens, by transformers."""
    output = model.generate(
        input_ids=prompts,
        attention_mask=mask,
        max_new_tokens=length,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=PAD,
        eos_token_id=END,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
        logits_processor=[] if forced is None else [_Forced(forced, prompts.shape[1])],
    )
    response = output.sequences[:, prompts.shape[1] :]
    logits = torch.stack(output.logits, 1).float()
    return output.sequences, logits.log_softmax(-1).gather(-1, response[..., None])[..., 0]


def train_batch(rollouts: Rollouts, advantages: Tensor, rows: Tensor) -> TrainBatch:
    """The rollouts ``rows`` (i64 ``[b]``), moved to the left edge, each short of its last token."""
    ids, attention = rollouts.ids[rows], rollouts.attention[rows]
    width = ids.shape[1]
    start, count = attention.argmax(1), attention.sum(1)
    length = int(count.max()) - 1
    offset = torch.arange(length + 1, device=ids.device)
    source = (start[:, None] + offset).clamp(max=width - 1)
    real = offset < count[:, None]
    tokens = torch.where(real, ids.gather(1, source), PAD)
    response = source - rollouts.prompt_length
    loss_mask = (real & (response >= 0))[:, 1:]
    log_probs = rollouts.log_probs[rows].gather(1, response.clamp(min=0))[:, 1:]
    return TrainBatch(
        ids=torch.where(real[:, 1:], tokens[:, :-1], PAD),
        attention=real[:, 1:].long(),
        targets=tokens[:, 1:],
        loss_mask=loss_mask,
        rollout_log_probs=torch.where(loss_mask, log_probs, 0.0),
        advantages=advantages.to(ids.device)[rows],
    )


def token_log_probs(model: Any, batch: TrainBatch) -> Tensor:
    """Log-probabilities f32 ``[b, L]`` of ``batch.targets`` by one full forward of ``model``."""
    logits = model(input_ids=batch.ids, attention_mask=batch.attention, use_cache=False).logits.float()
    return logits.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]


class _Forced:
    """A logits processor that leaves one token possible at each position: that of ``responses`` i64 ``[B, R]``."""

    def __init__(self, responses: Tensor, prompt_length: int) -> None:
        self._responses = responses
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self._responses[:, input_ids.shape[1] - self._prompt_length, None]
        return torch.full_like(scores, float("-inf")).scatter(1, token, 0.0)
