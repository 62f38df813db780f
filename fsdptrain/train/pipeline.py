"""Take micro-batches through the stages of this rank: receive, compute, send. Without a pipeline there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fsdptrain.errors import RecipeError
from fsdptrain.parallel.messages import ACTIVATIONS, GRADIENTS
from fsdptrain.parallel.world import World
from fsdptrain.plan.pipeline import Pass, forward_passes, passes
from fsdptrain.plan.plan import Plan

# (chunk, number of a micro-batch, hidden states of the stage before, None for the first) → hidden states, or the loss
Compute = Callable[[int, int, torch.Tensor | None], torch.Tensor]


class Stages:
    """The stages of this rank, of which it computes the passes of a step in the order of the pipeline's schedule."""

    def __init__(self, plan: Plan, world: World, hidden_size: int) -> None:
        """`hidden_size` is that of the hidden states [rows, tokens, hidden_size] between decoder layers."""
        self._parallel, self._messages, self._device = plan.recipe.parallel, world.messages, world.device
        self._dtype = getattr(torch, plan.recipe.fsdp.mixed_precision.param_dtype)
        self._place, self._hidden_size = plan.place_in_pipeline(world.rank), hidden_size

    @property
    def at_once(self) -> int:
        """How many micro-batches keep all stages busy."""
        return self._parallel.pipeline

    def _stage(self, chunk: int) -> int:
        return self._place + chunk * self._parallel.pipeline

    def is_last(self, chunk: int) -> bool:
        """Return whether a stage of this rank is the last of all, which has the head and the loss."""
        return self._stage(chunk) == self._parallel.stages - 1

    def train(self, micro_batches: int, shape: Sequence[int], compute: Compute, before: Callable[[Pass], None]) -> None:
        """Compute forward and backward of a step; `shape` is [rows, tokens] of a micro-batch.

        `before` is called before each pass.
        """
        self._run(passes(self._parallel, self._place, micro_batches), shape, compute, before)

    def evaluate(self, micro_batches: int, shape: Sequence[int], compute: Compute) -> None:
        """Compute forward only, without gradients."""
        self._run(forward_passes(self._parallel, micro_batches), shape, compute, lambda _: None)

    def _run(
        self, order: Sequence[Pass], shape: Sequence[int], compute: Compute, before: Callable[[Pass], None]
    ) -> None:
        kept: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}  # input and result of a forward pass
        for number, each in enumerate(order):
            before(each)
            if each.forward:
                hidden, result = self._forward(each, shape, compute)
                if torch.is_grad_enabled():
                    kept[each.chunk, each.micro_batch] = hidden, result
                del hidden, result
            else:
                self._backward(each, *kept.pop((each.chunk, each.micro_batch)))
            self._expect_next(order[number + 1 :], each.forward, shape)
        if self._messages:
            self._messages.finish()

    def _forward(self, each: Pass, shape: Sequence[int], compute: Compute) -> tuple[torch.Tensor | None, torch.Tensor]:
        hidden = None
        if self._messages and self._stage(each.chunk) > 0:
            hidden = self._messages.receive(ACTIVATIONS, self._empty(shape), each.micro_batch)
            hidden.requires_grad_(torch.is_grad_enabled())
        result = compute(each.chunk, each.micro_batch, hidden)
        if self._messages and not self.is_last(each.chunk):
            if result.dtype != self._dtype:
                raise RecipeError(
                    f"parallel.pipeline: hidden states between the layers of this architecture are {result.dtype}, not "
                    f"{self._dtype} (fsdp.mixed_precision.param_dtype): use float32, or no pipeline"
                )
            self._messages.send(ACTIVATIONS, result.detach())
        return hidden, result

    def _backward(self, each: Pass, hidden: torch.Tensor | None, result: torch.Tensor) -> None:
        if not self._messages or self.is_last(each.chunk):
            result.backward()
        else:
            grad = self._messages.receive(GRADIENTS, torch.empty_like(result), each.micro_batch)
            if result.requires_grad:  # not behind a first stage that trains nothing
                torch.autograd.backward(result, grad)
        if self._messages and hidden is not None:
            assert hidden.grad is not None
            self._messages.send(GRADIENTS, hidden.grad)

    def _expect_next(self, order: Sequence[Pass], forward: bool, shape: Sequence[int]) -> None:
        """Let the message for the next pass in the same direction come while the other direction is computed."""
        following = next((each for each in order if each.forward == forward), None)
        if self._messages and following:
            stage = self._stage(following.chunk)
            if stage > 0 if forward else not self.is_last(following.chunk):
                self._messages.expect(ACTIVATIONS if forward else GRADIENTS, self._empty(shape))

    def _empty(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty((*shape, self._hidden_size), dtype=self._dtype, device=self._device)
