"""The private functions of FSDP2, DTensor and the rendezvous in torch that this package relies on.

`RELIES_ON` names every original, and digests of its source with the versions in which it was read. A test fails when an
original has changed within a version, and warns when a version has another source: read it, adapt this package, add it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import deque
from collections.abc import Iterable
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from fsdptrain.model.expert_parallel import all_to_all_uneven
from fsdptrain.model.tensor_parallel import all_tokens, own_sums
from fsdptrain.model.varlen import all_to_all
from fsdptrain.parallel.messages import await_message

FSDP = "torch.distributed.fsdp._fully_shard"

RELIES_ON = {
    # By `_groups_of_units`: `_fsdp_param_groups`, before torch 2.13 `_fsdp_param_group`.
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": {"f2c8b4bf8e84": "2.11.0 2.13.0 2.15.0"},
    f"{FSDP}._fsdp_state.FSDPState.__init__": {"3dfb179de329": "2.11.0", "a55009d8f690": "2.13.0 2.15.0"},
    # By `keep_float32` (the constructor; since torch 2.15 each parameter has the `mp_policy`) and `NamedComm`.
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.__init__": {
        "323868f31033": "2.11.0",
        "5904f00326c3": "2.13.0",
        "280fdb4fdf51": "2.15.0",
    },
    # Calls the extensions that `gather_itself` gives a shard (the `_local_tensor` of a DTensor).
    f"{FSDP}._fsdp_param.FSDPParam.init_unsharded_param": {
        "d597bfb80142": "2.11.0",
        "8b4fc84a6685": "2.13.0",
        "db44419126ea": "2.15.0",
    },
    "torch._C._distributed_c10d._dump_fr_trace_json": {"eaafe7d69bd1": "2.11.0 2.13.0", "f675f8e60e0a": "2.15.0"},
    "torch.distributed.ProcessGroup._get_sequence_number_for_group": {"96e48b9e7c4e": "2.11.0 2.13.0 2.15.0"},
    # By `recompute` (which also reads `_version` of tensors, in C++), and by `forecast.recorder`.
    "torch.utils._python_dispatch.TorchDispatchMode.__init__": {"e4e86ae0e079": "2.11.0 2.13.0 2.15.0"},
}


def takes_two_dtypes() -> bool:
    """Return whether FSDP2 takes several dtypes in a unit, and gathers integers as they are: since torch 2.13."""
    return TorchVersion(torch.__version__) >= "2.13"


def _groups_of_units(model: nn.Module) -> dict[str, list[Any]]:
    """Return the groups of parameters of each unit of a sharded model, by the names of the unit's modules."""
    names: dict[Any, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            names.setdefault(module._get_fsdp_state(), []).append(name or OUTERMOST)
    return {", ".join(modules): _groups(state) for state, modules in names.items()}


def _groups(state: Any) -> list[Any]:
    """Return the list itself, to which groups may be added, if this version of torch has one."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: list[Any] = state._fsdp_param_groups
        return groups
    return [group for group in [state._fsdp_param_group] if group]


def keep_float32(model: nn.Module, wide: set[int]) -> None:
    """Compute with the parameters of a sharded model whose ids are `wide` in float32.

    FSDP2 takes one dtype for a group, and `fully_shard` makes one group for each unit. But a unit may have several:
    these parameters get a group of their own.
    """
    for groups in _groups_of_units(model).values():
        for group in list(groups):
            apart = [param for param in group.fsdp_params if id(param.sharded_param) in wide]
            if not apart:
                continue
            policy = dataclasses.replace(apart[0].mp_policy, param_dtype=torch.float32)
            for param in apart:
                param.mp_policy = policy  # read since torch 2.15
            if len(apart) == len(group.fsdp_params):
                group.mp_policy = policy  # read before
                continue
            other: Any = FSDPParamGroup(
                [], group.modules, group.mesh_info, group.post_forward_mesh_info, group.device, None, policy,
                group.offload_policy,
            )  # fmt: skip
            other.gradient_divide_factor = group.gradient_divide_factor
            other.force_sum_reduction_for_comms = group.force_sum_reduction_for_comms
            other._reduce_scatter_comm = group._reduce_scatter_comm
            other.fsdp_params = apart
            group.fsdp_params = [param for param in group.fsdp_params if param not in apart]
            groups.append(other)


def gather_itself(param: DTensor) -> None:
    """Let a parameter of a sharded model, of which this rank has all rows, be its own gathered parameter.

    By FSDP2's extensions a shard names what is gathered, here nothing, and which tensor the parameter becomes.
    """
    shard: Any = param._local_tensor

    def gather_nothing(mesh: Any) -> Any:
        return (shard.new_empty(0),), shard

    def become_the_shard(gathered: Any, shard: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        return (shard, ()) if out is None else None  # nothing is freed with it; an `out` was returned before

    if shard.storage_offset() == 0:  # FSDP2 takes the parameter from the beginning of the tensor's memory
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = gather_nothing, become_the_shard


OUTERMOST = "the outermost unit"


def unit_name(module: FSDPModule) -> str:
    """Return the name of the unit that a module belongs to; see `name_collectives`."""
    return next((_unit_of(group) for group in _groups(module._get_fsdp_state())), OUTERMOST)


def _unit_of(group: Any) -> str:
    return getattr(group._all_gather_comm, "unit", OUTERMOST)


def collective_of(frame: FrameType) -> str | None:
    """Return the collective in a frame of FSDP2, and of which unit, or of ranks that share rows; None for others."""
    if exchange := EXCHANGES.get(frame.f_code):
        return exchange
    if frame.f_code is await_message.__code__:
        return f"the pipeline, for {frame.f_locals['what']}"
    group = frame.f_locals.get("self")
    if not isinstance(group, FSDPParamGroup):
        return None
    collective = "reduce-scatter" if "post_backward" in frame.f_code.co_name else "all-gather"
    return f"{collective} of {_unit_of(group)}"


CollectiveKind = Literal["all-gather", "reduction"]
KINDS: dict[CollectiveKind, tuple[str, ...]] = {
    "all-gather": ("all-gather",),
    "reduction": ("reduce-scatter", "all-to-all", "all-reduce"),
}
# Descriptions of groups in the flight recorder: `World.side`, those of ranks that exchange tokens, FSDP2's for sums.
SIDE, CONTEXT, TENSOR, EXPERTS = "side", "parallel.context", "parallel.tensor", "parallel.experts"
SHARERS = "ranks of a row"
STAGE = "ranks of a stage"
REDUCTIONS = "fsdp_reduce_scatter"
EXCHANGES = {  # code of what exchanges tokens in a layer → its name in reports
    all_to_all.__code__: f"all-to-all of {CONTEXT}",
    all_tokens.__code__: f"all-gather of {TENSOR}",
    own_sums.__code__: f"reduce-scatter of {TENSOR}",
    all_to_all_uneven.__code__: f"all-to-all of {EXPERTS}",
}


class Issued(NamedTuple):
    """A collective that FSDP2 issues: the name of its group, its number there, its kind, and its unit."""

    group: str
    number: int
    kind: CollectiveKind
    unit: str


ISSUED: deque[Issued] = deque(maxlen=2000)  # of this process; as many as the flight recorder keeps


class NamedComm:
    """A communication of FSDP2 that notes each collective with its unit in `ISSUED`, before it is issued.

    `copies` is the group in which copies of the model are all-reduced, without a communication like this one: its next
    number is noted when the buffers of a reduction are allocated.
    """

    def __init__(self, comm: Any, kind: CollectiveKind, unit: str, copies: dist.ProcessGroup | None = None) -> None:
        self._comm, self._kind, self.unit, self._copies = comm, kind, unit, copies

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a buffer."""
        if self._copies is not None:
            self._note(self._copies)
        buffer: torch.Tensor = self._comm.allocate(size, dtype=dtype, device=device)
        return buffer

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, *args: Any, **options: Any
    ) -> Any:
        """Issue the collective."""
        self._note(group)
        return self._comm(output_tensor, input_tensor, group, *args, **options)

    def _note(self, group: Any) -> None:
        """Note that the next collective of a group, on its default backend (NCCL if it has it), is for this unit."""
        with contextlib.suppress(RuntimeError):  # a fake group does not number its collectives
            number = group._get_sequence_number_for_group() + 1
            issued = Issued(group.group_name, number, self._kind, self.unit)
            if not ISSUED or ISSUED[-1] != issued:
                ISSUED.append(issued)


def name_collectives(model: nn.Module, copies: dist.ProcessGroup | None) -> None:
    """Make every unit of a sharded model note its collectives; `copies` is as in `NamedComm`."""
    for unit, groups in _groups_of_units(model).items():
        for group in groups:
            group._all_gather_comm = NamedComm(group._all_gather_comm, "all-gather", unit)
            group._reduce_scatter_comm = NamedComm(group._reduce_scatter_comm, "reduction", unit, copies)


def named(entries: Iterable[dict[str, Any]], issued: Iterable[Issued]) -> list[dict[str, Any]]:
    """Return the entries of a flight recorder with `collective` and `side`.

    `collective` is `all-gather of model.layers.7`, or only the kind where FSDP2 has not issued it. `side` says whether
    the group is the one beside the training loop.
    """
    units = {(each.group, each.number): each for each in issued}
    found = []
    for entry in entries:
        group, description = entry["process_group"]
        kind = entry["profiling_name"].rpartition(":")[2].strip("_").removesuffix("_base").replace("_", "-")
        note = units.get((group, entry["collective_seq_id"]))
        if note is not None and kind in KINDS[note.kind]:
            shown = "reduce-scatter" if kind == "all-to-all" else kind  # see `shard._GlooReduceScatter`
            kind = f"{shown} of {note.unit}"
        elif description in (CONTEXT, TENSOR, EXPERTS, SHARERS):
            kind = f"{kind} of {description}"
        found.append({**entry, "collective": kind, "side": description == SIDE})
    return found


def recorded_collectives() -> dict[str, dict[str, Any]]:
    """Return backend → what torch's flight recorder has of this rank's collectives; of NCCL in builds with CUDA."""
    dumps = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    found = {backend: getattr(_distributed_c10d, name, None) for backend, name in dumps.items()}
    return {backend: json.loads(dump()) for backend, dump in found.items() if dump}
