"""Expert parallelism: the ranks of a group divide the experts of every layer, and send tokens to their experts.

Each rank has its own tokens. Their copies go to the ranks of the chosen experts by one all-to-all, their results come
back by another, and are weighted where they came from: no token is dropped. Every rank computes one more row of zeros,
so that ranks without a token take part in backward as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from fsdptrain.errors import Problem, RecipeError
from fsdptrain.model.exchange import exchanged
from fsdptrain.model.parts import Part, keep_own_parts
from fsdptrain.model.units import base_of, decoder_layers, expert_count, full_name

BIASES = ("e_score_correction_bias", "expert_bias")  # what architectures call the buffer that `ExpertLoads` changes


def experts_of(model: Any) -> dict[str, Any]:
    """Return the modules of a model's decoder layers that hold the experts of a layer in fused tensors, by name."""
    return {
        full_name(layer_name, name): module
        for layer_name, layer in decoder_layers(model)
        for name, module in layer.named_modules()
        if hasattr(module, "is_transposed") and isinstance(getattr(module, "num_experts", None), int)
    }


def check_experts(model: Any, ranks: int) -> None:
    """Raise RecipeError if ranks cannot divide the experts of a skeleton."""
    if ranks == 1:
        return
    experts, name = experts_of(model), type(model).__name__
    counts = sorted({module.num_experts for module in experts.values()})
    if not experts:
        reason = "it has no experts, or not in fused tensors"
    elif uneven := next((count for count in counts if count % ranks), None):
        reason = f"it has {uneven} experts, which do not divide among them"
    else:
        return
    raise RecipeError([Problem(f"{ranks} ranks cannot divide the experts of {name}: {reason}", "parallel.experts")])


def divide_experts(model: Any, ranks: int, rank: int) -> None:
    """Replace the tensors of the experts of a skeleton by those of this rank's experts."""
    for name, module in experts_of(model).items():
        tensors = dict(module.named_parameters(prefix=name))
        shared = [tensor for tensor in tensors.values() if tensor.shape[:1] != (module.num_experts,)]
        assert not shared, f"{name} has parameters that are not of one expert each"
        keep_own_parts(
            model, {n: Part.of(tuple(tensor.shape), -tensor.ndim, rank, ranks, ranks) for n, tensor in tensors.items()}
        )
        module.num_experts //= ranks
        model.divided_experts.append(name)


def connect_experts(model: Any, group: dist.ProcessGroup) -> None:
    """Let the experts of a skeleton exchange tokens among the ranks of a group; its adapters are in place."""
    for name in model.divided_experts:
        module: Any = model.get_submodule(name)
        module.forward = functools.partial(_exchanged, module.forward, base_of(module).num_experts, group)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _exchanged(
    experts: Callable[..., torch.Tensor], own: int, group: dist.ProcessGroup, hidden_states: torch.Tensor,
    top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the weighted sums of the chosen experts [T, H] for tokens [T, H], experts and weights [T, k].

    `own` is the number of experts of each rank: those of rank r begin with expert r · own.
    """
    ranks, chosen = group.size(), top_k_index.shape[1]
    experts_of_copies = top_k_index.flatten()
    order = experts_of_copies.argsort(stable=True)
    counts = order.new_zeros(ranks * own).scatter_add_(0, experts_of_copies, torch.ones_like(order)).view(ranks, own)
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(received_counts, counts, group=group)
    sent, received = rows_exchanged(torch.stack([counts.sum(1), received_counts.sum(1)]).cpu(), len(order))
    there = functools.partial(all_to_all_uneven, sent=sent, received=received, group=group)
    back = functools.partial(all_to_all_uneven, sent=received, received=sent, group=group)
    rows = exchanged(hidden_states[order // chosen], there, back)
    # The copies come rank by rank, those of each sorted by expert.
    numbers = (
        torch.arange(own, device=rows.device)
        .repeat(ranks)
        .repeat_interleave(received_counts.flatten(), output_size=sum(received))
    )
    rows, numbers = functional.pad(rows, (0, 0, 0, 1)), functional.pad(numbers, (0, 1))[:, None]
    results = experts(rows, numbers, torch.ones_like(numbers, dtype=top_k_weights.dtype))[:-1]
    returned = exchanged(results, back, there)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    copies = returned[places].view(-1, chosen, returned.shape[-1])
    return (copies * top_k_weights[..., None].to(copies.dtype)).sum(1).to(hidden_states.dtype)


def rows_exchanged(sizes: torch.Tensor, copies: int) -> list[list[int]]:
    """Return the rows that this rank sends to each rank, and receives from each; a simulation has no `sizes` [2, N].

    Of `copies` tokens that it sends in all, that assumes the same number for each rank.
    """
    found: list[list[int]] = sizes.tolist()
    return found


def all_to_all_uneven(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send rows [rows, H] to the ranks of a group, `sent` to each; return the `received` rows from each."""
    found = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


class ExpertLoads:
    """Counts the tokens that the experts of every layer get in training, on all ranks."""

    def __init__(self, model: Any, device: torch.device, sum_over_ranks: Callable[[torch.Tensor], None]) -> None:
        """Watch the experts of a model; `sum_over_ranks` sums in place over the ranks that have the same layers."""
        self._sum, self._has_experts = sum_over_ranks, expert_count(model.config) > 0
        layers = experts_of(model)
        ranks = max((part.ranks for part in model.parts.values() if part.dim < -2), default=1)
        most = max((module.num_experts for module in layers.values()), default=0)
        self._counts = torch.zeros(len(layers), most * ranks, dtype=torch.int64, device=device)
        self._biases = [bias_of(model, name) for name in layers]
        for number, name in enumerate(layers):
            model.get_submodule(name).register_forward_pre_hook(functools.partial(self._add, number), with_kwargs=True)

    def _add(self, number: int, module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():  # a layer that is recomputed counts everything twice
            chosen = (args[1] if len(args) > 1 else kwargs["top_k_index"]).flatten()
            self._counts[number].scatter_add_(0, chosen, torch.ones_like(chosen))

    def largest_over_mean(self) -> torch.Tensor:
        """Return the tokens of the most used expert relative to the mean of its layer, in the most uneven layer.

        Float64 [1], or [0] of a model without experts. Collective: sums what all ranks with these layers have counted.
        """
        if not len(self._biases):  # here; other stages of a pipeline may have some
            return torch.zeros(int(self._has_experts), dtype=torch.float64, device=self._counts.device)
        self._sum(self._counts)
        counts = self._counts.double()
        return (counts.amax(1) / counts.mean(1)).nan_to_num().amax()[None]

    def balance(self, rate: float, skipped: torch.Tensor) -> None:
        """Move the routers' biases by `rate` towards balance, unless the step is `skipped`; forget what was counted.

        As in DeepSeek-V3, by the sign of the difference from the mean (Wang et al., arXiv:2408.15664).
        """
        for counts, bias in zip(self._counts.float(), self._biases, strict=True) if rate else ():
            assert bias is not None
            step = rate * (1 - skipped.to(bias.device).clamp(max=1)) * (counts.mean() - counts).sign()
            bias += step.to(bias.dtype)
        self._counts.zero_()


def bias_of(model: Any, experts: str) -> torch.Tensor | None:
    """Return the buffer by which the router beside these experts is biased when it chooses; None without one."""
    block = model.get_submodule(experts.rpartition(".")[0])
    found = [tensor for name, tensor in block.named_buffers() if name.rpartition(".")[2] in BIASES]
    return found[0] if found else None


def check_biases(bare: Any, rate: float) -> None:
    """Raise RecipeError if a skeleton has no biases for `train.router_bias_rate`."""
    layers = experts_of(bare)
    if rate and not (layers and all(bias_of(bare, name) is not None for name in layers)):
        message = f"the routers of {type(bare).__name__} have no bias that training may change: set it to 0"
        raise RecipeError([Problem(message, "train.router_bias_rate")])
