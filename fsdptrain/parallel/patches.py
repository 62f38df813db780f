"""The private functions of FSDP2, DTensor and the rendezvous in torch that this package relies on.

`RELIES_ON` names every original, the versions in which its source was read, and a digest of that source. A test fails
when an original has changed or its version was not read: read the new source, adapt this package, add the digest.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdptrain.parallel.issued import ISSUED, Issued

FSDP = "torch.distributed.fsdp._fully_shard"


RELIES_ON = {
    # By `keep_float32` and `takes_two_dtypes`: groups, their constructor, and when they read `mp_policy`.
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": {"2.13.0": "f2c8b4bf8e84"},
    f"{FSDP}._fsdp_state.FSDPState.__init__": {"2.13.0": "a55009d8f690"},  # `_fsdp_param_groups`
    f"{FSDP}._fsdp_state.FSDPState._lazy_init": {"2.13.0": "7e3dd80ccd33"},
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.__init__": {"2.13.0": "5904f00326c3"},
    f"{FSDP}._fsdp_param_group.FSDPParamGroup._init_mp_dtypes": {"2.13.0": "f3b2b91afa64"},
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.lazy_init": {"2.13.0": "3af1e3d2da0b"},
    f"{FSDP}._fsdp_param.FSDPParam.__init__": {"2.13.0": "ccfc41ad32ca"},  # `_module_info`
    f"{FSDP}._fsdp_param.ParamModuleInfo": {"2.13.0": "9cb02c67e2aa"},
    # By `keeps_integers`.
    f"{FSDP}._fsdp_param.FSDPParam.init_dtype_attrs": {"2.13.0": "e2b28eb455dd"},
    # By `shard.GlooReduceScatter`, which has these methods.
    f"{FSDP}._fsdp_api.Comm.allocate": {"2.13.0": "a06ddc12c6f3"},
    f"{FSDP}._fsdp_api.ReduceScatter.__call__": {"2.13.0": "8b58259a4654"},
    # By `shard.set_prefetch`: a list of units to prefetch switches FSDP's own choice off.
    f"{FSDP}._fsdp_state.FSDPState._pre_backward": {"2.13.0": "e781b8ad56b7"},
    # By `NamedComm`, which wraps the communications that these set, and has their methods.
    "torch.distributed.fsdp.FSDPModule.set_custom_all_gather": {"2.13.0": "4d7e9bb15d9c"},
    "torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter": {"2.13.0": "1a7a0266be14"},
    f"{FSDP}._fsdp_collectives.foreach_all_gather": {"2.13.0": "1aa050738aa7"},
    f"{FSDP}._fsdp_collectives.foreach_reduce": {"2.13.0": "cc2a17ca7325"},  # it allocates twice, then all-reduces
    f"{FSDP}._fsdp_common.DDPMeshInfo": {"2.13.0": "442209a5768a"},
    "torch.distributed.ProcessGroup._get_backend": {"2.13.0": "725c91cb962d"},
    "torch._C._distributed_c10d.Backend._get_sequence_number_for_group": {"2.13.0": "af2ec6b0fb02"},
    # By `unit_name`: `_module_fqn`.
    f"{FSDP}._fsdp_state.FSDPState._init_fqns": {"2.13.0": "a8cb77d29082"},
    # By `adopt_parameters`: called again in the first forward, it changes nothing.
    f"{FSDP}._fsdp_param.FSDPParam.reset_sharded_param": {"2.13.0": "f911cdb84d02"},
    # By `first_row`.
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": {"2.13.0": "bd20cb9d5463"},
    # By `rendezvous`: what distinguishes nodes. `DynamicRendezvousHandler` takes it from its `_node_desc_generator`.
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous._NodeDesc": {"2.13.0": "286536315849"},
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous._NodeDescGenerator": {"2.13.0": "ba33b372891b"},
}


def takes_two_dtypes() -> bool:
    """Return whether a unit can have several groups of parameters, each with its own dtype: torch 2.13 and newer."""
    return hasattr(FSDPState(), "_fsdp_param_groups")


def keeps_integers() -> bool:
    """Return whether FSDP2 gathers integers as they are under a policy of mixed precision, by a trial."""
    param = SimpleNamespace(sharded_param=torch.empty(0, dtype=torch.uint8))
    FSDPParam.init_dtype_attrs(param, MixedPrecisionPolicy(param_dtype=torch.bfloat16))  # type: ignore[arg-type]
    return param.param_dtype is None


def keep_float32(model: Any, kept: set[tuple[int, str]]) -> None:
    """Compute with the parameters `kept` (id of their module, name) of a sharded model in float32.

    FSDP2 computes with a group of parameters in one dtype, and `fully_shard` makes one group for each unit. But a unit
    may have several: these parameters get a group of their own.
    """
    states = {module._get_fsdp_state(): None for module in model.modules() if isinstance(module, FSDPModule)}
    for state in states:
        for group in list(state._fsdp_param_groups):
            wide = [p for p in group.fsdp_params if (id(p._module_info.module), p._module_info.param_name) in kept]
            if not wide:
                continue
            policy = dataclasses.replace(group.mp_policy, param_dtype=torch.float32)
            if len(wide) == len(group.fsdp_params):
                group.mp_policy = policy
                continue
            other = FSDPParamGroup(
                [], group.modules, group.mesh_info, group.post_forward_mesh_info, group.device, None, policy,
                group.offload_policy,
            )  # fmt: skip
            other.gradient_divide_factor = group.gradient_divide_factor
            other.force_sum_reduction_for_comms = group.force_sum_reduction_for_comms
            other._reduce_scatter_comm = group._reduce_scatter_comm
            other.fsdp_params = wide
            group.fsdp_params = [param for param in group.fsdp_params if param not in wide]
            state._fsdp_param_groups.append(other)


def unit_name(module: FSDPModule) -> str:
    """Return the name of the unit that a module belongs to, as FSDP2 knows it once the model has run."""
    state = module._get_fsdp_state()
    groups: Any = state._fsdp_param_groups if takes_two_dtypes() else filter(None, [state._fsdp_param_group])
    return next((group._module_fqn for group in groups if group._module_fqn), "the outermost unit")


class NamedComm:
    """A communication of FSDP2 that notes each collective with its unit in `ISSUED`, before it is issued.

    `copies` is the group in which copies of the model are all-reduced, which FSDP2 does without a communication like
    this one: the next number of that group is noted when the buffers of a reduction are allocated.
    """

    def __init__(
        self, comm: Any, kind: Literal["all-gather", "reduction"], unit: str, copies: dist.ProcessGroup | None = None
    ) -> None:
        self._comm, self._kind, self._unit, self._copies = comm, kind, unit, copies

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a buffer."""
        if self._copies is not None:
            self._note(self._copies, device)
        buffer: torch.Tensor = self._comm.allocate(size, dtype=dtype, device=device)
        return buffer

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, *args: Any, **options: Any
    ) -> Any:
        """Issue the collective."""
        self._note(group, output_tensor.device)
        return self._comm(output_tensor, input_tensor, group, *args, **options)

    def _note(self, group: Any, device: torch.device) -> None:
        """Note that the next collective of a group is for this unit."""
        with contextlib.suppress(RuntimeError):  # a fake group does not number its collectives
            number = group._get_backend(device)._get_sequence_number_for_group() + 1
            issued = Issued(group.group_name, number, self._kind, self._unit)
            if not ISSUED or ISSUED[-1] != issued:
                ISSUED.append(issued)


def name_collectives(model: Any) -> None:
    """Make every unit of a sharded model note its collectives (see `issued`)."""
    names: dict[FSDPState, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            names.setdefault(module._get_fsdp_state(), []).append(name or "the outermost unit")
    for state, modules in names.items():
        groups: Any = state._fsdp_param_groups if takes_two_dtypes() else filter(None, [state._fsdp_param_group])
        unit = ", ".join(modules)
        for group in groups:
            copies = getattr(group.mesh_info, "replicate_process_group", None)
            group._all_gather_comm = NamedComm(group._all_gather_comm, "all-gather", unit)
            group._reduce_scatter_comm = NamedComm(group._reduce_scatter_comm, "reduction", unit, copies)


def allow_graphs(count: int) -> None:
    """Let torch.compile make so many graphs of one function: above its limit, 8, a function runs uncompiled."""
    config = torch._dynamo.config  # a setting, not a function: nothing to read
    config.recompile_limit = max(config.recompile_limit, count)


def leave_open(arguments: Sequence[str]) -> None:
    """Let torch.compile keep numbers and shapes of these keyword arguments as symbols; all others are static."""
    config = torch.compiler.config  # a setting: patterns of dynamo's names, as `L['kwargs']['documents']`
    patterns = [pattern for pattern in config.dynamic_sources.split(",") if pattern]
    patterns += [f".*'{name}'.*" for name in arguments]
    config.dynamic_sources = ",".join(dict.fromkeys(patterns))


def adopt_parameters(model: nn.Module) -> None:
    """Make FSDP2 take the parameters that were set since it sharded the model; does nothing to other models.

    FSDP2 does so in the first forward, and may then replace a rank's memory by a padded or a pinned copy. That would be
    too late for an optimizer that has the memory already.
    """
    states = {module._get_fsdp_state(): None for module in model.modules() if isinstance(module, FSDPModule)}
    for state in states:
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in filter(None, groups):
            for param in group.fsdp_params:
                param.reset_sharded_param()


def first_row(tensor: DTensor) -> int:
    """Return the number, in the whole tensor, of the first row of this rank's shard; 0 for a scalar.

    `torch.distributed.checkpoint` computes it with the same private function.
    """
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offsets[0] if offsets else 0
