"""Read weights from safetensors into a sharded skeleton; each rank reads its own slices only."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig, LoadStateDictInfo, str_to_torch_dtype

from fsdptrain.data.hub import recipe_errors, safetensors_files, same_values
from fsdptrain.errors import RecipeError, listed
from fsdptrain.model.adapters import without_adapters
from fsdptrain.model.config import TIES, announce_no_mtp, announced_mtp, config_parts
from fsdptrain.model.nf4 import NF4Linear, RowQuantizer
from fsdptrain.model.parts import Part
from fsdptrain.model.patches import dtensors_stay_on_their_device
from fsdptrain.model.units import base_name, full_name, names_by_parameter, saved_state, token_parameters
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.events import Progress

MEAN_ROWS = 2**14  # of an embedding that are in memory while their mean is computed

# The ends of names of tensors that older versions of transformers saved and that are computed today; a bias of
# attention is such a mask where transformers ignores it.
BUFFERS = re.compile(r"(inv_freq|masked_bias|causal_mask|position_ids|\.version)$")
MASKS = re.compile(r"(attn|attention)\.bias$")


def allocate(model: Any, device: torch.device) -> None:
    """Replace every sharded meta parameter by one with unset memory on `device` for this rank's shard."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.is_meta:
                memory = torch.empty_like(param, device=device)  # `from_local` would move it to the device of the mesh
                setattr(module, name, nn.Parameter(memory, requires_grad=param.requires_grad))
    model.tie_weights()


def place_buffers(model: Any, device: torch.device, dtype: str | None) -> None:
    """Move buffers to `device`; cast floating-point ones to a given `dtype`, except those that stay in float32."""
    for owner, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            cast = dtype and buffer.is_floating_point() and full_name(owner, name) not in model.float32_names
            setattr(module, name, buffer.to(device=device, dtype=getattr(torch, str(dtype)) if cast else buffer.dtype))


def read_weights(
    model: Any,
    bare: Any,
    plan: Plan,
    device: torch.device,
    progress: Progress,
    quantizer: RowQuantizer | None = None,
    added: Sequence[int] = (),
) -> None:
    """Fill a sharded meta model from the safetensors of `model.id`; this rank reads its own slices.

    `bare` is an unsharded skeleton. `quantizer` quantises the weights of NF4Linear layers; its `finish` must follow.
    `added` are the ids of `model.add_tokens`. Raises RecipeError if the files do not fit the architecture.
    """
    with _opened(safetensors_files(plan)) as slices:
        known, done = stored_names(bare, slices).known, itertools.count(1)

        def read() -> None:  # by transformers, from several threads
            progress("load", min(next(done), len(known)), len(known))

        grown = _with_added_rows(bare, {key: each for key, each in slices.items() if key in known}, plan, added)
        parts = {base_name(name): part for name, part in model.parts.items()}
        # Of a pipeline, what is in the stages of this rank; the first one has one name of a weight that is tied.
        tied_names = itertools.chain.from_iterable(names_by_parameter(model).values())
        here = {base_name(name) for name in (*saved_state(model), *tied_names)}
        aliases = {
            name: own for same in names_by_parameter(bare).values() for name in same for own in same if own in here
        }
        own = {
            key if known[key] in here else aliases[known[key]]: each
            for key, given in grown.items()
            if known[key] in here | aliases.keys() and (each := _own(key, given, parts.get(known[key])))
        }
        counted: dict[str, Any] = {name: _Counted(rows, read) for name, rows in own.items()}
        with without_adapters(model):
            # The weights of Conv1D are transposed where the model has an NF4Linear. Files of GPT-2 have no prefix.
            transposed = [n for n, m in model.named_modules() if isinstance(m, NF4Linear) and m.transposed]
            for name, rows in counted.items():
                if any(f".{layer}.weight".endswith(f".{name}") for layer in transposed):
                    counted[name] = _Transposed(rows)
            _fill(model, bare, counted, plan, device, quantizer)
    for name in model.frozen_names:  # transformers lets a parameter that is not sharded be trained
        model.get_parameter(name).requires_grad_(False)


@contextlib.contextmanager
def _opened(files: list[str]) -> Iterator[dict[str, Any]]:
    """Give the slices of the tensors of safetensors files, by their names there, inside the context."""
    with contextlib.ExitStack() as stack:
        slices: dict[str, Any] = {}
        for file in files:
            opened = stack.enter_context(safe_open(file, framework="pt"))
            slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        yield slices


def check_weights(bare: Any, plan: Plan, files: list[str]) -> StoredNames:
    """Return what becomes of the tensors of the files; reads only their headers. `bare` is a skeleton.

    Raises RecipeError if `read_weights` would, or for tensors that neither the architecture nor the recipe knows.
    """
    with _opened(files) as opened:
        slices = {name: Header(each) for name, each in opened.items()}
    ignored = plan.recipe.model.ignore_weights
    names = stored_names(bare, slices, ignored)
    known = {key: each for key, each in slices.items() if key in names.known}
    _fill(copy.deepcopy(bare), bare, _with_added_rows(bare, known, plan), plan, torch.device("meta"))
    if names.unknown:
        raise RecipeError(
            f"model.id: {plan.recipe.model.id} does not fit the architecture: unknown: {listed(names.unknown, 3)}; to "
            "train and export the model without these tensors, list their names or patterns in model.ignore_weights"
        )
    if idle := [each for each in ignored if not any(fnmatchcase(name, each) for name in names.ignored)]:
        raise RecipeError(
            f"model.ignore_weights: {idle[0]!r} matches no tensor that {type(bare).__name__} does not know: remove it"
        )
    ends = token_parameters(bare)
    before = [slices[key].get_shape()[0] for key, name in names.known.items() if name in ends]
    grown = {rows for rows in before if rows not in {param.shape[0] for param in ends.values()}}
    if short := [key for key in names.carried if grown.intersection(slices[key].get_shape()[:1])]:
        raise RecipeError(
            f"model.add_tokens: {short[0]}, which is exported as it is, has no rows for them: leave its layer out with "
            "model.ignore_weights"
        )
    return names


@dataclass(frozen=True)
class StoredNames:
    """What becomes of the tensors of a model's files, by their names there.

    `known` are read. The architecture has no place for the others: `carried` ones are exported as they are, because
    servers read them, `dropped` and `ignored` (by the recipe) ones are not, and `unknown` ones are an error.
    """

    known: dict[str, str]  # name in the files → in the model
    carried: list[str]
    dropped: list[str]
    ignored: list[str]
    unknown: list[str]

    @property
    def notes(self) -> list[str]:
        """A sentence on the tensors that are carried, and one on those that are dropped."""
        found = {"are not trained and are exported as they are": self.carried, "are not read": self.dropped}
        return [
            f"model.id: {len(names)} tensors of the files that transformers has no place for {what}: {listed(names, 2)}"
            for what, names in found.items()
            if names
        ]


def stored_names(bare: Any, keys: Iterable[str], ignored: Sequence[str] = ()) -> StoredNames:
    """Return what becomes of the tensors of files; `bare` is a model or skeleton, `ignored` are names and patterns.

    What transformers ignores in files of this architecture, and the layers for multi-token prediction that the
    configuration announces, are carried, unless it announces none; old buffers are dropped.
    """
    names, state = _loaded_names(bare, [*keys]), bare.state_dict().keys() | bare.all_tied_weights_keys.keys()
    others = {key: name for key, name in names.items() if name not in state}
    # Let transformers remove what it ignores from the names that it does not know.
    info = LoadStateDictInfo(set(), {*others.values()}, set(), [], {}, set())
    bare._adjust_missing_and_unexpected_keys(info)
    announced, computed = announced_mtp(bare.config), {name for name, _ in bare.named_buffers()}
    computed |= {name.removeprefix(f"{bare.base_model_prefix}.") for name in computed}
    found = StoredNames({key: name for key, name in names.items() if name in state}, [], [], [], [])
    for key, name in others.items():
        layer, ignorable = _mtp_layer(bare, name), name not in info.unexpected_keys
        unwanted = MASKS.search(key) or (layer is not None and announced == 0)
        if any(fnmatchcase(key, pattern) for pattern in ignored):
            found.ignored.append(key)
        elif name in computed or BUFFERS.search(key) or (ignorable and unwanted):
            found.dropped.append(key)
        elif ignorable or (layer is not None and layer < (announced or 0)):
            found.carried.append(key)
        else:
            found.unknown.append(key)
    return found


def _mtp_layer(bare: Any, name: str) -> int | None:
    """Return the number, from 0, of the layer for multi-token prediction that a tensor belongs to; None if to none."""
    numbered = re.search(r"(^|\.)layers\.(\d+)\.", name)
    number = int(numbered[2]) if numbered else 0
    if re.search(r"(^|[._])mtp([._]|$)", name):
        return number
    depth = getattr(bare.config.get_text_config(), "num_hidden_layers", None)
    return number - depth if numbered and isinstance(depth, int) and number >= depth else None


def fit_config(config: Any, bare: Any, plan: Plan, files: list[str]) -> list[str]:
    """Let a configuration describe the files of `model.id` as transformers reads them. Return a note on each change.

    `bare` is its skeleton, which must be built again after a change: weights that the architecture ties, and that have
    different values in the files, are untied. Raises RecipeError where only some of them are.
    """
    notes = []
    with _opened(files) as slices:
        names = stored_names(bare, slices, plan.recipe.model.ignore_weights)
        stored = {name: slices[key] for key, name in names.known.items()}
        dtype = getattr(torch, plan.recipe.model.dtype)
        apart = [
            name
            for name, source in bare.all_tied_weights_keys.items()
            if {name, source} <= stored.keys() and not same_values(stored[name], stored[source], dtype)
        ]
    if apart:
        tensors = f"{apart[0]} and {bare.all_tied_weights_keys[apart[0]]}"
        if TIES in plan.recipe.model.config:
            raise RecipeError(
                f"model.config.{TIES}: true, but {tensors} have different values in {plan.recipe.model.id}: remove it"
            )
        if equal := [name for name in bare.all_tied_weights_keys if name not in apart]:
            raise RecipeError(
                f"model.id: {tensors} have different values in {plan.recipe.model.id}, and {type(bare).__name__} would "
                f"also untie {equal[0]}: store every tensor in its files and set {TIES}: false in its config.json"
            )
        for part in config_parts(config):
            setattr(part, TIES, False)
        notes.append(
            f"model.id: {tensors} have different values in the files, so they are trained and exported as two weights, "
            f"although config.json has {TIES}: true"
        )
    if announced_mtp(config) and all(_mtp_layer(bare, name) is None for name in names.carried):
        announce_no_mtp(config)
        notes.append(
            "model.id: config.json announces layers for multi-token prediction, which the files do not have: the "
            "export announces none"
        )
    return notes


@contextlib.contextmanager
def carried_tensors(bare: Any, plan: Plan) -> Iterator[dict[str, Any]]:
    """Give the slices of the tensors of `model.id` that are exported as they are, inside the context."""
    with _opened(safetensors_files(plan)) as slices:
        yield {name: slices[name] for name in stored_names(bare, slices, plan.recipe.model.ignore_weights).carried}


def read_groups(bare: Any, plan: Plan, groups: list[list[str]]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the state that `model.id` holds for a skeleton, group by group: whole tensors on the CPU, in its dtypes.

    `groups` are names of `saved_state(bare)`: what transformers makes from the same tensor of a file must be in one of
    them. Only one group is in memory. Raises RecipeError if the files lack a tensor.
    """
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    # A tied weight may be in the files under any of its names.
    aliases = {name: same for same in names_by_parameter(bare).values() if len(same) > 1 for name in same}
    for name, number in list(group_of.items()):
        group_of |= dict.fromkeys(aliases.get(name, ()), number)
    twin = copy.deepcopy(bare)
    own = {"recurse": False, "remove_duplicate": False}
    empty = [(module, *named) for module in twin.modules() for named in module.named_parameters(**own)]
    slices: list[dict[str, Any]] = [{} for _ in groups]
    with _opened(safetensors_files(plan)) as stored:
        for key, name in _loaded_names(twin, [*stored]).items():
            if name in group_of:
                slices[group_of[name]][key] = stored[key]
        for group, found in zip(groups, slices, strict=True):
            _load(twin, bare, _with_added_rows(bare, found, plan), plan, torch.device("cpu"))
            state = {**dict(twin.named_parameters(remove_duplicate=False)), **dict(twin.named_buffers())}
            real: dict[str, torch.Tensor] = {}
            for name in group:
                read = [state[alias].detach() for alias in aliases.get(name, [name]) if not state[alias].is_meta]
                if not read:
                    raise RecipeError(f"model.id: the files of {plan.recipe.model.id} have no {name}")
                real[name] = read[0]
            yield real
            for module, key, param in empty:
                setattr(module, key, param)


def _loaded_names(model: Any, keys: list[str]) -> dict[str, str]:
    """Return for each tensor of a file the (first) tensor of the model that transformers makes from it."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict()
    found = {}
    for key in keys:
        name, _ = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:  # as `convert_and_load_state_dict_in_model` does
            name, _ = rename_source_key(key, [], [], prefix, state)
        found[key] = name
    return found


def _fill(
    model: Any, bare: Any, slices: dict[str, Any], plan: Plan, device: torch.device, quantizer: Any = None
) -> None:
    """Fill `model` from the tensors of a checkpoint, slices or headers only. Raises RecipeError if they do not fit."""
    names = [*names_by_parameter(model).values()]
    info = _load(model, bare, slices, plan, device, quantizer)
    # What transformers found is an error here: a weight that is missing (under all of its names) or of another shape.
    shapes = sorted(f"{name} {list(found)} for {list(wanted)}" for name, found, wanted in info.mismatched_keys)
    missing = sorted(same[0] for same in names if info.missing_keys.issuperset(same))
    if shapes or missing:
        wrong = f"of another shape: {listed(shapes, 3)}" if shapes else f"missing: {listed(missing, 3)}"
        raise RecipeError(
            f"model.id: {plan.recipe.model.id} does not fit the architecture: {wrong}{_own_config_hint(plan)}"
        )
    if info.conversion_errors or info.error_msgs:
        raise RecipeError(f"model.id: cannot convert the weights: {info.conversion_errors or info.error_msgs}")
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)  # to the one that was read


def _own_config_hint(plan: Plan) -> str:
    """Return where the wrong architecture may come from: a shipped recipe has a `model.config`, for its own model."""
    return "; model.config={} takes the architecture from the model" if plan.recipe.model.config else ""


def _load(
    model: Any, bare: Any, slices: dict[str, Any], plan: Plan, device: torch.device, quantizer: Any = None
) -> Any:
    """Let transformers put the tensors of a checkpoint into `model`; return what it reports of them.

    transformers maps the names and shapes in files to the model's (fused experts, for example) by class names. FSDP
    changes class names, so the mapping is made for the unsharded skeleton `bare`.
    """
    dtype = getattr(torch, plan.recipe.model.dtype)
    settings = LoadStateDictConfig(
        device_map={"": device},
        dtype=dtype,
        dtype_plan=bare._get_dtype_plan(dtype),
        weight_mapping=get_model_conversion_mapping(bare),  # type: ignore[arg-type]
        hf_quantizer=quantizer,
    )
    with recipe_errors("model.id: cannot read the weights"), dtensors_stay_on_their_device():
        info, _ = convert_and_load_state_dict_in_model(model, slices, settings)
    return info


class _Slice:
    """A tensor of a file that is read otherwise than as it is there: it has the interface of a slice of safetensors."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)


class Header(_Slice):
    """A tensor of a file that is read as one on the meta device: only its shape and dtype are known."""

    def __getitem__(self, key: Any) -> torch.Tensor:
        return torch.empty(self.get_shape(), dtype=str_to_torch_dtype[self.get_dtype()], device="meta")[key]


class _Transposed(_Slice):
    def get_shape(self) -> list[int]:
        shape: list[int] = self._rows.get_shape()
        return shape[::-1]

    def __getitem__(self, key: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._rows[key if key is ... else key[::-1]]
        return tensor.T.contiguous()


def _with_added_rows(bare: Any, slices: dict[str, Any], plan: Plan, added: Sequence[int] = ()) -> dict[str, Any]:
    """Return the same slices, those of embedding and head with rows for `model.add_tokens`, whose ids are `added`."""
    if not plan.recipe.model.add_tokens:
        return slices
    rows = {name: param.shape[0] for name, param in token_parameters(bare).items()}
    names = _loaded_names(bare, list(slices))
    return {key: _Grown(each, rows[names[key]], added) if names[key] in rows else each for key, each in slices.items()}


class _Grown(_Slice):
    """A tensor with `total` rows: those of `added` and those that the file lacks are the mean of the others."""

    def __init__(self, rows: Any, total: int, added: Sequence[int]) -> None:
        super().__init__(rows)
        self._total = total
        self._stored: int = rows.get_shape()[0]
        self._first = min(added, default=self._stored)
        self._last = total if self._stored < total else max(added, default=total - 1) + 1  # exclusive

    def get_shape(self) -> list[int]:
        return [self._total, *self._rows.get_shape()[1:]]

    def __getitem__(self, key: Any) -> torch.Tensor:
        own, *others = (slice(None),) if key is ... else key if isinstance(key, tuple) else (key,)
        start, stop, _ = own.indices(self._total)
        held: torch.Tensor = self._rows[(slice(min(start, self._stored), min(stop, self._stored)), *others)]
        tensor = held.new_empty(stop - start, *held.shape[1:])
        tensor[: len(held)] = held
        new = slice(max(start, self._first) - start, min(stop, self._last) - start)
        if new.start < new.stop and not tensor.is_meta:
            tensor[new] = self._mean[tuple(others)].to(tensor.dtype)
        return tensor

    @functools.cached_property
    def _mean(self) -> torch.Tensor:
        """The mean of the rows before the first of `added`. One thread sums: torch's sum depends on their number."""
        total: Any = 0
        for start in range(0, self._first, MEAN_ROWS):
            rows = self._rows[start : min(start + MEAN_ROWS, self._first)]
            total = total + rows.float().numpy().sum(axis=0, dtype="float64")
        return torch.as_tensor(total / self._first)


EXPERT = re.compile(r"\.experts?\.(\d+)\.")  # the number of an expert in the name of a tensor that has it alone


def _own(key: str, rows: Any, part: Part | None) -> Any:
    """Return what a rank reads of a tensor of a file that becomes a part of a parameter; None if nothing."""
    if part is None or part.count == 1:
        return rows
    if part.dim == -len(part.shape) and len(rows.get_shape()) < len(part.shape):  # files may have each expert alone
        ((first, last),) = part.spans
        number = EXPERT.search(key)
        assert number, f"{key} does not tell which expert it is of"
        return rows if first <= int(number[1]) < last else None
    return _Own(rows, part)


class _Own(_Slice):
    """A tensor of which this rank has a part, or which is a piece of such a tensor."""

    def __init__(self, rows: Any, part: Part) -> None:
        super().__init__(rows)
        shape = rows.get_shape()
        self._axis = len(shape) + part.dim
        self._spans = part.spans_in(shape[self._axis])

    def get_shape(self) -> list[int]:
        shape: list[int] = self._rows.get_shape()
        return [sum(b - a for a, b in self._spans) if n == self._axis else size for n, size in enumerate(shape)]

    def __getitem__(self, key: Any) -> torch.Tensor:
        given = () if key is ... else key if isinstance(key, tuple) else (key,)
        keys = [*given, *[slice(None)] * (len(self.get_shape()) - len(given))]
        start, stop, _ = keys[self._axis].indices(self.get_shape()[self._axis])
        pieces, at = [], 0
        for first, last in self._spans:
            begin, end = max(start, at), min(stop, at + last - first)
            keys[self._axis] = slice(first + begin - at, first + max(begin, end) - at)
            pieces.append(self._rows[tuple(keys)])
            at += last - first
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self._axis)


class _Counted(_Slice):
    def __init__(self, rows: Any, read: Callable[[], None]) -> None:
        super().__init__(rows)
        self._read = read

    def __getitem__(self, key: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._rows[key]
        self._read()
        return tensor
