"""Activation checkpointing → compile → `fully_shard`, in this order.

Recomputation and compilation replace a decoder layer's `forward`; FSDP's hooks run around its `__call__`. So it is
gathered once in backward, before its recomputation, and parameters keep the names that transformers gives them. What no
compiler can trace (`offload`, `keep_attention`) comes after compilation.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from fsdptrain.config.schema import Fsdp, Recipe
from fsdptrain.errors import FsdptrainError, RecipeError, WorkerLost
from fsdptrain.model import tiles, varlen
from fsdptrain.model.adapters import freeze, layers_in_nf4
from fsdptrain.model.attention import avoid_wrong_kernel
from fsdptrain.model.distillation import token_loss_of
from fsdptrain.model.expert_parallel import connect_experts, divide_experts
from fsdptrain.model.float8 import convert_to_float8
from fsdptrain.model.loss import compute_in_chunks
from fsdptrain.model.nf4 import quantise_layers
from fsdptrain.model.parts import Part, name_parts
from fsdptrain.model.patches import find_documents_without_waiting, torch_operators
from fsdptrain.model.pipeline import compute_stages, cut, layers_of_stages
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.tensor_parallel import connect_blocks, divide_layers, note_whole_weights
from fsdptrain.model.units import Unit, decoder_layers, in_buckets, part_of, units_of
from fsdptrain.model.weights import place_buffers
from fsdptrain.parallel.patches import gather_itself, keep_float32, name_collectives, takes_two_dtypes
from fsdptrain.parallel.recompute import KERNELS, keep_choices, recompute
from fsdptrain.parallel.world import World, send
from fsdptrain.plan.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    class ShardedModel(FSDPModule, PreTrainedModel):
        """A model of transformers after `fully_shard`, which gives it a class that is derived from both."""


GRAPHS = 64  # of all kinds of layers that share a `forward`: with and without gradients, with and without a mask


def build(plan: Plan, config: Any, world: World) -> tuple[ShardedModel, list[Unit]]:
    """Return the plan's model, sharded over the ranks, and its units; parameters are still on the meta device."""
    recipe = plan.recipe
    model = skeleton(config, recipe.model, recipe.fsdp.mixed_precision.param_dtype)
    if plan.ranks_of_row > 1 and not varlen.used_by(model):
        raise RuntimeError("internal error: rows are shared, but the attention exchanges nothing (please report it)")
    kernel = recipe.model.attn_implementation
    if recipe.fsdp.recomputation.keep_attention and kernel not in KERNELS:
        raise RecipeError(
            f"fsdp.activation_checkpointing: keep_attention is not possible with {kernel} attention, which "
            f"{type(model).__name__} needs here: leave it out"
        )
    layers = layers_of_stages(model, recipe.parallel) if recipe.parallel.pipeline > 1 else []
    divide(model, recipe, world.rank)
    quantise_layers(model, layers_in_nf4(model, recipe), getattr(torch, recipe.fsdp.mixed_precision.param_dtype))
    freeze(model, recipe)
    name_parts(model)
    place = plan.place_in_pipeline(world.rank)
    views = cut(model, layers, recipe.parallel, place) if layers else []
    has_head = place == recipe.parallel.pipeline - 1
    if world.tensor is not None:
        connect_blocks(model, world.tensor)
        note_whole_weights(model, world.tensor.size())
    if world.experts is not None:
        connect_experts(model, world.experts)
        for name in model.divided_experts:
            keep_choices(model.get_submodule(name.rpartition(".")[0]))
    convert_to_float8(model, recipe, emulate=world.device.type == "cpu")
    if world.device.type == "cpu":
        tiles.install()
        torch_operators().start()
    elif world.device.type == "cuda":  # a simulation chooses itself whether masks are built
        find_documents_without_waiting(recipe.documents_share_sequences)
        if recipe.model.attn_implementation == "sdpa":
            avoid_wrong_kernel(recipe.data.seq_len)
    units = in_buckets(units_of(model, recipe.fsdp.wrap), recipe.fsdp)
    if recipe.train.loss == "chunked" and has_head:
        compute_in_chunks(model, plan.compiles, token_loss_of(recipe))
    if views:
        compute_stages(model, views, has_head)
    place_buffers(model, world.device, recipe.fsdp.mixed_precision.buffer_dtype)
    shard(model, units, world, plan)
    return model, units


def divide(model: Any, recipe: Recipe, rank: int) -> None:
    """Replace what ranks divide of a skeleton without adapters, by the recipe, by the parts of a rank."""
    parallel = recipe.parallel
    if parallel.experts > 1:
        divide_experts(model, parallel.experts, rank % parallel.experts)
    if parallel.tensor > 1:
        divide_layers(model, parallel.tensor, rank % parallel.tensor)


def shard(model: Any, units: list[Unit], world: World, plan: Plan) -> None:
    """Shard a skeleton over the ranks in place, by the plan's strategy."""
    recipe, fsdp = plan.recipe, plan.recipe.fsdp
    # Recomputation, then compilation: both replace the `forward` of decoder layers, around which FSDP2 will add its
    # hooks.
    layers = [module for _, module in decoder_layers(model)]
    how = fsdp.recomputation
    if not how.beside_compiler:
        recompute(layers, how, world.device, bool(model.divided_experts))
    if plan.compiles:
        compile_layers(layers)
    if how.beside_compiler:
        recompute(layers, how, world.device, bool(model.divided_experts))
    # Units first: `fully_shard` leaves to the root what no unit has taken.
    policies: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, fsdp.mixed_precision.param_dtype),
            reduce_dtype=getattr(torch, fsdp.mixed_precision.reduce_dtype),
            cast_forward_inputs=False,  # some (ALiBi, rotary tables, mamba's residual) must be float32
        ),
        "offload_policy": CPUOffloadPolicy(world.device.type != "cpu") if fsdp.cpu_offload else OffloadPolicy(),
    }
    reshard = fsdp.strategy.reshards
    for name in model.divided_experts:
        fully_shard(
            model.get_submodule(name),
            mesh=world.meshes[recipe.parallel.experts],
            reshard_after_forward=reshard,
            **policies,
        )
    inside = {id(layer) for layer in layers}
    for unit in units:
        mesh = world.meshes[recipe.parallel.tensor if id(unit.modules[0]) in inside else 1]
        # The head runs last in forward and first in backward: it would be gathered again at once.
        fully_shard(unit.modules, mesh=mesh, reshard_after_forward=reshard and unit.name != "head", **policies)
    fully_shard(model, mesh=world.mesh, reshard_after_forward=None if reshard else False, **policies)
    # Gradients are summed, not averaged: the loss is already divided by the label tokens of the global batch.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if world.device.type == "cpu":
                module.set_custom_reduce_scatter(_GlooReduceScatter())  # type: ignore[arg-type]  # their base is private
    # Both change the units that exist now: groups of their own for float32 parameters, and the order of prefetching.
    if model.float32_names:
        keep_float32(model, {id(param) for name, param in model.named_parameters() if name in model.float32_names})
    _set_prefetch(units, fsdp)
    name_collectives(model, world.mesh.get_group(0) if world.mesh.ndim > 1 else None)


def begin_backward(model: ShardedModel, fsdp: Fsdp, last: bool) -> None:
    """Set what the backward of a micro-batch does; `last` says that no other micro-batch of the step follows.

    With `accumulation: hold` only the last one reduces gradients. With `hold_shards` each one does, and the sums over
    ranks are added on the device; the last one sums them over copies and, with cpu_offload, sends them to the host.
    Weights that are gathered once a step stay until the last.
    """
    model.set_requires_gradient_sync(last or fsdp.accumulation != "hold")
    if fsdp.accumulation == "hold_shards":
        model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or not fsdp.strategy.gathers_once)


def use_whole_shards(model: Any, plan: Plan) -> None:
    """Compute with allocated shards that are whole copies, unless they have another dtype: FSDP2 would copy them."""
    if not plan.has_whole_shards:
        return
    compute = getattr(torch, plan.recipe.fsdp.mixed_precision.param_dtype)
    for name, param in model.named_parameters():
        if param.dtype == compute or not param.is_floating_point() or name in model.float32_names:
            gather_itself(param)


class _GlooReduceScatter:
    """A reduce-scatter in rank order: gloo's own all-reduces the whole buffer, and takes three times as long."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, "the mean is taken of the loss"
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(-1, output_tensor.numel()), dim=0, out=output_tensor)


def whole_tensor(tensor: torch.Tensor, part: Part | None, world: World) -> torch.Tensor:
    """Return the whole of a tensor that is sharded over ranks, like the parameter that is `part` of one; collective."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if part is None or part.count == 1:
        return whole
    group = world.group_of(part)
    gathered = whole.new_empty(part.ranks * whole.numel())
    dist.all_gather_into_tensor(gathered, whole.flatten(), group=group)
    found = whole.new_empty(part.shape)
    for number, own in enumerate(gathered.view(part.count, -1, *whole.shape)):
        part.at(number).put(own[0], found)
    return found


def sum_parts(model: Any, world: World) -> None:
    """Sum over the ranks that divide layers those gradients of which each has a part; after the last micro-batch.

    They are those of weights of layers that all of them have, and of key heads that some have in common.
    """
    params = dict(model.named_parameters())
    shared = {
        name: part for name, part in model.parts.items() if part.count < part.ranks and params[name].grad is not None
    }
    if not shared:
        return
    grads = [params[name].grad.to_local() for name in shared]
    placed = []  # each gradient at its place among those of other parts, which are zeros here
    for own, part in zip(grads, shared.values(), strict=True):
        places = own.new_zeros(part.count, own.numel(), dtype=torch.float32)
        places[part.number] = own.flatten()
        placed.append(places.flatten())
    sums = send(torch.cat(placed), world.device)
    dist.all_reduce(sums, group=world.tensor)
    for own, part, found in zip(grads, shared.values(), sums.split([len(each) for each in placed]), strict=True):
        own.copy_(found.view(part.count, own.numel())[part.number].view_as(own))


def sum_tied_ends(model: Any, world: World) -> None:
    """Add the gradients of an embedding that is the head as well, where both ends of a pipeline have it."""
    for name in model.tied_ends:
        if (grad := model.get_parameter(name).grad) is not None:
            assert world.messages is not None
            own = grad.to_local()
            own += world.messages.exchange_ends(send(own, world.device)).to(own.device)


def check_dtypes(bare: Any, plan: Plan) -> None:
    """Raise RecipeError if torch, before version 2.13, cannot compute with the dtypes of the parameters of a unit."""
    recipe, compute = plan.recipe, plan.recipe.fsdp.mixed_precision.param_dtype
    if takes_two_dtypes():
        return
    if recipe.adapter.kind == "qlora":
        raise RecipeError(
            f"adapter.kind: torch {torch.__version__} would convert quantised weights to {compute} when it gathers "
            "them: use torch 2.13 or newer, or kind: lora"
        )
    if compute == "float32":
        return
    if names := skeleton(bare.config, recipe.model, compute).float32_names:
        raise RecipeError(
            f"fsdp.mixed_precision.param_dtype: {type(bare).__name__} keeps {min(names)} in float32, and torch "
            f"{torch.__version__} cannot compute in two dtypes in one unit: use torch 2.13 or newer, or float32"
        )


def compile_layers(layers: list[nn.Module]) -> None:
    """Compile the `forward` of every layer when it first runs; equal layers share one graph.

    All micro-batches have one shape, except for the bounds of packed documents, which only attention and recurrences
    read: their number and the longest of them are symbols in the graph, so that other documents do not compile again.
    """
    # These are settings of torch. Above its limit of graphs, 8, a function runs uncompiled.
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)
    # Patterns of dynamo's names for arguments, as `L['kwargs']['documents']`.
    patterns = [pattern for pattern in torch.compiler.config.dynamic_sources.split(",") if pattern]
    patterns += [f".*'{name}'.*" for name in ("documents", "longest_document", "packed_documents")]
    torch.compiler.config.dynamic_sources = ",".join(dict.fromkeys(patterns))
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)


def _set_prefetch(units: list[Unit], fsdp: Fsdp) -> None:
    """Set which units are gathered ahead of their use, and which are not gathered for backward.

    Units are in forward order. By default FSDP2 gathers the next unit before this one's backward (BACKWARD_PRE), and
    none ahead in forward; experts that are a unit in a layer are gathered with it. The gradient of a lookup, in a unit
    that is an embedding alone, does not need the table.
    """
    modules: list[Any] = [unit.modules[0] for unit in units]
    lookups = [
        len(unit.modules) == len([*module.parameters()]) == 1 and isinstance(module, nn.Embedding)
        for unit, module in zip(units, modules, strict=True)
    ]
    for i, module in enumerate(modules):
        inside = [each for each in module.modules() if isinstance(each, FSDPModule) and each is not module]
        if ahead := [*inside, *modules[i + 1 : i + 1 + fsdp.forward_prefetch]]:
            module.set_modules_to_forward_prefetch(ahead)
        if fsdp.backward_prefetch != "BACKWARD_PRE":
            module.set_modules_to_backward_prefetch([module])  # already gathered: nothing is prefetched
        if lookups[i]:
            module.set_unshard_in_backward(False)
        if fsdp.backward_prefetch == "BACKWARD_POST" and i > 0 and not lookups[i - 1]:
            module.register_full_backward_hook(functools.partial(_gather_next, modules[i - 1]))


def _gather_next(unit: FSDPModule, *_: object) -> None:
    unit.unshard(async_op=True)


# -------------------------------------------------------------------------------------------------- copies of the model


def check_replicas(model: Any, world: World, steps_made: int | None = None) -> None:
    """Raise an error unless all copies of the model are bitwise equal; collective.

    Only gradients are summed over the copies: copies that differ once would differ forever, without an error. The sums
    of the bits of each rank's shards are compared. Before the first step the buffers are compared too, which every rank
    has as a whole and a forward may change. Raises FsdptrainError then, because only a defect of the code makes copies
    differ; WorkerLost after `steps_made` steps, where the hardware is to be suspected.
    """
    state: dict[str, torch.Tensor] = dict(model.named_parameters())
    if steps_made is None:
        state |= dict(model.named_buffers())
    sums = torch.stack([_bit_sum(tensor).to(world.device) for tensor in state.values()])
    ranks = world.gather_objects(sums.tolist())
    for number, (name, tensor) in enumerate(state.items()):
        for first, *others in world.holders(tensor, model.parts.get(name)).T.tolist():
            other = next((rank for rank in others if ranks[rank][number] != ranks[first][number]), None)
            if other is None:
                continue
            places = f"ranks {first} ({world.hosts[first]}) and {other} ({world.hosts[other]}), which hold copies of it"
            if steps_made is None:
                raise FsdptrainError(
                    f"internal error: before the first step {name} is not the same on {places} (please report it)"
                )
            raise WorkerLost(
                f"after step {steps_made} {name} is not the same on {places}: suspect the memory of one of them, or a "
                "link; the weights in every checkpoint were the same on all copies"
            )


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a local tensor's 64-bit words modulo 2⁶⁴, int64 on its device; a flipped bit changes it."""
    data = part_of(tensor.detach()).flatten().view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        data = pad(data, (0, -len(data) % 8))  # a copy, which begins at a whole word
    return data.view(torch.int64).sum()
