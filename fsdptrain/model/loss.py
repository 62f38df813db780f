"""The loss over chunks of tokens: the logits of a whole micro-batch are never in memory.

The plain loss takes 12·V·T bytes for T tokens and a vocabulary of V: float32 logits, log-softmax and gradient. Here the
gradient of a chunk is computed right after its loss, as in Liger-Kernel (Hsu et al., arXiv:2410.10989), a few rows at a
time and in the memory of its logits. Only its products with the weight and the hidden states are kept. With
torch.compile, all rows of a chunk are one kernel or two.

What is learned of a token is a `TokenLoss`: cross-entropy, or how far the model is from a teacher
(`model.distillation`). A loss that is no plain sum over tokens (see `model.objectives`) needs the log-probability of
each label first. Its backward computes the logits of a chunk again.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from fsdptrain.data.corpus import IGNORED
from fsdptrain.errors import RecipeError, error_summary

AfterHead = Callable[[torch.Tensor], torch.Tensor]
Divisor = int | torch.Tensor
Targets = tuple[torch.Tensor, ...]  # what the tokens of a chunk learn, each [n, …]: labels, and what a teacher says
ToGradients = Callable[[torch.Tensor, Targets, torch.Tensor], torch.Tensor]  # as `to_gradients` of a model


class TokenLoss(NamedTuple):
    """A loss that is a sum over label tokens; all of it is float32.

    `summed`: from logits [n, V] and targets, the sum of the losses, [], or [1 + measures] with the sums of measures.
    `with_gradient`: the same from logits, targets and scale [n], and the gradient of the loss in the logits, each row
    times its scale. `fusible`: the same in operators that a compiler makes one kernel of; None: it is not compiled.
    """

    summed: Callable[[torch.Tensor, Targets], torch.Tensor]
    with_gradient: Callable[[torch.Tensor, Targets, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    fusible: Callable[[torch.Tensor, Targets, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None


log_softmax = functools.partial(functional.log_softmax, dim=-1, dtype=torch.float32)  # in newly allocated memory


SUM: dict[str, Any] = {"ignore_index": IGNORED, "reduction": "sum"}


def _summed_loss(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return the summed cross-entropy."""
    return functional.nll_loss(log_softmax(logits), targets[0], **SUM)


def _loss_and_gradient(
    logits: torch.Tensor, targets: Targets, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross-entropy, and its gradient: softmax minus one-hot, times `scale`."""
    log_probs, (labels,) = log_softmax(logits), targets
    loss = functional.nll_loss(log_probs, labels, **SUM)
    grad = log_probs.exp_()
    grad[torch.arange(len(labels), device=labels.device), labels.clamp(min=0)] -= 1
    grad *= scale[:, None]
    return loss, grad


def _fusible_loss_and_gradient(
    logits: torch.Tensor, targets: Targets, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same, without indices: to read or write single elements, a compiler would need all in memory."""
    log_probs, (labels,) = log_softmax(logits), targets
    wanted = torch.arange(log_probs.shape[1], device=labels.device) == labels[:, None]  # nowhere if IGNORED
    loss = -torch.where(wanted, log_probs, 0.0).sum()
    return loss, (log_probs.exp() - wanted.float()) * scale[:, None]


NEXT_TOKEN = TokenLoss(_summed_loss, _loss_and_gradient, _fusible_loss_and_gradient)


def compute_in_chunks(model: Any, compiled: bool = False, token_loss: TokenLoss = NEXT_TOKEN) -> None:
    """Let an unsharded causal LM return a loss (`chunked_loss`) for `model(labels=…, divisor=…, **inputs)`.

    It is that of `token_loss`, by default cross-entropy; `teacher` has the targets beside labels. With divisor=None it
    returns the log-probability of each label, float32 [tokens], 0 where it is IGNORED. With `read`, a function of the
    logits [n, V] of some tokens, it returns the tensors [label tokens, …] that this returns for all that have a label.
    Labels belong to the positions themselves: nothing is shifted. Without labels the model returns logits as before.
    FSDP's hooks run around `__call__` and so around this. `compiled`: what is between the products of a chunk is
    compiled. Raises RecipeError for an architecture that does not apply a linear head to its hidden states.
    """
    decoder, head = _before_head(model), model.get_output_embeddings()
    after = after_head(model)
    gradients: ToGradients = functools.partial(to_gradients, after=after, token_loss=token_loss)
    if compiled and token_loss.fusible:
        gradients = compiled_gradients(after)
    forward, head_forward = model.forward, head.forward

    def forward_or_loss(
        labels: Any = None, divisor: Any = 1, teacher: Targets = (), read: Any = None, **inputs: Any
    ) -> Any:
        if labels is None:
            return forward(**inputs)
        return head(decoder(**inputs).last_hidden_state, (labels, *teacher), divisor, read)

    def logits_or_loss(hidden: torch.Tensor, targets: Targets = (), divisor: Any = 1, read: Any = None) -> Any:
        if not targets:
            return head_forward(hidden)
        hidden = hidden.to(head.weight.dtype).flatten(0, 1)  # mamba2's residual stream is float32
        weights, targets = (head.weight, head.bias), tuple(each.flatten(0, 1) for each in targets)
        if read is not None:
            some = hidden[targets[0] != IGNORED].split(loss_rows(len(head.weight), hidden.device.type))
            return tuple(map(torch.cat, zip(*(read(after(functional.linear(h, *weights))) for h in some), strict=True)))
        if divisor is None:
            return _LabelLogProbs.apply(hidden, *weights, *targets, after, gradients)
        return chunked_loss(hidden, *weights, targets, divisor, after, gradients, token_loss)

    model.forward, head.forward = forward_or_loss, logits_or_loss


def after_head(model: Any) -> AfterHead:
    """Return what an architecture does to the output of its head (gemma2 caps it, granite scales it): [n, V] → [n, V].

    It is the architecture's own forward, with stand-ins for decoder and head that return their input: no list of
    architectures is needed. Raises RecipeError if the architecture's code does not allow this.
    """

    def refused(reason: str) -> RecipeError:
        return RecipeError(f"train.loss: chunked cannot be computed: {type(model).__name__} {reason}; use plain")

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden)
        return hidden

    if _before_head(model) is model or not isinstance(model.get_output_embeddings(), nn.Linear):
        raise refused("is not a decoder and a linear head")
    seen: list[torch.Tensor] = []
    given = torch.zeros(1, 1)
    try:
        _forward_around(model, watched)(given)
    except Exception as error:  # any error of the architecture's code: the plain loss still works
        raise refused(f"does not run with stand-ins for decoder and head ({error_summary(error)})") from None
    if len(seen) != 1 or seen[0].untyped_storage() is not given.untyped_storage():  # computed from the input
        raise refused("computes something between its decoder and its head")
    return _forward_around(model, lambda hidden: hidden)


def _before_head(model: Any) -> Any:
    """Return the module whose output the head gets: the decoder, or what holds it in a vision-language model."""
    return model.get_decoder() if model.config.get_text_config() is model.config else model.base_model


def _forward_around(model: Any, head: AfterHead) -> AfterHead:
    """Return the model's forward as a function of its decoder's output, with `head` instead of its own head."""

    def decoder(*_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        return _DecoderOutput((inputs_embeds,))

    real, real_head = _before_head(model), model.get_output_embeddings()
    around = _copy_with_stand_ins(model, {id(real): _StandIn(real, decoder), id(real_head): _StandIn(real_head, head)})

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = around.forward(inputs_embeds=hidden[None]).logits[0]
        return logits

    return forward


class _StandIn:
    """Replaces a module: it is called instead, and has the module's attributes. Hooks of the module are not run."""

    def __init__(self, module: Any, call: Callable[..., Any]) -> None:
        self._module, self._call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _DecoderOutput(tuple[torch.Tensor]):
    """The output of a decoder with nothing but the last hidden state."""

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def _copy_with_stand_ins(module: Any, stand_ins: dict[int, _StandIn]) -> Any:
    twin = copy.copy(module)
    for name, child in module.named_children():  # what is in `__dict__` hides a child of this name
        twin.__dict__[name] = stand_ins.get(id(child)) or _copy_with_stand_ins(child, stand_ins)
    return twin


def chunked_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: Targets,
    divisor: Divisor,
    after: AfterHead,
    gradients: ToGradients | None = None,
    token_loss: TokenLoss = NEXT_TOKEN,
) -> torch.Tensor:
    """Return the loss of `after(hidden @ weight.T + bias)`, summed over labels not IGNORED, over `divisor`.

    `hidden` [T, H], `weight` [V, H] and `bias` [V] have one dtype, in which products are computed; `targets` are
    [T, …], the first of them labels. The result is float32: [], or [1 + measures], of which only the loss, the first,
    has a gradient. It is that of `token_loss`, by default cross-entropy. The division happens here so that gradients
    are divided before they are rounded to bf16: softmax minus 1 is close to -1 for nearly every label, and all of these
    would be rounded in the same direction.
    """
    if torch.is_grad_enabled():
        gradients = gradients or functools.partial(to_gradients, after=after)
        loss: torch.Tensor = _ChunkedLoss.apply(hidden, weight, bias, divisor, gradients, *targets)
        return loss
    chunks = ((after(functional.linear(h, weight, bias)), t) for h, t in _chunks(hidden, weight, targets))
    return torch.stack([token_loss.summed(*each) for each in chunks]).sum(0) / divisor


def loss_chunks(tokens: int, hidden: int) -> int:
    """Return into how many chunks the chunked loss splits the tokens of a micro-batch.

    With n chunks the logits of one take 2·V·T/n bytes (in bf16), and the weight's gradient 6·V·H bytes if n > 1: a
    float32 sum, and the product that is added to it. So up to 6·H tokens one chunk needs the least memory. Beyond,
    chunks have the length at which their logits are as large as the gradient.
    """
    return 1 if tokens <= 6 * hidden else -(-tokens // (3 * hidden))


def loss_rows(vocab: int, device: str) -> int:
    """Return for how many tokens at a time float32 logits are held: 4 MiB for a CPU's caches, 256 MiB on a GPU."""
    return max(1, (2**20 if device == "cpu" else 2**26) // vocab)


def _chunks(hidden: torch.Tensor, weight: torch.Tensor, targets: Targets) -> list[tuple[torch.Tensor, Targets]]:
    """Return views of hidden states and targets, a pair for each chunk; chunk sizes differ by at most one token."""
    count = loss_chunks(len(hidden), weight.shape[1])
    pieces = zip(*(each.tensor_split(count) for each in targets), strict=True)
    return list(zip(hidden.tensor_split(count), pieces, strict=True))


class _ChunkedLoss(torch.autograd.Function):
    """Computes loss and gradients in forward. Backward only scales them: it needs neither weight nor logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        divisor: Divisor,
        gradients: ToGradients,
        *targets: torch.Tensor,
    ) -> torch.Tensor:
        scale = (targets[0] != IGNORED) / divisor
        total, *grads = _loss_and_gradients(ctx.needs_input_grad, hidden, weight, bias, targets, scale, gradients)
        ctx.save_for_backward(*grads)
        ctx.dtype, ctx.others = hidden.dtype, (None,) * (2 + len(targets))
        return total / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In the engine `scale` is 1, because the divisor is already applied: nothing is rounded a second time.
        scale = scale.flatten()[0]  # those of measures are 0
        grads = [None if grad is None else grad.mul_(scale).to(ctx.dtype) for grad in ctx.saved_tensors]
        return *grads, *ctx.others


class _LabelLogProbs(torch.autograd.Function):
    """Computes a few rows of logits at a time, in forward and again in backward: none are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        after: AfterHead,
        gradients: ToGradients,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.gradients = gradients
        rows = loss_rows(weight.shape[0], hidden.device.type)
        losses = [
            functional.nll_loss(log_softmax(after(logits)), t, ignore_index=IGNORED, reduction="none")
            for h, (wanted,) in _chunks(hidden, weight, (labels,))
            for logits, t in zip(functional.linear(h, weight, bias).split(rows), wanted.split(rows), strict=True)
        ]
        return -torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        scale = -scale * (labels != IGNORED)  # the gradient of a log-probability is one-hot minus softmax
        _, *grads = _loss_and_gradients(ctx.needs_input_grad, hidden, weight, bias, (labels,), scale, ctx.gradients)
        return *(None if grad is None else grad.to(hidden.dtype) for grad in grads), None, None, None


def _loss_and_gradients(
    needs: tuple[bool, ...],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: Targets,
    scale: torch.Tensor,
    gradients: ToGradients,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the summed loss, and the gradients of hidden states, weight and bias that are needed.

    `scale` float32 [T] multiplies the gradient of each token's loss, not the loss.
    """
    needs_hidden, needs_weight, needs_bias = needs[:3]
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    of_hidden: list[torch.Tensor] = []
    of_weight = of_bias = None
    for (h, t), s in zip(_chunks(hidden, weight, targets), scale.tensor_split(loss_chunks(*hidden.shape)), strict=True):
        grad = functional.linear(h, weight, bias)
        total = total + gradients(grad, t, s)
        if needs_hidden:
            of_hidden.append(grad @ weight)
        if needs_weight:
            of_weight = _add_product(of_weight, grad.t(), h)
        if needs_bias:
            part = grad.sum(dim=0, dtype=torch.float32)
            of_bias = part if of_bias is None else of_bias.add_(part)
        del grad  # before the logits of the next chunk are allocated
    return total, torch.cat(of_hidden) if needs_hidden else None, of_weight, of_bias


def to_gradients(
    logits: torch.Tensor, targets: Targets, scale: torch.Tensor, after: AfterHead, token_loss: TokenLoss = NEXT_TOKEN
) -> torch.Tensor:
    """Return the summed loss of a chunk; overwrite `logits` [n, V] with its gradient, each row times `scale` [n]."""
    rows = loss_rows(logits.shape[1], logits.device.type)
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    for piece, factor, *wanted in zip(*(each.split(rows) for each in (logits, scale, *targets)), strict=True):
        total = total + _overwrite(piece, tuple(wanted), factor, after, token_loss.with_gradient)
    return total


def _overwrite(
    logits: torch.Tensor, targets: Targets, scale: torch.Tensor, after: AfterHead, with_gradient: Any
) -> torch.Tensor:
    """Do what `to_gradients` does, for all rows at once; `with_gradient` is that of `after(logits)`."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        final = after(leaf)
    loss: torch.Tensor
    loss, grad = with_gradient(final.detach(), targets, scale)
    logits.copy_(torch.autograd.grad(final, leaf, grad.to(final.dtype))[0])
    return loss


def compiled_gradients(after: AfterHead) -> ToGradients:
    """Return the `to_gradients` of cross-entropy, compiled for each shape of a chunk: there are two lengths at most."""
    graphs: dict[Any, Callable[..., torch.Tensor]] = {}

    def compiled(logits: torch.Tensor, targets: Targets, scale: torch.Tensor) -> torch.Tensor:
        kind = logits.shape, logits.dtype
        if kind not in graphs:
            # Traced to plain operators first: dynamo need not understand an architecture's code, nor autograd in it.
            body = functools.partial(_overwrite, after=after, with_gradient=_fusible_loss_and_gradient)
            traced = make_fx(body, tracing_mode="fake")(logits, targets, scale)
            graphs[kind] = torch.compile(traced, dynamic=False)
        return graphs[kind](logits, targets, scale)

    return compiled


def _add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `total`, which may be overwritten, plus a @ b; the product is computed in the dtype of its factors.

    A sum is always float32: in bf16 the sum of earlier chunks would round a chunk away. A single product needs no sum,
    and so none of its 4·V·H bytes.
    """
    if total is None:
        return a @ b
    total = total.float()
    return total.addmm_(a, b) if a.dtype == total.dtype else total.add_(a @ b)
