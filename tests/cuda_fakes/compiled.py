"""Compile for a card what Inductor writes for a decoder layer and the loss of shipped recipes, without the card.

`python -m cuda_fakes.compiled 90` compiles for sm_90, to machine code: Triton has its own assembler. The engine runs on
fake `cuda` tensors (see `runs`), and Inductor compiles as in a run. Only what would need a GPU is left out: instead of
the kernels the graph runs that they were made from.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from cuda_fakes.runs import CUDA, PROPERTIES, pretend_cuda
from shipped import planned
from torch._dynamo.utils import counters
from torch._inductor import codecache, compile_fx
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from fsdptrain.forecast.device import pretend_world
from fsdptrain.forecast.kernels import on_card
from fsdptrain.forecast.patches import fake_tensor_patches
from fsdptrain.forecast.recorder import Recorder
from fsdptrain.forecast.simulation import batch_of_zeros, make_engine
from fsdptrain.model.attention import choose_attention
from fsdptrain.parallel.patches import takes_two_dtypes
from fsdptrain.plan.hardware import FLOAT8_CAPABILITY, Hardware
from fsdptrain.plan.plan import Plan

CARDS = {80: "a100-80gb", 90: "h100-80gb", 100: "b200-192gb"}
LLAMA = "llama3.1-8b-full-shard-8xh100"
RECIPES = {
    "packed rows": LLAMA,
    "rows of one document, recomputed": f"{LLAMA} data.packing=none fsdp.activation_checkpointing=full",
    "QLoRA": "llama3.3-70b-qlora",
    "float8, rowwise": f"{LLAMA} train.float8=rowwise",
    "float8, tensorwise": f"{LLAMA} train.float8=tensorwise",
}
GRAPHS = 4  # of each: forward, backward and evaluation of a layer, and the loss


class Kernels:
    """Compiles each kernel that Inductor writes, in all configurations that it would try on the card."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.graphs = 0
        self.configs: dict[str, int] = {}  # of each kernel, by its text without its name
        self.faults: list[str] = []

    def compile(self, name: str, text: str, device_str: str = "cuda") -> Any:
        """Compile a kernel as `AsyncCompile.triton` does, but do not load it on the device."""
        kernel = codecache._load_triton_kernel_from_source(name, text)
        key = text.replace(name, "")
        if key not in self.configs:
            self.configs[key] = len(kernel.configs)
            for config in kernel.configs:
                try:
                    kernel._precompile_config(config)
                except Exception as error:  # any error of Triton or its assembler: the others are still compiled
                    self.faults.append(f"{name} ({config}): {type(error).__name__}: {error}")
        return kernel

    def checked(self, made: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call `triton.compile` (`made`); raise AssertionError if the result would not run on the card."""
        binary = made(*arguments, **options)
        assert binary.metadata.target.arch == self.capability and binary.asm["cubin"].startswith(b"\x7fELF")
        most = PROPERTIES[self.capability]["shared_memory_per_block_optin"]
        assert binary.metadata.shared <= most, f"{binary.metadata.shared} bytes of shared memory, of {most}"
        return binary


class OnHost(TorchDispatchMode):
    """Makes tensors on the host that are requested on a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{name: value if name != "device" else "cpu" for name, value in (kwargs or {}).items()})


@contextmanager
def compiled(kernels: Kernels) -> Iterator[None]:
    """Let torch.compile hand its kernels to `kernels`, and run the graphs that they were made from."""
    import triton
    from triton.backends.compiler import GPUTarget

    compile_inner, deduce = compile_fx.compile_fx_inner, UniformValueConstantFolder._deduce_value

    def inner(graph: Any, inputs: Sequence[Any], **options: Any) -> Callable[[list[Any]], Any]:
        given = copy.deepcopy(graph)
        kernels.graphs += 1
        with mock.patch.object(torch.Tensor, "is_pinned", lambda *_: False):  # it is True for fake tensors elsewhere
            compile_inner(graph, inputs, **options)

        def run(arguments: list[Any]) -> Any:
            results = given(*arguments)
            arguments.clear()
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def deduced(folder: Any, node: Any) -> Any:
        with OnHost():  # to find constants it computes with real tensors of one element
            return deduce(folder, node)

    triton.runtime.driver.set_active(
        SimpleNamespace(get_current_target=lambda: GPUTarget(CUDA.type, kernels.capability, 32))
    )
    with (
        mock.patch.object(compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=inner)),
        mock.patch.object(UniformValueConstantFolder, "_deduce_value", deduced),
        mock.patch.object(AsyncCompile, "triton", lambda _, *kernel, **words: kernels.compile(*kernel, **words)),
        mock.patch.object(triton, "compile", partial(kernels.checked, triton.compile)),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
    ):
        yield


def train_and_evaluate(plan: Plan, card: Hardware) -> None:
    """Run forward and backward of a micro-batch, and an evaluation, on fake tensors of rank 0."""
    words = dict(plan.recipe.model.config)
    config: Any = AutoConfig.for_model(words.pop("model_type"), **words)
    plan, _ = choose_attention(plan, config)
    with (
        fake_tensor_patches(plan.recipe.documents_share_sequences, Recorder.unrecorded),
        pretend_world(plan, CUDA) as world,
        on_card(card),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autograd.set_multithreading_enabled(False),
    ):
        engine, _ = make_engine(plan, config, world)
        engine.accumulate(0, [batch_of_zeros(plan)], 1)
        with engine.forward_only():
            engine.loss(batch_of_zeros(plan), 1)


def main() -> None:
    capability = int(sys.argv[1])
    pretend_cuda(capability)
    torch._dynamo.allow_in_graph(torch.nn.functional.scaled_dot_product_attention)  # here it chooses in Python
    kernels = Kernels(capability)
    has_float8 = divmod(capability, 10) >= FLOAT8_CAPABILITY
    possible = {"float8, rowwise": has_float8, "float8, tensorwise": has_float8, "QLoRA": takes_two_dtypes()}
    for kind, recipe in RECIPES.items():
        if not possible.get(kind, True):
            print(f"{kind}: refused with this card or this version of torch")
            continue
        graphs, count = kernels.graphs, len(kernels.configs)
        name, *changes = recipe.split()
        command = [name, "--hardware", CARDS[capability], *changes, "model.config.num_hidden_layers=1"]
        torch._dynamo.reset()
        with compiled(kernels):
            train_and_evaluate(*planned(" ".join(command)))
        print(f"{kind}: {kernels.graphs - graphs} graphs, {len(kernels.configs) - count} new kernels", flush=True)
        if kernels.graphs - graphs != GRAPHS:
            kernels.faults.append(f"{kind}: not {GRAPHS} graphs; graph breaks: {dict(counters['graph_break'])}")
    for fault in kernels.faults:
        print(f"NOT COMPILED for sm_{capability}: {fault}")
    kinds = f"{len(kernels.configs)} kernels in {sum(kernels.configs.values())} configurations"
    print(f"sm_{capability}, torch {torch.__version__}: {kinds}, of which {len(kernels.faults)} were not compiled")


if __name__ == "__main__":
    main()
