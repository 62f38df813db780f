"""What a token learns from a teacher: how far the probabilities of the two are apart (Hinton et al., arXiv:1503.02531).

They are compared on buckets: the tokens that the teacher finds likeliest, one each, and all others together as one. So
the divergence is one between distributions, and no gradient depends on how the teacher divides what is not kept.
"""

from __future__ import annotations

import torch

from fsdptrain.config.schema import Recipe
from fsdptrain.data.corpus import IGNORED
from fsdptrain.model.loss import NEXT_TOKEN, Targets, TokenLoss, log_softmax


def top_log_probs(logits: torch.Tensor, top_k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `top_k` likeliest tokens of logits [n, V], int32 [n, k], and the log-probabilities of the buckets.

    Those are float32 [n, k + 1], the last one that of all other tokens, of which there is one at least: the logarithm
    of an empty bucket would be no number.
    """
    log_probs = log_softmax(logits.float() / temperature)
    ids = log_probs.topk(min(top_k, logits.shape[1] - 1)).indices
    return ids.int(), bucket_log_probs(log_probs, ids)


def bucket_log_probs(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities [n, k + 1] of the tokens `ids` [n, k], and of all others together.

    The latter is their sum, and not 1 minus the others, of which rounding would leave nothing.
    """
    others = log_probs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids), others], dim=1)


def token_loss_of(recipe: Recipe) -> TokenLoss:
    """Return the loss of tokens that a recipe learns: with a teacher, with the sums of KL and cross-entropy.

    Targets are labels [n], the teacher's `ids` int32 [n, k] and its log-probabilities [n, k + 1], at its temperature.
    """
    keys, temperature = recipe.train.distill, recipe.teacher.temperature
    if not recipe.train.objective.needs_teacher:
        return NEXT_TOKEN

    def losses(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Return loss, KL and cross-entropy of each token [3, n], 0 without a label."""
        labels, ids, teacher = targets
        log_probs = log_softmax(logits)
        scaled = log_probs if temperature == 1 else log_softmax(log_probs / temperature)
        student = bucket_log_probs(scaled, ids.long())
        first, second = (teacher, student) if keys.kl == "forward" else (student, teacher)
        kl = (first.exp() * (first - second)).sum(1)
        cross_entropy = -log_probs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        # The gradient of KL has a factor of 1 / T², which another weight would have to make up for.
        loss = keys.weight * temperature**2 * kl + (1 - keys.weight) * cross_entropy
        return torch.stack([loss, kl, cross_entropy]) * (labels != IGNORED)

    def with_gradient(logits: torch.Tensor, targets: Targets, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            leaf = logits.float().requires_grad_()
            found = losses(leaf, targets)
            (gradient,) = torch.autograd.grad(found[0], leaf, scale)
        return found.detach().sum(1), gradient

    return TokenLoss(lambda logits, targets: losses(logits, targets).sum(1), with_gradient)
