"""Weights into a sharded skeleton: drawn from a seed, or read from safetensors, each rank its own slices only."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig, PreTrainedModel, local_torch_dtype, str_to_torch_dtype

from fsdptrain.data import Progress
from fsdptrain.dist import World
from fsdptrain.errors import FsdptrainError, RecipeError
from fsdptrain.hub import checkpoint_files, recipe_errors
from fsdptrain.model import blocks_of, parameters_on_meta, skeleton
from fsdptrain.plan import Plan, seed_of
from fsdptrain.schema import Recipe


def allocate(model: Any, device: torch.device) -> None:
    """Give every sharded meta parameter real, unset memory for its own shard; buffers go to `device`."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.is_meta:
                memory = torch.empty_like(param, device=device)  # from_local would move it to the mesh's own device
                setattr(module, name, nn.Parameter(memory, requires_grad=param.requires_grad))
    model.tie_weights()


def place_buffers(model: Any, device: torch.device, dtype: str | None) -> None:
    """Move buffers to `device`; where a `dtype` is asked for, floating-point ones that may be are cast to it."""
    for owner, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            cast = dtype and buffer.is_floating_point() and _joined(owner, name) not in model.float32_names
            module._buffers[name] = buffer.to(device=device, dtype=getattr(torch, str(dtype)) if cast else buffer.dtype)


def draw_weights(model: Any, mirror: Any, recipe: Recipe, progress: Progress) -> None:
    """Fill a sharded model with random weights that depend on the recipe's seed and the parameter's name alone.

    Every rank draws the same weights, a block at a time, and keeps its slices. So all world sizes start from the same
    weights, and no rank ever holds the model. `mirror` is an unsharded skeleton.
    """
    targets = dict(model.named_parameters())
    groups = init_groups(mirror)
    for done, weights in enumerate(initial_weights(mirror, groups, recipe), 1):
        for name, whole in weights.items():
            target = targets[name]
            sliced = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
            target.detach().to_local().copy_(sliced.to_local())
        progress("initialise", done, len(groups))


@dataclass(frozen=True)
class InitGroup:
    """Modules that are initialised in one go, children before parents: (name, module, `_init_weights` of its model)."""

    name: str
    modules: list[tuple[str, nn.Module, Callable[[nn.Module], None]]]


def init_groups(mirror: Any) -> list[InitGroup]:
    """Split a skeleton into blocks, children of other lists of modules, and what is around them.

    A module's own rules may reach into its children, so that blocks stay in one piece. What contains blocks is a group
    of its own, without its children: else it would be the whole model.
    """
    blocks = {id(module) for _, module in blocks_of(mirror)}
    groups: dict[str, InitGroup] = {}
    visited: set[int] = set()

    def stays_whole(module: nn.Module, parent: nn.Module | None) -> bool:
        inner = list(module.modules())
        if id(module) in blocks:
            return True
        if any(id(m) in blocks for m in inner):
            return False
        return isinstance(parent, nn.ModuleList) or not any(isinstance(m, nn.ModuleList) for m in inner)

    def visit(name: str, module: nn.Module, parent: nn.Module | None, rules: Any, group: str | None) -> None:
        if id(module) in visited:  # transformers initialises a module once, wherever else it is used
            return
        visited.add(id(module))
        if isinstance(module, PreTrainedModel):  # a model inside a model has rules of its own
            rules = module._init_weights
        if group is None and stays_whole(module, parent):
            group = name
        for key, child in module.named_children():
            visit(_joined(name, key), child, module, rules, group)
        home = groups.setdefault(name if group is None else group, InitGroup(name if group is None else group, []))
        home.modules.append((name, module, rules))

    visit("", mirror, None, mirror._init_weights, None)
    return [group for group in groups.values() if any(_own_parameters(module) for _, module, _ in group.modules)]


def initial_weights(mirror: Any, groups: list[InitGroup], recipe: Recipe) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights of each group by name, whole and on the CPU, as `AutoModelForCausalLM.from_config` draws them.

    The memory is NaN before `_init_weights` runs. What is still NaN afterwards `_init_weights` leaves to constructors:
    it gets the value of its module's constructor, and `_init_weights` runs again over that. A tied parameter is drawn
    where its source is, because transformers ties after the initialisation. Raises RecipeError for a parameter that
    nothing initialises.
    """
    names = {id(param): name for name, param in mirror.named_parameters()}
    constructors = Constructors(mirror, recipe)
    for group in groups:
        places = [
            (name, module, key, param)
            for name, module, _ in group.modules
            for key, param in _own_parameters(module).items()
            if _joined(name, key) not in mirror.all_tied_weights_keys
        ]
        constructed: dict[int, torch.Tensor] = {}
        for _ in range(2):
            real = {id(p): _filled(p, constructed.get(id(p))) for *_, p in places}
            for _, module, key, param in places:
                module._parameters[key] = real[id(param)]
            torch.manual_seed(seed_of(recipe.seed, group.name))
            with torch.no_grad():
                for _, module, rules in group.modules:
                    rules(module)
            for _, module, key, param in places:
                module._parameters[key] = param
            left = [place for place in places if real[id(place[-1])].isnan().any()]
            if not left or constructed:
                break
            constructed = {id(param): constructors.value(name, key) for name, _, key, param in left}
        if left:
            name, module, key, _ = left[0]
            raise RecipeError(
                f"model.init: random is not possible: transformers does not initialise {_joined(name, key)} "
                f"({type(module).__name__}); start from pretrained weights"
            )
        yield {names[i]: weight.detach() for i, weight in real.items()}


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _filled(param: nn.Parameter, value: torch.Tensor | None) -> nn.Parameter:
    """Return a real parameter like this one, flags that `_init_weights` may ask for included; NaN without a value."""
    memory = torch.full_like(param, torch.nan, device="cpu") if value is None else value.clone()
    made = nn.Parameter(memory, requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made


class Constructors:
    """What the constructors of a model's modules put into their own parameters; each is run again to find out."""

    def __init__(self, mirror: Any, recipe: Recipe) -> None:
        self._mirror, self._recipe = mirror, recipe
        self._twin: Any = None  # a skeleton whose modules know what they were constructed with

    def value(self, name: str, key: str) -> torch.Tensor:
        """Return the value of parameter `key` of the module called `name`: NaN where the constructor sets none."""
        if self._twin is None:
            with _arguments_kept({type(module) for module in self._mirror.modules()}):
                self._twin = skeleton(self._mirror.config, self._recipe.model)
        module = self._twin.get_submodule(name)
        args, kwargs = module.__dict__[ARGUMENTS]
        torch.manual_seed(seed_of(self._recipe.seed, name, "constructor"))
        dtype = getattr(torch, self._recipe.model.dtype)
        with parameters_on_meta(but=type(module)), local_torch_dtype(dtype), _unset_memory_is_nan():
            param = type(module)(*args, **kwargs)._parameters[key]
        return param.detach()


ARGUMENTS = "_constructed_with"


@contextlib.contextmanager
def _arguments_kept(classes: set[type[nn.Module]]) -> Iterator[None]:
    """Inside, instances of these classes keep (args, kwargs) of their constructor in `__dict__`."""

    def keeping(init: Any) -> Any:
        @functools.wraps(init)
        def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            self.__dict__.setdefault(ARGUMENTS, (args, kwargs))  # the outermost call comes first
            init(self, *args, **kwargs)

        return wrapped

    own = {cls: cls.__dict__.get("__init__") for cls in classes}
    try:
        for cls in classes:
            cls.__init__ = keeping(cls.__init__)  # type: ignore[method-assign]
        yield
    finally:
        for cls, init in own.items():
            if init is None:  # inherited
                del cls.__init__
            else:
                cls.__init__ = init  # type: ignore[method-assign]


@contextlib.contextmanager
def _unset_memory_is_nan() -> Iterator[None]:
    """Inside, `torch.empty` gives NaN; see torch.utils.deterministic.fill_uninitialized_memory."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def check_replicas(model: Any, world: World) -> None:
    """Raise FsdptrainError unless all copies of the model are bitwise equal; collective.

    Gradients are summed over the copies, and nothing else ever is: copies that start apart stay apart, silently.
    Compared are the wrapped sums of each shard's bits, and those of the buffers, of which every rank has all.
    """
    kept = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sums = torch.stack([_bit_sum(tensor) for tensor in kept.values()]).double()
    ranks = torch.from_numpy(world.gather(sums))
    grid = world.mesh.mesh if world.mesh.ndim == 2 else world.mesh.mesh[None]
    for number, (name, tensor) in enumerate(kept.items()):
        copies = grid if isinstance(tensor, DTensor) else grid.reshape(-1, 1)
        found = ranks[:, number][copies]
        if (found != found[0]).any():
            other, shard = map(int, (found != found[0]).nonzero()[0])
            raise FsdptrainError(
                f"internal error: before the first step {name} is not the same on ranks {int(copies[0, shard])} and "
                f"{int(copies[other, shard])}, which hold copies of it (please report it)"
            )


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a local tensor's bit patterns modulo 2⁵³, which a float64 holds exactly."""
    local = tensor.detach()
    local = (local.to_local() if isinstance(local, DTensor) else local).contiguous()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    return local.view(bits).sum(dtype=torch.int64).cpu() % 2**53


def read_weights(model: Any, bare: Any, plan: Plan, device: torch.device, progress: Progress) -> None:
    """Fill a sharded meta model from the safetensors of `model.id`: this rank reads its own slices and no more.

    `bare` is an unsharded skeleton. Raises RecipeError when the files and the architecture do not belong together.
    """
    with contextlib.ExitStack() as stack:
        slices: dict[str, Any] = {}
        for file in checkpoint_files(plan):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        _fill(model, bare, _counted(slices, progress), plan, device)


def refuse_other_weights(bare: Any, plan: Plan, files: list[str]) -> None:
    """Raise RecipeError as `read_weights` would, having read nothing but the files' headers.

    `bare` is a skeleton and stays as it is.
    """
    slices: dict[str, Any] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                piece = opened.get_slice(name)
                slices[name] = _Header(piece.get_shape(), piece.get_dtype())
    _fill(copy.deepcopy(bare), bare, slices, plan, torch.device("meta"))


def _fill(model: Any, bare: Any, slices: dict[str, Any], plan: Plan, device: torch.device) -> None:
    """Let transformers fill `model` from a checkpoint's tensors, which may be slices of a file or headers only.

    transformers maps the files' names and layouts to the model's (fused experts and the like), by class names, which
    FSDP changes: so the mapping is taken from the unsharded skeleton `bare`.
    """
    settings = LoadStateDictConfig(
        device_map={"": device},
        dtype=getattr(torch, plan.recipe.model.dtype),
        dtype_plan=bare._get_dtype_plan(getattr(torch, plan.recipe.model.dtype)),
        weight_mapping=get_model_conversion_mapping(bare),  # type: ignore[arg-type]
    )
    with recipe_errors("model.id: cannot read the weights"), _wrapped_where_they_are():
        info, _ = convert_and_load_state_dict_in_model(model, slices, settings)
    model.tie_weights()
    names: dict[int, list[str]] = {}  # a tied parameter has several, and is there when one of them is
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    missing = sorted(same[0] for same in names.values() if info.missing_keys.issuperset(same))
    unexpected = sorted(set(info.unexpected_keys) - set(getattr(model, "all_tied_weights_keys", None) or ()))
    reshaped = sorted(f"{name} {list(found)} for {list(wanted)}" for name, found, wanted in info.mismatched_keys)
    faults = {"of another shape": reshaped, "missing": missing, "unknown": unexpected}
    for what, found in faults.items():
        if found:
            shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            raise RecipeError(f"model.id: {plan.recipe.model.id} does not fit the architecture: {what}: {shown}")
    if info.conversion_errors or info.error_msgs:
        raise RecipeError(f"model.id: cannot convert the weights: {info.conversion_errors or info.error_msgs}")


class _Header:
    """A tensor of a file of which only shape and dtype are known: it reads as a tensor on the meta device."""

    def __init__(self, shape: list[int], dtype: str) -> None:
        self._shape, self._dtype = shape, dtype

    def get_shape(self) -> list[int]:
        """As of a slice of a safetensors file."""
        return self._shape

    def get_dtype(self) -> str:
        """As of a slice of a safetensors file: `BF16`."""
        return self._dtype

    def __getitem__(self, key: Any) -> torch.Tensor:
        return torch.empty(self._shape, dtype=str_to_torch_dtype[self._dtype], device="meta")[key]


@contextlib.contextmanager
def _wrapped_where_they_are() -> Iterator[None]:
    """transformers makes DTensors by `from_local`, which moves them to the mesh's device: offloaded ones stay here."""

    def wrapped(local: torch.Tensor, like: DTensor) -> DTensor:
        return DTensor(local.contiguous(), like._spec, requires_grad=False)

    before = core_model_loading._dtensor_from_local_like
    core_model_loading._dtensor_from_local_like = wrapped  # type: ignore[assignment]
    try:
        yield
    finally:
        core_model_loading._dtensor_from_local_like = before


class _Counted:
    """A tensor of a file that says when it is read."""

    def __init__(self, rows: Any, read: Callable[[], None]) -> None:
        self._rows, self._read = rows, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def __getitem__(self, key: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._rows[key]
        self._read()
        return tensor


def _counted(slices: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The same slices, with progress told as they are read (by transformers, from several threads)."""
    done = itertools.count(1)

    def read() -> None:
        progress("load", min(next(done), len(slices)), len(slices))

    return {name: _Counted(rows, read) for name, rows in slices.items()}
