"""Draw initial weights as `from_config` does, one decoder layer at a time, the same on every rank."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel, local_torch_dtype

from fsdptrain.config.schema import Recipe
from fsdptrain.errors import RecipeError
from fsdptrain.model.patches import constructor_arguments, constructor_arguments_recorded
from fsdptrain.model.skeleton import parameters_on_meta, skeleton
from fsdptrain.model.units import decoder_layers, full_name
from fsdptrain.run_folder.events import Progress


def seed_of(*parts: object) -> int:
    """Return a 63-bit seed for any values; different values give unrelated seeds."""
    digest = hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def draw_weights(
    model: Any,
    mirror: Any,
    recipe: Recipe,
    progress: Progress,
    copy_own_rows: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Fill a sharded model with random weights, which depend on the recipe's seed and the parameter's name only.

    Every rank draws the same weights, one layer at a time, and keeps its rows: all world sizes start from the same
    weights, and no rank holds the whole model. `mirror` is an unsharded skeleton. `copy_own_rows(parameter, whole)`
    sets this rank's rows of a sharded parameter.
    """
    targets = dict(model.named_parameters())
    groups = init_groups(mirror)
    for done, weights in enumerate(initial_weights(mirror, groups, recipe), 1):
        for name, whole in weights.items():
            copy_own_rows(targets[name], whole)
        progress("initialise", done, len(groups))


@dataclass(frozen=True)
class InitGroup:
    """Modules that are initialised together, children before parents: (name, module, `_init_weights` of its model)."""

    name: str
    modules: list[tuple[str, nn.Module, Callable[[nn.Module], None]]]


def init_groups(mirror: Any) -> list[InitGroup]:
    """Split a skeleton into groups: decoder layers, children of other lists of modules, and what surrounds them.

    A decoder layer is one group, because `_init_weights` of a module may change its children. A module that contains
    some is a group without its children, because with them it would be the whole model.
    """
    # Groups are filled in the order in which transformers initialises modules: children first, each module once.
    layers = {id(module) for _, module in decoder_layers(mirror)}
    groups: dict[str, InitGroup] = {}
    visited: set[int] = set()

    def stays_whole(module: nn.Module, parent: nn.Module | None) -> bool:
        inner = list(module.modules())
        if id(module) in layers:
            return True
        if any(id(m) in layers for m in inner):
            return False
        return isinstance(parent, nn.ModuleList) or not any(isinstance(m, nn.ModuleList) for m in inner)

    def visit(name: str, module: nn.Module, parent: nn.Module | None, rules: Any, group: str | None) -> None:
        if id(module) in visited:  # used in several places, initialised in the first
            return
        visited.add(id(module))
        if isinstance(module, PreTrainedModel):  # a model inside a model has its own rules
            rules = module._init_weights
        if group is None and stays_whole(module, parent):
            group = name
        for key, child in module.named_children():
            visit(full_name(name, key), child, module, rules, group)
        home = name if group is None else group
        groups.setdefault(home, InitGroup(home, [])).modules.append((name, module, rules))

    visit("", mirror, None, mirror._init_weights, None)
    return [group for group in groups.values() if any(_own_parameters(module) for _, module, _ in group.modules)]


def initial_weights(mirror: Any, groups: list[InitGroup], recipe: Recipe) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights of each group by name, whole and on the CPU, as `AutoModelForCausalLM.from_config` draws them.

    The memory is NaN before `_init_weights` runs. A parameter that is still NaN afterwards is left to its module's
    constructor: it gets the constructor's value, and `_init_weights` runs a second time. A tied parameter is drawn with
    its source, because transformers ties weights after the initialisation. Raises RecipeError for a parameter that
    nothing initialises.
    """
    names = {id(param): name for name, param in mirror.named_parameters()}
    constructors = Constructors(mirror, recipe)
    for group in groups:
        places = [
            (name, module, key, param)
            for name, module, _ in group.modules
            for key, param in _own_parameters(module).items()
            if full_name(name, key) not in mirror.all_tied_weights_keys
        ]
        # Put real parameters into the modules, let `_init_weights` fill them, and put the meta ones back.
        constructed: dict[int, torch.Tensor] = {}
        for _ in range(2):
            real = {id(p): _real_parameter(p, constructed.get(id(p))) for *_, p in places}
            for _, module, key, param in places:
                setattr(module, key, real[id(param)])
            torch.manual_seed(seed_of(recipe.seed, group.name))
            with torch.no_grad():
                for _, module, rules in group.modules:
                    rules(module)
            for _, module, key, param in places:
                setattr(module, key, param)
            left = [place for place in places if real[id(place[-1])].isnan().any()]
            if not left or constructed:
                break
            constructed = {id(param): constructors.value(name, key) for name, _, key, param in left}
        if left:
            name, module, key, _ = left[0]
            raise RecipeError(
                f"model.init: random is not possible: transformers does not initialise {full_name(name, key)} "
                f"({type(module).__name__}); start from pretrained weights"
            )
        yield {names[i]: weight.detach() for i, weight in real.items()}


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _real_parameter(param: nn.Parameter, value: torch.Tensor | None) -> nn.Parameter:
    """Return a real parameter like this one, with the flags that `_init_weights` may read; NaN without a value."""
    memory = torch.full_like(param, torch.nan, device="cpu") if value is None else value.clone()
    made = nn.Parameter(memory, requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made


class Constructors:
    """The values that constructors of modules give their parameters; a constructor is run again for each value."""

    def __init__(self, mirror: Any, recipe: Recipe) -> None:
        self._mirror, self._recipe = mirror, recipe
        self._twin: Any = None  # a skeleton whose modules keep the arguments of their constructors

    def value(self, name: str, key: str) -> torch.Tensor:
        """Return the value of parameter `key` of the module `name`: NaN where the constructor sets none."""
        if self._twin is None:
            with constructor_arguments_recorded({type(module) for module in self._mirror.modules()}):
                self._twin = skeleton(self._mirror.config, self._recipe.model)
        module = self._twin.get_submodule(name)
        args, kwargs = constructor_arguments(module)
        torch.manual_seed(seed_of(self._recipe.seed, name, "constructor"))
        dtype = getattr(torch, self._recipe.model.dtype)
        with parameters_on_meta(keep_real=type(module)), local_torch_dtype(dtype), _unset_memory_is_nan():
            param = type(module)(*args, **kwargs).get_parameter(key)
        return param.detach()


@contextlib.contextmanager
def _unset_memory_is_nan() -> Iterator[None]:
    """Let `torch.empty` return NaN; see torch.utils.deterministic.fill_uninitialized_memory."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
