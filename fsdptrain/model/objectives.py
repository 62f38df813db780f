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
from fsdptrain.config.schema import Dpo, Ipo, Kto, Orpo, Simpo, Train
from fsdptrain.data.corpus import IGNORED, Batch
from fsdptrain.model.loss import Divisor


class Answers(NamedTuple):
    """The answers of a micro-batch, of which 2i and 2i + 1 are the chosen and the rejected one of a pair.

    Float64 [answers]: `sums` are the log-probabilities of their trained tokens, `tokens` how many there are, `ratios`
    the differences from the reference, where one is computed.
    """

    sums: torch.Tensor
    tokens: torch.Tensor
    ratios: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """The mean log-probability of a token of each answer."""
        return self.sums / self.tokens


# The losses [N] of pairs or rows, and [measures, N] in the order of `Objective.averaged`, NaN for units without one.
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
    return Answers(sums[:, 0], sums[:, 1], sums[:, 0] - batch["reference"])


def answers_loss(
    train: Train, log_probs: torch.Tensor, batch: Batch, divisor: Divisor, sharers: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of a micro-batch over `divisor`, float32, and float64 [2, measures]: sums and counts.

    The measures are `Objective.averaged`. Of ranks that share rows each returns its part: they add up to the whole.
    """
    keys, answers = getattr(train, train.objective), sum_answers(log_probs, batch, sharers)
    losses, each = LOSSES[train.objective](keys, answers, batch)
    each = each.detach()
    loss, measures = losses.sum() / divisor, torch.stack([each.nansum(dim=1), (~each.isnan()).double().sum(dim=1)])
    if sharers is not None:  # each computes the same loss, of which the gradient is that of its own tokens
        loss, measures = loss - loss.detach() * (1 - 1 / sharers.size()), measures / sharers.size()
    return loss.float(), measures


def _dpo(keys: Dpo, answers: Answers, batch: Batch) -> Judged:
    rewards = keys.beta * answers.ratios
    margin = _margin(rewards)
    losses = -(1 - keys.label_smoothing) * functional.logsigmoid(margin)
    if keys.label_smoothing:
        losses = losses - keys.label_smoothing * functional.logsigmoid(-margin)
    if keys.sft_weight:
        losses = losses - keys.sft_weight * answers.means[::2]
    return losses, _measures_of_pairs(rewards)


def _ipo(keys: Ipo, answers: Answers, batch: Batch) -> Judged:
    # By tokens, as the authors do (and TRL): otherwise the target would depend on the length of the answers.
    losses = (_margin(answers.ratios / answers.tokens) - 1 / (2 * keys.beta)) ** 2
    return losses, _measures_of_pairs(keys.beta * answers.ratios)


def _simpo(keys: Simpo, answers: Answers, batch: Batch) -> Judged:
    rewards = keys.beta * answers.means
    return -functional.logsigmoid(_margin(rewards) - keys.gamma), _measures_of_pairs(rewards)


def _orpo(keys: Orpo, answers: Answers, batch: Batch) -> Judged:
    means = answers.means
    log_odds = means - torch.log(-torch.expm1(means.clamp(max=CERTAIN)))
    losses = -means[::2] - keys.beta * functional.logsigmoid(_margin(log_odds))
    return losses, _measures_of_pairs(keys.beta * means)


CERTAIN = -(2.0**-24)  # the largest log-probability whose odds are computed: those of 0 are infinite


def _kto(keys: Kto, answers: Answers, batch: Batch) -> Judged:
    gains, is_good = answers.ratios - batch["kl"], batch["desirable"]
    good, bad = (torch.sigmoid(keys.beta * each) for each in (-gains, gains))  # 1 - sigmoid(x) is sigmoid(-x)
    losses = torch.where(is_good, keys.desirable_weight * good, keys.undesirable_weight * bad)
    rewards = keys.beta * answers.ratios
    of_class = [rewards.where(some, torch.nan) for some in (is_good, ~is_good)]
    return losses, torch.stack([*of_class, batch["kl"].expand_as(rewards)])


def _margin(values: torch.Tensor) -> torch.Tensor:
    return values[::2] - values[1::2]


def _measures_of_pairs(rewards: torch.Tensor) -> torch.Tensor:
    return torch.stack([rewards[::2], rewards[1::2], (_margin(rewards) > 0).double()])


LOSSES: dict[Objective, Callable[[Any, Answers, Batch], Judged]] = {
    Objective.dpo: _dpo, Objective.ipo: _ipo, Objective.simpo: _simpo, Objective.orpo: _orpo, Objective.kto: _kto,
}  # fmt: skip
