"""The loss over chunks of tokens: logits of a whole micro-batch never exist.

Plainly, T tokens and a vocabulary of V cost 12·V·T bytes: float32 logits, their log-softmax and its gradient. Here a
chunk's gradient is computed right after its loss, as Liger-Kernel does (Hsu et al., arXiv:2410.10989), in the memory of
its logits and a few rows at a time, and only its products with the weight and with the hidden states are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fsdptrain.config.plan import loss_chunks, loss_rows
from fsdptrain.data.corpus import IGNORED
from fsdptrain.errors import RecipeError

AfterHead = Callable[[torch.Tensor], torch.Tensor]


def compute_in_chunks(model: Any) -> None:
    """Teach an unsharded causal LM `model(labels=…, divisor=…, **inputs)`: a loss (`cross_entropy`) instead of logits.

    Labels are those of the positions themselves: nothing is shifted. Without labels the model is what it was. FSDP's
    hooks sit around `__call__` and so around this: the head is called once, and gathered and reduced as ever. Raises
    RecipeError for an architecture that does not simply call a linear head on its hidden states.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    after = after_head(model)
    forward, head_forward = model.forward, head.forward

    def forward_or_loss(labels: torch.Tensor | None = None, divisor: int = 1, **inputs: Any) -> Any:
        if labels is None:
            return forward(**inputs)
        return head(decoder(**inputs).last_hidden_state, labels, divisor)

    def logits_or_loss(hidden: torch.Tensor, labels: torch.Tensor | None = None, divisor: int = 1) -> torch.Tensor:
        if labels is None:
            logits: torch.Tensor = head_forward(hidden)
            return logits
        hidden = hidden.to(head.weight.dtype)  # a residual stream in float32: mamba2's
        return cross_entropy(hidden.flatten(0, 1), head.weight, head.bias, labels.flatten(), divisor, after)

    model.forward, head.forward = forward_or_loss, logits_or_loss


def after_head(model: Any) -> AfterHead:
    """What this architecture does to the output of its head (gemma2 caps it, granite scales it): [n, V] → [n, V].

    It is the architecture's own forward, around stand-ins for decoder and head that return what they are given. So no
    list of architectures is kept, and none can be forgotten. Raises RecipeError where that cannot be.
    """
    if model.get_decoder() is model or not isinstance(model.get_output_embeddings(), nn.Linear):
        raise _refused(model, "is not a decoder and a linear head")
    seen: list[torch.Tensor] = []

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden)
        return hidden

    given = torch.zeros(1, 1)
    try:
        _forward_around(model, watched)(given)
    except Exception as error:  # another's code, run on stand-ins: whatever it says, the plain loss is always right
        raise _refused(model, f"does not run around stand-ins ({type(error).__name__}: {error})") from None
    if len(seen) != 1 or seen[0]._base is not given:  # no view of what was given, but something computed from it
        raise _refused(model, "computes something between its decoder and its head")
    return _forward_around(model, lambda hidden: hidden)


def _forward_around(model: Any, head: AfterHead) -> AfterHead:
    """The model's forward as a function of its decoder's output, with `head` in the place of its own."""

    def decoder(*_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        return _DecoderOutput((inputs_embeds,))

    real, real_head = model.get_decoder(), model.get_output_embeddings()
    around = _twin(model, {id(real): _StandIn(real, decoder), id(real_head): _StandIn(real_head, head)})

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = around.forward(inputs_embeds=hidden[None]).logits[0]
        return logits

    return forward


class _StandIn:
    """Takes a module's place: is called instead of it, and has its attributes. Hooks of the module are not run."""

    def __init__(self, module: Any, call: Callable[..., Any]) -> None:
        self._module, self._call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _DecoderOutput(tuple[torch.Tensor]):
    """What a decoder returns, with nothing in it but the last hidden state."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def _twin(module: Any, stand_ins: dict[int, _StandIn]) -> Any:
    """A shallow copy of a module, with stand-ins (by the id of what they stand in for) somewhere inside."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for name, child in module.named_children():
        twin._modules[name] = stand_ins.get(id(child)) or _twin(child, stand_ins)
    return twin


def _refused(model: Any, reason: str) -> RecipeError:
    return RecipeError(f"train.loss: chunked cannot be computed: {type(model).__name__} {reason}; use plain")


def cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    divisor: int,
    after: AfterHead,
) -> torch.Tensor:
    """The cross-entropy of `after(hidden @ weight.T + bias)` summed over labels that are not IGNORED, over `divisor`.

    `hidden` [T, H], `weight` [V, H] and `bias` [V] are of one dtype, and products are taken in it; `labels` is [T]. The
    result is a float32 scalar. It is divided here, and not by the caller, so that gradients are divided before they are
    rounded to bf16, as they are in plain PyTorch: an undivided one, softmax minus 1, is close to -1 for nearly every
    label, and all of them would be rounded to the same side.
    """
    if torch.is_grad_enabled():
        loss: torch.Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, divisor, after)
        return loss
    losses = [
        functional.nll_loss(_log_softmax(after(functional.linear(h, weight, bias))), t, **SUM)
        for h, t in _chunks(hidden, weight, labels)
    ]
    return torch.stack(losses).sum() / divisor


SUM: dict[str, Any] = {"ignore_index": IGNORED, "reduction": "sum"}


def _chunks(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of hidden states and labels, a pair for each chunk; chunks differ by one token at most."""
    count = loss_chunks(len(labels), weight.shape[1])
    return list(zip(hidden.tensor_split(count), labels.tensor_split(count), strict=True))


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Float32, in memory of its own."""
    return functional.log_softmax(logits, dim=-1, dtype=torch.float32)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes loss and gradients in forward. Backward only scales them: neither weight nor logits are kept for it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        divisor: int,
        after: AfterHead,
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden: list[torch.Tensor] = []
        of_weight = of_bias = None
        for h, t in _chunks(hidden, weight, labels):
            grad = functional.linear(h, weight, bias)
            total += _to_gradients(grad, t, divisor, after)
            if needs_hidden:
                of_hidden.append(grad @ weight)
            if needs_weight:
                of_weight = _add_product(of_weight, grad.t(), h)
            if needs_bias:
                part = grad.sum(dim=0, dtype=torch.float32)
                of_bias = part if of_bias is None else of_bias.add_(part)
            del grad  # else it would still be there beside the next chunk's logits
        ctx.save_for_backward(torch.cat(of_hidden) if needs_hidden else None, of_weight, of_bias)
        ctx.dtype = hidden.dtype
        return total / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In the engine `scale` is 1, for the divisor has been applied: nothing is rounded a second time.
        grads = [None if grad is None else grad.mul_(scale).to(ctx.dtype) for grad in ctx.saved_tensors]
        return *grads, None, None, None


def _to_gradients(logits: torch.Tensor, labels: torch.Tensor, divisor: int, after: AfterHead) -> torch.Tensor:
    """The summed loss of a chunk; the head's output `logits` [n, V] becomes the gradient of that over `divisor`.

    The gradient of a cross-entropy is softmax minus one-hot. Float32 is only ever a few rows of it.
    """
    rows = loss_rows(logits.shape[1], logits.device.type)
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    for piece, wanted in zip(logits.split(rows), labels.split(rows), strict=True):
        with torch.enable_grad():
            leaf = piece.detach().requires_grad_()
            final = after(leaf)
        log_probs = _log_softmax(final.detach())
        total += functional.nll_loss(log_probs, wanted, **SUM)
        grad = log_probs.exp_()
        grad[torch.arange(len(wanted), device=wanted.device), wanted.clamp(min=0)] -= 1
        grad *= (wanted != IGNORED)[:, None] / divisor
        piece.copy_(torch.autograd.grad(final, leaf, grad.to(final.dtype))[0])
    return total


def _add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`total`, which may be overwritten, plus a @ b; the product is taken in the dtype of its factors.

    A sum is float32 whatever they are: in bf16 a chunk would be rounded away by the sum of those before it. A single
    product needs no sum, and so none of the 4·V·H bytes of one.
    """
    if total is None:
        return a @ b
    total = total.float()
    return total.addmm_(a, b) if a.dtype == total.dtype else total.add_(a @ b)
