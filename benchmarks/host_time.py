"""Measure what the host does for a block: kernels, FSDP2's hooks, recomputation. Tensors are tiny, ranks are fake.

    python benchmarks/host_time.py

Prints the CPU time of forward and backward of one block of a Llama, the least of 40 steps, and its number of kernels.
The figures in `config.hardware` (`launch_s`, `hook_s`) and `forecast.timing` (`RECOMPUTATION_S`) are rounded from it.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import LlamaConfig, LlamaForCausalLM

from fsdptrain.parallel.shard import KEPT
from fsdptrain.simulate.recorder import NO_KERNEL

RANKS = 8
DEPTHS = (2, 10)


class Count(TorchDispatchMode):
    """Count the operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += not func.is_view and func not in NO_KERNEL
        return func(*args, **(kwargs or {}))


def llama(layers: int, sharded: bool, recomputed: str) -> Any:
    """Return a Llama of tiny blocks."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    contexts = functools.partial(create_selective_checkpoint_contexts, KEPT)
    options = {"none": None, "full": {}, "selective": {"context_fn": contexts}}[recomputed]
    if options is not None:
        for i, block in enumerate(model.model.layers):
            model.model.layers[i] = checkpoint_wrapper(block, **options)
    if sharded:
        mesh = init_device_mesh("cpu", (RANKS,))
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def step(model: Any) -> None:
    """Do forward and backward of one row of 8 tokens."""
    model(input_ids=torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()
    model.zero_grad()


def cost(model: Any) -> tuple[float, int]:
    """Return the least CPU seconds of a step, and its number of kernels."""
    times = []
    for _ in range(45):
        start = time.thread_time()
        step(model)
        times.append(time.thread_time() - start)
    with Count() as count:
        step(model)
    return min(times[5:]), count.kernels


def main() -> None:
    """Print a row for each combination."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=dist.HashStore())
    print("| sharded | recomputation | µs a block | kernels a block |\n| --- | --- | --- | --- |")
    for sharded in (False, True):
        for recomputed in ("none", "full", "selective"):
            (few_s, few), (many_s, many) = (cost(llama(depth, sharded, recomputed)) for depth in DEPTHS)
            blocks = DEPTHS[1] - DEPTHS[0]
            row = (sharded, recomputed, f"{(many_s - few_s) / blocks * 1e6:,.0f}", f"{(many - few) / blocks:.0f}")
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
