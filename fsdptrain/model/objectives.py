"""The losses of objectives that judge whole answers, such as DPO, from the log-probability of each.

Sums over answers are computed in float64: differences of sums of hundreds are small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from fsdptrain.config.objectives import Objective
from fsdptrain.config.schema import Dpo, Train
from fsdptrain.data.corpus import IGNORED, Batch
from fsdptrain.model.loss import Divisor


class Answers(NamedTuple):
    """The answers of a micro-batch; each field is float64 [answers].

    `sums` are the log-probabilities of their trained tokens, `reference` those under the reference, `tokens` how many
    there are. The answers 2i and 2i + 1 of pairs are the chosen and the rejected one.
    """

    sums: torch.Tensor
    tokens: torch.Tensor
    reference: torch.Tensor


# The losses [N] of pairs or rows, and their measures [measures, N] in the order of `Objective.measures`.
Judged = tuple[torch.Tensor, torch.Tensor]


def sum_answers(log_probs: torch.Tensor, batch: Batch, sharers: dist.ProcessGroup | None) -> Answers:
    """Return the answers of a micro-batch whose labels have these log-probabilities.

    `log_probs` float32 [T] is 0 where there is no label. Of ranks that share rows each has a part of an answer's
    tokens; the sums are over all of them, and the gradient reaches the rank's own.
    """
    answers, labels, count = batch["answers"].flatten(), batch["labels"].flatten(), len(batch["reference"])
    own = torch.stack([log_probs.double(), (labels != IGNORED).double()], dim=1)
    sums = own.new_zeros(count + 1, 2).index_add(0, answers, own)[:count]  # the last is of padding
    if sharers is not None:
        whole = sums.detach().clone()
        dist.all_reduce(whole, group=sharers)
        sums = sums + (whole - sums.detach())
    return Answers(sums[:, 0], sums[:, 1], batch["reference"])


def answers_loss(
    train: Train, log_probs: torch.Tensor, batch: Batch, divisor: Divisor, sharers: dist.ProcessGroup | None = None
) -> Judged:
    """Return the summed loss of a micro-batch over `divisor`, float32, and its summed measures, float64 [measures].

    Of ranks that share rows each returns its part: they add up to the whole.
    """
    losses, measures = LOSSES[train.objective](getattr(train, train.objective), sum_answers(log_probs, batch, sharers))
    loss, measures = losses.sum() / divisor, measures.detach().sum(dim=1)
    if sharers is not None:  # each computes the same loss, of which the gradient is that of its own tokens
        loss, measures = loss - loss.detach() * (1 - 1 / sharers.size()), measures / sharers.size()
    return loss.float(), measures


def _dpo(keys: Dpo, answers: Answers) -> Judged:
    rewards = keys.beta * (answers.sums - answers.reference)
    margin = rewards[::2] - rewards[1::2]
    losses = -(1 - keys.label_smoothing) * functional.logsigmoid(margin)
    if keys.label_smoothing:
        losses = losses - keys.label_smoothing * functional.logsigmoid(-margin)
    if keys.sft_weight:
        losses = losses - keys.sft_weight * answers.sums[::2] / answers.tokens[::2]
    return losses, _measures_of_pairs(rewards)


def _measures_of_pairs(rewards: torch.Tensor) -> torch.Tensor:
    chosen, rejected = rewards.view(-1, 2).T
    return torch.stack([chosen, rejected, chosen - rejected, (chosen > rejected).double()])


LOSSES: dict[Objective, Callable[[Any, Answers], Judged]] = {Objective.dpo: _dpo}
