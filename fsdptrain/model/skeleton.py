"""The skeleton of a model, with parameters on the meta device and buffers on the CPU, and its random weights.

Buffers are real, as the constructor makes them: non-persistent ones (rotary frequencies) are in no file. Weights are
drawn as `from_config` does, one decoder layer at a time, the same on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.initialization import guard_torch_init_functions
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from fsdptrain.config.schema import Model, Recipe
from fsdptrain.errors import RecipeError, error_summary
from fsdptrain.model.units import copy_own_rows, decoder_layers, full_name, saved_state
from fsdptrain.run_folder.events import Progress

LARGEST_BUFFER = 2**28  # elements
TOO_LARGE = "this machine has too little memory for the modules and buffers of the model, without its weights"


@contextlib.contextmanager
def parameters_on_meta(keep_real: type[nn.Module] | None = None) -> Iterator[None]:
    """Send every parameter that a module registers to the meta device; buffers stay as they are.

    `torch.device("meta")` would take the buffers too. The parameters of modules of the class `keep_real` stay real.
    """

    def to_meta(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        if param.is_meta or type(module) is keep_real:
            return None
        return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # typed to return None
    try:
        yield
    finally:
        hook.remove()


def auto_class(config: Any) -> Any:
    """Return the class of transformers that builds the model of a configuration.

    A vision-language model, by the class that its files name, is built whole, so that it is exported whole.
    """
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    return AutoModelForImageTextToText if whole in (config.architectures or ()) else AutoModelForCausalLM


def skeleton(config: Any, model: Model, compute: str | None = None, keep_real: type[nn.Module] | None = None) -> Any:
    """Return the model with parameters on the meta device in the master dtype, and real buffers on the CPU.

    `compute` is the dtype that parameters are cast to for compute, by default the master dtype: buffers that are in no
    file are those of a model of that dtype. The attribute `float32_names` of the result names the tensors that
    transformers keeps in float32 in such a model; their master dtype is float32, too. `keep_real` is as in
    `parameters_on_meta`. Raises RecipeError if no model can be built from the configuration.
    """
    # Let transformers build the model in the compute dtype: this decides its buffers, and what stays in float32.
    master, computed = getattr(torch, model.dtype), getattr(torch, compute or model.dtype)
    kernel = model.attn_implementation
    with _building_errors(kernel), parameters_on_meta(keep_real), _LargeOnMeta():
        # Weights that are drawn need no other parts than the language model.
        made = (auto_class(config) if model.init == "pretrained" else AutoModelForCausalLM).from_config(
            copy.deepcopy(config),  # `from_config` writes the dtype into it
            dtype=computed,
            attn_implementation=None if kernel == "auto" else kernel,  # None: sdpa if the class has it, else eager
            trust_remote_code=False,  # `load_config` has registered the classes that are trusted
        )
        if computed != torch.float32:  # as `from_pretrained` does: compute buffers in float32, then cast them
            with torch.no_grad(), guard_torch_init_functions():
                _initialise(made, made._init_weights)
    # Then give the state that is saved its master dtype.
    state = {name: tensor for name, tensor in saved_state(made).items() if tensor.is_floating_point()}
    explicit = {name for name, tensor in state.items() if tensor.dtype == torch.float32 != computed}
    made.float32_names = explicit | _kept_in_float32(made, computed)
    made.frozen_names = set()  # of parameters, by the recipe: see `adapters.freeze`
    made.parts = {}  # of parameters that ranks divide: see `model.parts`
    made.divided_experts = []  # names of modules: see `expert_parallel`
    made.tied_ends = made.repeated = set()  # of parameters that several stages have: see `pipeline.cut`
    wide = made.float32_names | _kept_in_float32(made, master)
    for name, tensor in state.items():
        dtype = torch.float32 if name in wide else master
        if tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
    made.tie_weights()
    return made


def _initialise(module: nn.Module, rules: Callable[[nn.Module], None]) -> None:
    """Initialise a module after its children, by `_init_weights` of the innermost model that contains it."""
    rules = module._init_weights if isinstance(module, PreTrainedModel) else rules
    for child in module.children():
        _initialise(child, rules)
    rules(module)


def skeleton_in_dtype(model: Any, dtype: str, compute: str | None = None) -> Any:
    """Return a skeleton of the same architecture in `dtype`, except for what transformers keeps in float32.

    `compute` is as in `skeleton`.
    """
    kernel = model.config._attn_implementation
    return skeleton(model.config, Model(dtype=dtype, attn_implementation=kernel), compute)  # type: ignore[arg-type]


def _kept_in_float32(model: Any, dtype: torch.dtype) -> set[str]:
    """Return the names of the state that `from_pretrained(dtype=dtype)` loads in float32."""
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in model._get_dtype_plan(dtype)]
    return {name for name in saved_state(model) if any(pattern.search(name) for pattern in patterns)}


@contextlib.contextmanager
def _building_errors(kernel: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # sizes that do not match, unknown activation functions, a kernel that is not there
        words = error_summary(error)
        if isinstance(error, MemoryError) or "can't allocate memory" in words:
            raise RecipeError(f"model.config: {TOO_LARGE}: {words}") from None
        if kernel != "auto" and re.search("attention|flash|flex|sdpa", words, re.IGNORECASE):
            reason = words.split(". ")[0]
            raise RecipeError(f"model.attn_implementation: {kernel} is not available: {reason}; use auto") from None
        raise RecipeError(f"model.config: no model can be built from it: {words}") from None


# Methods of tensors, and functions of `torch.nn.init`, for which transformers puts its own of the same names.
DRAWS = {"normal_", "uniform_", "kaiming_uniform_"}


class _LargeOnMeta(TorchFunctionMode):
    """Creates tensors that are too large for a buffer on the meta device: all experts of a layer may be 30 GB.

    Nothing is drawn for tensors that are there: torch would compute the shapes of it in Python.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; if it creates a large tensor, create it on the meta device."""
        kwargs = kwargs or {}
        if func.__name__ in DRAWS and (drawn := args[0] if args else kwargs["tensor"]).is_meta:
            return drawn
        if func in (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn):
            made = func(*args, **{**kwargs, "device": "meta"})
            if made.numel() > LARGEST_BUFFER:
                return made
        return func(*args, **kwargs)


# ------------------------------------------------------------------------------------------------------ random weights


def seed_of(*parts: object) -> int:
    """Return a 63-bit seed for any values; different values give unrelated seeds."""
    digest = hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def draw_weights(model: Any, mirror: Any, recipe: Recipe, progress: Progress) -> None:
    """Fill a sharded model with random weights, which depend on the recipe's seed and the parameter's name only.

    Every rank draws the same weights, one layer at a time, and keeps its rows. `mirror` is an unsharded skeleton.
    """
    own, groups = {name for name, _ in model.named_parameters()}, init_groups(mirror)
    groups = {name: group for name, group in groups.items() if own & _names_in(group)}  # of a pipeline, not all
    for done, weights in enumerate(initial_weights(mirror, groups, recipe), 1):
        for name in own & weights.keys():
            copy_own_rows(model, name, weights[name])
        progress("initialise", done, len(groups))


# Modules that are initialised together, children before parents: (name, module, `_init_weights` of its model).
InitGroup = list[tuple[str, nn.Module, Callable[[nn.Module], None]]]


def init_groups(mirror: Any) -> dict[str, InitGroup]:
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
        groups.setdefault(name if group is None else group, []).append((name, module, rules))

    visit("", mirror, None, mirror._init_weights, None)
    return {name: group for name, group in groups.items() if any([*m.parameters(recurse=False)] for _, m, _ in group)}


def _names_in(group: InitGroup) -> set[str]:
    return {full_name(name, key) for name, module, _ in group for key, _ in module.named_parameters(recurse=False)}


def initial_weights(mirror: Any, groups: dict[str, InitGroup], recipe: Recipe) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights of each group by name, whole and on the CPU, as `AutoModelForCausalLM.from_config` draws them.

    The memory is NaN before `_init_weights` runs. A parameter that is still NaN afterwards is left to its module's
    constructor, and gets the value that it has in a new model. A tied parameter is drawn with its source. Raises
    RecipeError for a parameter that nothing initialises.
    """
    names = {id(param): name for name, param in mirror.named_parameters()}
    twins: dict[type[nn.Module], Any] = {}  # a class → a skeleton in which its modules have real parameters
    for group_name, group in groups.items():
        places = [
            (name, module, key, param)
            for name, module, _ in group
            for key, param in module.named_parameters(recurse=False)
            if full_name(name, key) not in mirror.all_tied_weights_keys
        ]
        # Put real parameters into the modules, let `_init_weights` fill them, and put the meta ones back.
        real: dict[int, nn.Parameter] = {}
        for *_, param in places:
            memory = torch.full_like(param, torch.nan, device="cpu")
            real[id(param)] = nn.Parameter(memory, requires_grad=param.requires_grad)
            real[id(param)].__dict__.update(param.__dict__)  # flags that `_init_weights` may read
        for _, module, key, param in places:
            setattr(module, key, real[id(param)])
        torch.manual_seed(seed_of(recipe.seed, group_name))
        with torch.no_grad():
            for _, module, rules in group:
                rules(module)
        for name, module, key, param in places:
            setattr(module, key, param)
            if not real[id(param)].isnan().any():
                continue
            if type(module) not in twins:
                twins[type(module)] = _with_real(type(module), mirror, recipe)
            real[id(param)] = twins[type(module)].get_parameter(full_name(name, key))
            if real[id(param)].is_meta or real[id(param)].isnan().any():  # on meta: too large to be built apart
                raise RecipeError(
                    f"model.init: random is not possible: transformers does not initialise {full_name(name, key)} "
                    f"({type(module).__name__}); start from pretrained weights"
                )
        yield {names[i]: weight.detach() for i, weight in real.items()}


def _with_real(kind: type[nn.Module], mirror: Any, recipe: Recipe) -> Any:
    """Return a skeleton in which modules of a class have their first parameters: NaN where nothing sets a value."""
    torch.manual_seed(seed_of(recipe.seed, kind.__name__, "constructor"))
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not set is NaN
    try:
        return skeleton(mirror.config, recipe.model, keep_real=kind)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
