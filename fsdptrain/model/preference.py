"""The loss of preferences: DPO (Rafailov et al., arXiv:2305.18290), from the log-probability of each token.

A pair's terms need sums over its two answers. They are computed in float64: differences of sums of hundreds are small.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional

from fsdptrain.config.schema import Dpo
from fsdptrain.data.corpus import IGNORED, Batch
from fsdptrain.model.context import Exchange
from fsdptrain.model.loss import Divisor

MEASURES = ("rewards_chosen", "rewards_rejected", "margin", "accuracy")


def answer_sums(log_probs: torch.Tensor, batch: Batch, context: Exchange | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each answer, and its number of trained tokens, both float64 [answers].

    `log_probs` float32 [T] is 0 where there is no label. Of ranks that share rows each has a part of an answer's
    tokens; the sums are over all of them, and the gradient reaches the rank's own.
    """
    answers, labels, count = batch["answers"].flatten(), batch["labels"].flatten(), len(batch["reference"])
    own = torch.stack([log_probs.double(), (labels != IGNORED).double()], dim=1)
    sums = own.new_zeros(count + 1, 2).index_add(0, answers, own)[:count]  # the last is of padding
    if context is not None:
        whole = sums.detach().clone()
        dist.all_reduce(whole, group=context.group)
        sums = sums + (whole - sums.detach())
    return sums[:, 0], sums[:, 1]


def dpo_loss(
    log_probs: torch.Tensor, batch: Batch, dpo: Dpo, divisor: Divisor, context: Exchange | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of a micro-batch's pairs over `divisor`, float32, and their summed MEASURES, float64 [4].

    Of ranks that share rows each returns its part: they add up to the whole.
    """
    sums, tokens = answer_sums(log_probs, batch, context)
    chosen, rejected = (dpo.beta * (sums - batch["reference"])).view(-1, 2).T
    margin = chosen - rejected
    losses = -(1 - dpo.label_smoothing) * functional.logsigmoid(margin)
    if dpo.label_smoothing:
        losses = losses - dpo.label_smoothing * functional.logsigmoid(-margin)
    if dpo.sft_weight:
        losses = losses - dpo.sft_weight * sums[::2] / tokens[::2]
    loss = losses.sum() / divisor
    measures = torch.stack([chosen, rejected, margin, (margin > 0).double()]).detach().sum(dim=1)
    if context is not None:  # each computes the same loss, of which the gradient is that of its own tokens
        loss, measures = loss - loss.detach() * (1 - 1 / context.ranks), measures / context.ranks
    return loss.float(), measures
