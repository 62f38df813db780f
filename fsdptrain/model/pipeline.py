"""Pipelines: which decoder layers a stage has, and a skeleton cut down to the stages of a rank.

A stage is a run of layers, with the embedding before the first and the head behind the last one. Layers of other stages
are replaced by modules that pass hidden states on, so that the architecture's own forward computes a stage, and
parameters keep their names:

    tokens ─> embedding, layers ─> hidden states ─> layers ─> hidden states ─> layers, norm, head ─> loss

This is right for a decoder that only passes hidden states from layer to layer, and computes all else (masks, rotary
tables) from positions, which every stage has. `check_stages` tries that: without layers and norm, a decoder must return
the hidden states that it gets.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from fsdptrain.config.schema import Parallel
from fsdptrain.errors import Problem, RecipeError, error_summary
from fsdptrain.model.router_loss import is_wanted
from fsdptrain.model.units import EXPERTS_OF_A_TOKEN, decoder_layers, first_number, tied

Children = dict[str, nn.Module | None]  # of a decoder, by name


class Elsewhere(nn.Module):
    """Takes the place of a module that other ranks have: passes on what it gets."""

    weight = None

    def __init__(self, layer: nn.Module | None = None) -> None:
        """Take over what a decoder may read of its layer, such as its kind."""
        super().__init__()
        of_layer = vars(layer).items() if layer else ()
        vars(self).update((name, value) for name, value in of_layer if isinstance(value, str | int))

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the first argument."""
        return hidden


# ------------------------------------------------------------------------------------------------- what can be divided


def check_stages(bare: Any, parallel: Parallel) -> None:
    """Raise RecipeError, which names the obstacle, if a skeleton cannot be a pipeline of the recipe's stages.

    What is frozen in it is marked so: ranks that train nothing would be idle in every backward pass.
    """
    if parallel.pipeline == 1:
        return
    count, counts = len(decoder_layers(bare)), parallel.stage_layers
    field, reason = "parallel.pipeline", _obstacle(bare)
    if not reason and counts is not None and (sum(counts) != count or min(counts) < 1):
        field = "parallel.stage_layers"
        reason = f"it has {count} layers, and these are {sum(counts)}: give each stage at least one, and all together"
    elif not reason and count < parallel.stages:
        reason = f"it has {count} layers: use fewer stages"
    elif not reason and (idle := _places_without_training(bare, parallel)):
        reason = (
            f"group {idle[0] + 1} of its ranks would train nothing: use fewer stages, or train layers in all of them"
        )
    if reason:
        message = f"{type(bare).__name__} cannot be a pipeline of {parallel.stages} stages: {reason}"
        raise RecipeError([Problem(message, field)])


def _obstacle(bare: Any) -> str | None:
    head, layers = bare.get_output_embeddings(), decoder_layers(bare)
    if bare.config.get_text_config() is not bare.config or head is None or not layers:
        return "it is not one decoder with a list of layers and a head"
    if is_wanted(bare):
        return "the auxiliary loss of its routers (output_router_logits) needs all layers"
    in_layers = [id(param) for _, layer in layers for param in layer.parameters()]
    if len(set(in_layers)) < len(in_layers):
        return "its layers share weights"
    decoder, container = _decoder(bare)
    inside = {id(param) for module in (decoder, head) for param in module.parameters()}
    if beside := [name for name, param in bare.named_parameters() if id(param) not in inside]:
        return f"{beside[0]} is neither in its decoder nor in its head"
    kept, of_layers = bare.state_dict().keys(), tuple(f"{name}." for name, _ in layers)
    if buffers := [name for name, _ in bare.named_buffers() if name in kept and not name.startswith(of_layers)]:
        return f"{buffers[0]}, which files have, is in no layer"
    return _beside_layers(decoder, container)


def _beside_layers(decoder: Any, container: str) -> str | None:
    """Return what a decoder does with hidden states besides its layers; None if it only passes them on."""
    given = torch.randn(1, 4, decoder.config.hidden_size).requires_grad_()
    others: list[str] = []

    class Watched(Elsewhere):
        def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            for name, value in [*enumerate(args), *kwargs.items()]:
                if (isinstance(value, torch.Tensor) and value.requires_grad) or value == {}:
                    others.append(str(name))
            return hidden

    twin, children = copy.copy(decoder), _children(decoder, container, [], [])
    layers = decoder._modules[container].children()
    twin._modules = {**children, container: nn.ModuleList(map(Watched, layers))}
    try:
        found = twin(inputs_embeds=given, position_ids=torch.arange(4)[None], use_cache=False).last_hidden_state
    except Exception as error:  # any error of the architecture's code
        return f"its decoder does not run without its layers ({error_summary(error)})"
    if others:
        return f"its layers get more than hidden states from one another ({others[0]})"
    return None if torch.equal(found, given) else "its decoder changes hidden states outside of its layers"


def _places_without_training(bare: Any, parallel: Parallel) -> list[int]:
    layers, last = [layer for _, layer in decoder_layers(bare)], parallel.stages - 1
    in_layers = {id(param) for layer in layers for param in layer.parameters()}
    first = {id(param) for param in bare.get_input_embeddings().parameters()}
    trained = {id(param) for param in bare.parameters() if param.requires_grad}
    behind = {id(param) for param in bare.get_output_embeddings().parameters()} | (trained - in_layers - first)
    of_stages = [
        {id(p) for number in each for p in layers[number].parameters()} for each in layers_of_stages(bare, parallel)
    ]
    of_stages[0] |= first
    of_stages[last] |= behind
    places = range(parallel.pipeline)
    return [place for place in places if not trained & set().union(*of_stages[place :: parallel.pipeline])]


def layers_of_stages(bare: Any, parallel: Parallel) -> list[range]:
    """Return the numbers of the layers of each stage: those of the recipe, or such that all take about equally long.

    Time is counted in weights that a token is multiplied with, those of the head included. Of stages that are equally
    good the first ones have fewer layers, because they keep the activations of more micro-batches.
    """
    used = first_number(bare.config.get_text_config(), EXPERTS_OF_A_TOKEN) or 1

    def cost(layer: nn.Module) -> int:  # of the experts of a layer, which are one tensor, a token passes a few
        return sum(p.numel() if p.ndim < 3 else used * p[0].numel() for p in layer.parameters())

    head = sum(param.numel() for param in bare.get_output_embeddings().parameters())
    costs = [cost(layer) for _, layer in decoder_layers(bare)]
    counts = parallel.stage_layers or balanced(costs, head, parallel.stages)
    return [range(last - count, last) for count, last in zip(counts, itertools.accumulate(counts), strict=True)]


def balanced(costs: Sequence[int], head: int, stages: int) -> list[int]:
    """Return how many of the layers with these costs each stage has, so that the longest stage is as short as can be.

    The last stage has `head` in addition. Every stage has at least one layer.
    """

    def filled(limit: int) -> list[int] | None:
        """Fill the stages up to the limit, beginning with the last; None if layers are left."""
        counts, left = [], len(costs)
        for before in reversed(range(stages)):  # stages before this one, which need a layer each
            cost, count = head if before == stages - 1 else 0, 0
            while left > before and (count == 0 or cost + costs[left - 1] <= limit):
                cost, count, left = cost + costs[left - 1], count + 1, left - 1
            counts.append(count)
        return None if left else counts[::-1]

    low, high = max(costs), sum(costs) + head
    while low < high:  # the smallest limit with which all layers have a place
        middle = (low + high) // 2
        low, high = (low, middle) if filled(middle) else (middle + 1, high)
    counts = filled(low)
    assert counts is not None, "there are fewer layers than stages"
    return counts


# ---------------------------------------------------------------------------------------------------- a rank's stages


def cut(model: Any, layers: list[range], parallel: Parallel, place: int) -> list[Children]:
    """Cut a skeleton, which may have adapters, to the stages of the ranks at a place of the pipeline.

    `layers` are those of every stage. Returns the children of its decoder in each of the rank's stages, for
    `compute_stages`. `model.tied_ends` has the name of an embedding that is the head as well, where it is here, and
    `model.repeated` if an earlier stage has it, too.
    """
    own, last = range(place, parallel.stages, parallel.pipeline), parallel.stages - 1
    decoder, container = _decoder(model)
    views = [_children(decoder, container, [layers[stage]], _ends(stage, last)) for stage in own]
    both, embedding = tied(model), model.get_input_embeddings()
    model.tied_ends = {name for name, param in model.named_parameters() if both and param is embedding.weight}
    here = [end for stage in own for end in _ends(stage, last)]
    decoder._modules = _children(decoder, container, [layers[stage] for stage in own], here)
    if last not in own:
        model.set_output_embeddings(Elsewhere())
    elif both:
        model.set_input_embeddings(embedding)  # the head's weight has its name
    names = dict(model.named_parameters())
    if both and last not in own:
        model.tie_weights = lambda *_, **__: None
    model.repeated = model.tied_ends if last in own else set()
    model.tied_ends = model.tied_ends & names.keys()
    model.parts = {name: part for name, part in model.parts.items() if name in names}
    model.frozen_names = model.frozen_names & names.keys()
    model.divided_experts = [each for each in model.divided_experts if any(n.startswith(f"{each}.") for n in names)]
    return views


def compute_stages(model: Any, views: list[Children], ends_here: bool) -> None:
    """Let `model(chunk=n, …)` compute the n-th stage of the rank.

    It takes `input_ids` in the first stage of all and `inputs_embeds` in the others. It returns hidden states; in the
    last stage of all, which the rank has if `ends_here`, what the model returned before.
    """
    (decoder, _), forward = _decoder(model), model.forward

    def forward_of_stage(chunk: int, **inputs: Any) -> Any:
        every, decoder._modules = decoder._modules, views[chunk]
        try:
            if ends_here and chunk == len(views) - 1:
                return forward(**inputs)
            return decoder(**inputs).last_hidden_state
        finally:
            decoder._modules = every

    model.forward = forward_of_stage


def _decoder(model: Any) -> tuple[Any, str]:
    """Return the module that calls the decoder layers, and the name in it of their list."""
    owner, _, name = decoder_layers(model)[0][0].rpartition(".")[0].rpartition(".")
    return model.get_submodule(owner), name


FIRST, LAST = "before the layers", "behind the layers"  # where a child of the decoder is


def _ends(stage: int, last: int) -> list[str]:
    return [FIRST] * (stage == 0) + [LAST] * (stage == last)


def _children(decoder: Any, container: str, layers: Collection[range], ends: Collection[str]) -> Children:
    """Return the children with which a decoder computes these layers, and what is at these ends of the model."""
    found: Children = {}
    end = FIRST
    for name, child in decoder._modules.items():
        if name == container:
            found[name], end = nn.ModuleList(), LAST
            for number, (key, layer) in enumerate(child.named_children()):
                own = any(number in each for each in layers)
                found[name].add_module(key, layer if own else Elsewhere(layer))  # type: ignore[union-attr]
        else:
            has_weights = child is not None and next(child.parameters(), None) is not None
            found[name] = Elsewhere() if has_weights and end not in ends else child
    return found
