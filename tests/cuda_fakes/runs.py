"""Run on fake `cuda` tensors what only a GPU would run, and print which lines of the package that are for it ran.

This needs a CUDA build of torch on a machine without a GPU, and `shim.c` preloaded: see `test_cuda_fakes.py`.
FakeTensorMode then replaces the guard of the devices; the streams and events are those of the pretended accelerator.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import ranks
import torch
import torch.distributed as dist
import waits
from cuda_fakes.lines import PACKAGE, cuda_lines, traced
from simulated import SMALL, on_fake, plan_of
from strict import be_strict
from support import write_recipe
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdptrain.checkpoint.export_tensors import Exported
from fsdptrain.checkpoint.save import Checkpointer, Staging
from fsdptrain.errors import RecipeError
from fsdptrain.forecast import device as pretended
from fsdptrain.forecast.device import Backend, PretendStream, pretend_world
from fsdptrain.forecast.kernels import cuda_attention
from fsdptrain.forecast.patches import fake_tensor_patches
from fsdptrain.forecast.recorder import Recorder
from fsdptrain.inference import opened
from fsdptrain.model.patches import BOUNDS, within_documents
from fsdptrain.parallel.world import HostCopy, World, matrix_rate
from fsdptrain.plan.network import unused_port
from fsdptrain.plan.plan import Plan
from fsdptrain.plan.topology import Topology
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.terminal.screen import Screen
from fsdptrain.train import blockwise, prefetch, setup, teacher, trainer  # noqa: F401  (`blockwise` computes tables)
from fsdptrain.validation import dry_run, node_check
from fsdptrain.validation.findings import Findings
from fsdptrain.validation.model import attention_available
from fsdptrain.validation.request import Request

PAIRS = {"data__packing": "none", "data__format": "preference", "train__objective": "dpo"}
CUDA, MEMORY = torch.device("cuda", 0), 80 * 2**30
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, total_memory=MEMORY, pci_domain_id=0, pci_bus_id=0, pci_device_id=0
)


class CudaGenerator(torch.Generator):
    """A generator that says it is on the GPU: torch 2.11 keeps its state for attention that is recomputed."""

    device = CUDA

    def clone_state(self) -> CudaGenerator:
        return CudaGenerator()


class CudaBackend(Backend):
    """What `torch.cuda` answers on a machine with one GPU, besides its streams and events."""

    get_device_name = staticmethod(lambda device=None: H100.name)
    get_device_capability = staticmethod(lambda device=None: (H100.major, 0))
    get_device_properties = staticmethod(lambda device=None: H100)
    _exchange_device = staticmethod(lambda device: 0)
    _maybe_exchange_device = staticmethod(lambda device: 0)
    default_generators = (CudaGenerator(),)
    get_rng_state = staticmethod(lambda device=None: torch.zeros(16, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda state, device=None: None)
    is_bf16_supported = staticmethod(lambda including_emulation=True: True)
    mem_get_info = staticmethod(lambda device=None: (MEMORY, MEMORY))
    max_memory_allocated = staticmethod(lambda device=None: 2**30)
    is_current_stream_capturing = staticmethod(lambda: False)
    empty_cache = staticmethod(lambda: None)
    nccl = SimpleNamespace(version=lambda: (2, 28, 3))

    @staticmethod
    def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
        return {"reserved_bytes": {"all": {"current": 2**30}}, "num_alloc_retries": 0}


def pretend_cuda() -> None:
    """Give this process a pretended H100; for good."""
    torch._C._ensureCUDADeviceGuardSet()  # first: it does nothing where devices are counted
    FakeTensorMode.avoid_device_init = True  # type: ignore[assignment, method-assign]  # as where no GPU is available
    fake_tensor.init_gpu_context = lambda *_: None
    ctypes.c_byte.in_dll(ctypes.CDLL(None), "gpus").value = 127
    pretended.PRETEND, PretendStream.device_type = CUDA.type, int(torch._C._autograd.DeviceType.CUDA)
    PretendStream.current.append(PretendStream())
    backend = CudaBackend()
    for name in (name for name in dir(backend) if not name.startswith("__")):
        setattr(torch.cuda, name, getattr(backend, name))
    torch.accelerator.current_stream = lambda device=None: backend.current_stream()
    functional: Any = torch.nn.functional
    functional.scaled_dot_product_attention = cuda_attention(CUDA.type, functional.scaled_dot_product_attention)


@contextlib.contextmanager
def fake(packed: bool = True) -> Iterator[None]:
    """Make every tensor fake inside the context; numbers that are read are zeros, or 1 where one is read alone."""
    with (
        fake_tensor_patches(packed, Recorder.unrecorded),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autograd.set_multithreading_enabled(False),
        mock.patch.object(HostCopy, "_numbers", lambda copy: np.zeros(copy._copy.shape)),
        mock.patch.object(torch.Tensor, "item", lambda tensor: 1.0),
        mock.patch.object(torch.Tensor, "__int__", lambda tensor: 0),
        mock.patch.object(torch.Tensor, "__float__", lambda tensor: 0.0),
        mock.patch.object(torch.Tensor, "__bool__", lambda tensor: False),
    ):
        yield


def steps(folder: Path) -> None:
    """Make steps and an evaluation in a world of four ranks, after a step on the CPU; see `waits`."""
    on_fake(plan_of(folder, data__packing="none"))
    be_strict(CUDA.type)
    kept = {"kind": "full", "offload": True, "keep_attention": True}
    small = SMALL | {"num_hidden_layers": 2, "num_key_value_heads": 2}
    mixture = {**small, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    for changes in (
        {},
        {"fsdp__activation_checkpointing": kept, "fsdp__mixed_precision": {"param_dtype": "bfloat16"}},
        {"fsdp__cpu_offload": True, "optim__name": "lion"},
        {"fsdp__strategy": "HYBRID_SHARD", "fsdp__shard_size": 2, "train__global_batch_size": 16},
        {"data__packing": "none", "fsdp__mixed_precision": {"param_dtype": "bfloat16"}},
        {**PAIRS, "fsdp__mixed_precision": {"param_dtype": "bfloat16"}},
        {"parallel__tensor": 2, "fsdp__mixed_precision": {"param_dtype": "bfloat16"}},
        {"parallel__experts": 2, "model__config": mixture, "fsdp__mixed_precision": {"param_dtype": "bfloat16"}},
    ):
        plan = plan_of(folder, device="cuda", **{"model__config": small, **changes})
        print("steps", changes, dict(waits.waits(*waits.recorded(plan, 2, CUDA), 2)), flush=True)


class OneRank(World):
    """A world of one rank, which has no other to exchange with: fake tensors cannot carry objects."""

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


class InThisThread(Executor):
    """Runs what it is given at once: a mode for fake tensors holds in one thread."""

    def __init__(self, **_: Any) -> None: ...

    def submit(self, work: Any, *arguments: Any) -> Future[Any]:  # type: ignore[override]
        (made := Future[Any]()).set_result(work(*arguments))
        return made


def train(recipe: Path, words: list[str]) -> None:
    """Set up a trainer as a worker does, and train to the end; real until the model is built, then on fake tensors."""
    join, build = dist.init_process_group, trainer.build
    with contextlib.ExitStack() as entered:
        enter, patched = entered.enter_context, lambda *words: entered.enter_context(mock.patch.object(*words))

        def faked(plan: Plan, *others: Any) -> Any:
            enter(fake(plan.recipe.documents_share_sequences))
            return build(plan, *others)

        os.environ["MASTER_PORT"] = str(unused_port())
        patched(ranks, "find_topology", lambda *_: Topology("cuda", 1, 1))
        patched(trainer, "build", faked)
        patched(setup, "World", OneRank)
        patched(
            dist, "init_process_group", lambda _, **words: join("cpu:gloo,cuda:fake", **words | {"device_id": None})
        )
        patched(dist.ProcessGroup, "set_timeout", lambda *_: None)  # before torch 2.13 a fake group refuses it
        patched(dist, "broadcast_object_list", lambda *_, **words: None)
        patched(prefetch, "ThreadPoolExecutor", InThisThread)
        patched(setup, "draw_weights", lambda *_: None)  # it looks at what it draws
        for name in ("_record_memory_history", "_dump_snapshot"):
            patched(torch.cuda.memory, name, lambda *_, **words: None)
        patched(Checkpointer, "_commit", lambda *_: None)  # fake tensors have no bytes to write
        entered.callback(dist.destroy_process_group)
        run = ranks.build(str(recipe), [f"output_dir={recipe.parent / words[0]}", "train.compile=false", *words])
        print("trainer", run.world.device, run.train(), flush=True)


def trainers(folder: Path) -> None:
    """Train packed rows in bf16 and in float8, and in float32 longer ones that are not packed, with offload."""
    few = {"data__eval": {"fraction": 0.02}, "train__global_batch_size": 2}
    recipe = write_recipe(folder, **few, eval__every=2, launch__nproc_per_node=1)
    for words in ([], ["train.float8=rowwise"], ["train.float8=tensorwise"]):
        train(recipe, [*words, "fsdp.mixed_precision.param_dtype=bfloat16"])
    recorded = ["log.profile={steps: [1, 2]}"]
    train(recipe, ["data.packing=none", "data.seq_len=200", "fsdp.cpu_offload=true", *recorded])


def validations(folder: Path) -> None:
    """Describe the machine, its GPU and its links as `validate` and `validate --here` do."""
    plan = plan_of(folder, 1, device="cuda", model__attn_implementation="auto", fsdp__mixed_precision={})
    request, findings = Request(plan), Findings()
    dry_run.dry_run(request, findings)
    print("validate", findings.problems, dry_run.hardware_here(plan), flush=True)
    unknown = SimpleNamespace(name="a card that is in no table", total_memory=MEMORY)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda *_: unknown):
        dry_run.check_step(request, dry_run.hardware_here(plan), None, None, findings, ())
    print("validate, unknown", findings.notes, flush=True)
    attention_available("flash_attention_2")
    os.environ["MASTER_PORT"] = str(unused_port())
    with mock.patch.object(node_check, "measured_links", lambda *_: {}):
        print("validate --here", node_check.check_ranks(request).problems)
    assert setup.gpu_fault(plan.topology, 0, os.environ)
    list(Exported._dequantized(SimpleNamespace(plan=plan, _quantised_layers=dict), iter([{}])))  # type: ignore[arg-type]
    with pretend_world(plan_of(folder, 2, device="cuda"), CUDA), fake():
        print("GPU", matrix_rate(CUDA, torch.bfloat16) > 0)
        node_check.all_reduce_bandwidth(dist.group.WORLD, CUDA)  # type: ignore[arg-type]


def copies(folder: Path) -> None:
    """Pin the memory of copies as a driver does that allows it, and as one that does not."""
    with FakeTensorMode():
        tensors = {"a": torch.empty(9, device=CUDA)}
    for code, pinned in ((0, True), (2, False)):
        driver = SimpleNamespace(
            cudaHostRegister=lambda *_, code=code: code, cudaHostUnregister=lambda *_: 0,
            cudaGetErrorString=lambda error: f"error {error}",
        )  # fmt: skip
        with mock.patch.object(torch.cuda, "cudart", lambda driver=driver: driver):
            staging = Staging(tensors)
            assert staging.pinned is pinned
            staging.close()
    print("copies", tensors["a"].device, flush=True)


def recurrences(folder: Path) -> None:
    """Compute packed documents in the kernels of hybrid models, which get the documents."""
    with FakeTensorMode():
        rows, bounds = torch.empty(2, 6, 3, device=CUDA), torch.empty(5, dtype=torch.int32, device=CUDA)
        for name, (_, argument) in BOUNDS.items():
            got = dict[str, Any]()

            def kernel(x: Any, got: dict[str, Any] = got, **options: Any) -> Any:
                got.update(options)
                return x

            assert within_documents(kernel, name, bounds, rows).shape == rows.shape
            assert got[argument].device.type == CUDA.type
    print("recurrences", rows.device, flush=True)


def inferences(folder: Path) -> None:
    """Open a folder as `eval` and `chat` do; its model has no weights, and it has no tokenizer."""
    with (
        mock.patch.object(opened, "open_model", lambda *_, **__: torch.nn.Identity()),
        contextlib.suppress(RecipeError),
        opened.opened_model(RunDir(folder), None, None, False, Screen(quiet=True)),
    ):
        pass
    print("inferences", flush=True)


def teachers(folder: Path) -> None:
    """Free the memory of a teacher that had nothing left to compute."""
    world: Any = SimpleNamespace(device=CUDA)
    with (
        mock.patch.object(teacher, "_load", lambda *_: None),
        mock.patch.object(teacher, "StopPoll", lambda *_: None),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats", lambda *_: None),
    ):
        teacher._compute(mock.Mock(), mock.Mock(), world, [], 0)
    print("teachers", flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    pretend_cuda()
    wanted = [*cuda_lines()]

    def run() -> None:
        for scenario in (steps, trainers, validations, copies, recurrences, inferences, teachers):
            (inside := folder / scenario.__name__).mkdir()
            scenario(inside)

    hit = traced(run, {str(path) for path, _, _ in wanted})
    ran = [any((str(path), line) in hit for line in range(first, last + 1)) for path, first, last in wanted]
    for (path, first, _), each in zip(wanted, ran, strict=True):
        text = path.read_text().splitlines()[first - 1].strip()
        print(f"{'ran    ' if each else 'NOT RUN'} {path.relative_to(PACKAGE)}:{first}: {text}")
    print(f"{sum(ran)} of {len(ran)} statements for CUDA ran")


if __name__ == "__main__":
    main()
