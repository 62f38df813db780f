"""The numerical contract on a GPU: NCCL, fused kernels, CPU offload. Skipped on machines without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TINY, environment, events, fsdptrain, write_recipe

from fsdptrain.config.optimizers import OptimizerKind
from fsdptrain.data.corpus import document_bounds
from fsdptrain.model import varlen
from fsdptrain.model.attention import Heads, check_heads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def losses(tmp: Path, name: str, *overrides: str, **changes: Any) -> list[float]:
    """Return the losses of a short run on one GPU, or on the CPU if that is its name."""
    recipe = write_recipe(tmp, output_dir=str(tmp / name), launch={"nproc_per_node": 1}, **changes)
    env: dict[str, Any] = {"CUDA_VISIBLE_DEVICES": ""} if name == "cpu" else {}
    done = fsdptrain("run", recipe, *overrides, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = events(tmp / name, "step")
    if name != "cpu":
        assert events(tmp / name, "start")[0]["device"] == torch.cuda.get_device_name()
        assert all(step["reserved_memory_bytes"] >= 2**21 and step["alloc_retries"] == 0 for step in steps)
    return [step["loss"] for step in steps]


OPTIONS = {
    "plain": [],
    "offload": ["fsdp.cpu_offload=true"],
    "held": ["fsdp.cpu_offload=true", "fsdp.accumulation=hold_shards", "train.micro_batch_size=1"],
    "selective": ["fsdp.activation_checkpointing=selective"],
}


def test_a_gpu_gives_the_same_curve_as_the_cpu(tmp_path: Path) -> None:
    expected = losses(tmp_path, "cpu")
    for name, words in OPTIONS.items():
        assert losses(tmp_path, name, *words) == pytest.approx(expected, rel=1e-5), name


@pytest.mark.parametrize("kind", OptimizerKind)
def test_every_optimizer_learns_on_a_gpu_as_on_the_cpu(tmp_path: Path, kind: OptimizerKind) -> None:
    """With rows of 256 and 300 values: some are whole blocks of 8-bit values. Muon's products are in bfloat16."""
    shape = {**TINY, "hidden_size": 256, "intermediate_size": 300}
    changes = {"model__config": {"model_type": "llama", **shape}, "optim": {"name": kind.value, "lr": 1e-3}}
    expected = losses(tmp_path, "cpu", train__steps=6, **changes)
    for name in ("plain", "offload"):
        found = losses(tmp_path, name, *OPTIONS[name], train__steps=6, **changes)
        assert found == pytest.approx(expected, rel=1e-2 if kind == "muon" else 1e-3), name


RECORD = """
import json, sys, torch, torch.distributed as dist
from fsdptrain.parallel.patches import ISSUED, named
from fsdptrain.parallel.patches import NamedComm
from fsdptrain.parallel.patches import recorded_collectives
device, backend = torch.device(sys.argv[2]), sys.argv[3]
store = dist.FileStore(sys.argv[1], 1)
bound = device if device.type == "cuda" else None
dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=bound)
def gather(output, input, group):
    dist.all_gather_into_tensor(output, input, group=group)
dist.all_reduce(torch.ones(8, device=device))  # of no unit
comm = NamedComm(gather, "all-gather", "model.layers.0")
comm(torch.empty(8, device=device), torch.ones(8, device=device), dist.group.WORLD)
if device.type == "cuda":
    torch.cuda.synchronize()
print(json.dumps(named(recorded_collectives()[backend]["entries"], ISSUED)))
"""


def test_the_flight_recorder_of_nccl_has_the_fields_that_a_hang_is_explained_with(tmp_path: Path) -> None:
    words = [sys.executable, "-c", RECORD, str(tmp_path / "store"), "cuda:0", "nccl"]
    env = environment(TORCH_FR_BUFFER_SIZE="2000", TORCH_NCCL_TRACE_BUFFER_SIZE="2000")
    shown = subprocess.run(words, capture_output=True, text=True, env=env, check=True).stdout
    first, second = json.loads(shown.splitlines()[-1])
    assert [first["collective"], second["collective"]] == ["all-reduce", "all-gather of model.layers.0"]
    assert second["collective_seq_id"] == 2 and second["state"] in ("scheduled", "started", "completed")
    assert {"retired", "is_p2p", "time_created_ns", "process_group"} <= second.keys()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 64), (8, 2, 128), (4, 1, 256)])
def test_the_varlen_kernel_computes_what_the_reference_on_a_cpu_does(
    heads: int, groups: int, size: int, window: int | None
) -> None:
    lengths = [[300, 1, 211], [512]]
    documents, longest = document_bounds(lengths)
    *qkv, grad = (torch.randn(2, 512, count, size).bfloat16() for count in (heads, groups, groups, heads))
    made = {}
    for device in ("cpu", "cuda"):
        leaves = [x.detach().to(device).transpose(1, 2).requires_grad_() for x in qkv]
        passed = {"documents": documents.to(device), "longest_document": longest, "sliding_window": window}
        out, _ = varlen.attend_within_documents(torch.nn.Module(), *leaves, None, **passed)
        made[device] = [out.detach(), *torch.autograd.grad(out, leaves, grad.to(device))]
    for found, expected in zip(made["cuda"], made["cpu"], strict=True):
        error = (found.cpu().float() - expected.float()).norm() / expected.float().norm()
        print(f"{heads}/{groups} heads of {size}, window {window}: {error:.1e}")
        assert error < 1e-2


@pytest.mark.parametrize("heads", [(8, 2, 128, 128, True), (4, 4, 192, 128, False), (4, 2, 256, 256, False)])
def test_the_trial_of_attention_accepts_what_torch_has_built_in(heads: tuple[Any, ...]) -> None:
    check_heads(Heads(*heads), torch.device("cuda"))
