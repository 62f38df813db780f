"""What is learned from a teacher: the divergence on buckets, its gradient, and what truncation leaves out."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional

from fsdptrain.config.objectives import Objective
from fsdptrain.config.schema import Distill, Recipe, Teacher, Train
from fsdptrain.model import loss
from fsdptrain.model.distillation import token_loss_of, top_log_probs

VOCAB = 700


def recipe(kl: str, weight: float, temperature: float, top_k: int = 32) -> Recipe:
    objective = next(each for each in Objective if each.needs_teacher)
    train = Train(objective=objective, distill=Distill(weight=weight, kl=kl))  # type: ignore[arg-type]
    return dataclasses.replace(Recipe(), train=train, teacher=Teacher(temperature=temperature, top_k=top_k))


def plain(logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, of: Recipe) -> torch.Tensor:
    """The loss of each label in float64, from the logits of both models: sums of probabilities, no logsumexp."""
    trained, temperature, weight = labels != -100, of.teacher.temperature, of.train.distill.weight
    p, q = ((z[trained].double() / temperature).softmax(-1) for z in (teacher, logits))
    kept = p.topk(min(of.teacher.top_k, p.shape[1] - 1)).indices
    mask = torch.zeros_like(p, dtype=torch.bool).scatter(1, kept, True)
    p, q = (torch.cat([each[mask].view(len(each), -1), (each * ~mask).sum(1, keepdim=True)], 1) for each in (p, q))
    p, q = (p, q) if of.train.distill.kl == "forward" else (q, p)
    kl = (p * (p / q).log()).sum(1)
    cross_entropy = functional.cross_entropy(logits[trained].double(), labels[trained], reduction="none")
    return torch.stack([weight * temperature**2 * kl + (1 - weight) * cross_entropy, kl, cross_entropy]).sum(1)


def states(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, VOCAB, (40,))
    labels[::3] = -100
    return torch.randn(40, 16).to(dtype), (torch.randn(VOCAB, 16) * 0.7).to(dtype), torch.randn(40, VOCAB) * 3, labels


def capped(logits: torch.Tensor) -> torch.Tensor:
    return 5 * torch.tanh(logits / 5)


@pytest.mark.parametrize("kl", ["forward", "reverse"])
@pytest.mark.parametrize(
    ("weight", "temperature", "top_k"), [(1, 1, 8), (0.5, 2, 32), (0.3, 0.5, VOCAB - 1), (1, 2, 2**20)]
)
def test_the_chunked_loss_and_its_gradient_are_those_of_whole_logits(
    kl: str, weight: float, temperature: float, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "loss_chunks", lambda *_: 3)
    monkeypatch.setattr(loss, "loss_rows", lambda *_: 5)
    of, (hidden, weights, teacher, labels) = recipe(kl, weight, temperature, top_k), states()
    ids, log_probs = top_log_probs(teacher, top_k, temperature)
    assert ids.dtype == torch.int32 and ids.shape[1] == min(top_k, VOCAB - 1)
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(40))
    token_loss, targets = token_loss_of(of), (labels, ids, log_probs)
    gradients = lambda *x: loss.to_gradients(*x, after=capped, token_loss=token_loss)  # noqa: E731

    def chunked(*leaves: torch.Tensor) -> torch.Tensor:
        return loss.chunked_loss(*leaves, None, targets, 7, capped, gradients, token_loss)

    leaves = [each.clone().requires_grad_() for each in (hidden, weights)]
    expected = plain(capped(leaves[0].double() @ leaves[1].double().T), teacher, labels, of) / 7
    wanted = torch.autograd.grad(expected[0], leaves)
    found = chunked(*leaves)
    got = torch.autograd.grad(found[0], leaves)
    for each in (found.detach(), chunked(*leaves).detach(), token_loss.summed(capped(hidden @ weights.T), targets) / 7):
        torch.testing.assert_close(each.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(chunked(*leaves).double(), expected, rtol=1e-6, atol=1e-6)
    for grad, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kl", ["forward", "reverse"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_student_that_is_its_teacher_learns_nothing(kl: str, temperature: float) -> None:
    hidden, weights, _, labels = states()
    logits = hidden @ weights.T
    targets = (labels, *top_log_probs(logits, 32, temperature))
    scale = (labels != -100).float()
    (total, kl_sum, _), gradient = token_loss_of(recipe(kl, 1.0, temperature)).with_gradient(logits, targets, scale)
    assert abs(float(total)) < 1e-5 and abs(float(kl_sum)) < 1e-5
    assert float(gradient.abs().max()) < 1e-6 * temperature


def test_more_buckets_come_closer_to_the_whole_divergence() -> None:
    """The buckets are never further apart than the distributions, and each bucket that is divided adds to it."""
    hidden, weights, teacher, labels = states()
    whole = plain(hidden @ weights.T, teacher, labels, recipe("forward", 1.0, 1.0, VOCAB))[1]

    def truncated(top_k: int) -> Any:
        targets = (labels, *top_log_probs(teacher, top_k, 1.0))
        return token_loss_of(recipe("forward", 1.0, 1.0)).summed(hidden @ weights.T, targets)[1].double()

    found = [truncated(k) for k in (1, 8, 32, 128, VOCAB)]
    assert all(a < b for a, b in itertools.pairwise(found))
    torch.testing.assert_close(found[-1], whole, rtol=1e-6, atol=0)
