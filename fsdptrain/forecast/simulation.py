"""Run one optimizer step of a rank on fake tensors, without a GPU and without weights, and record it as a `Trace`.

The code is that of training: `build`, `allocate`, the optimizer, `Engine.step`. Only the device, the process group and
the numbers are not real.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from fsdptrain.data.corpus import Batch, document_bounds
from fsdptrain.forecast.device import pretend_accelerator, pretend_world
from fsdptrain.forecast.kernels import multiply_in_float8, on_card
from fsdptrain.forecast.patches import fake_tensor_patches
from fsdptrain.forecast.recorder import END_OF_STAGE, LOSS, Recorder, tensors_in
from fsdptrain.forecast.timing import COMPUTE_STREAM
from fsdptrain.forecast.trace import HOST, Alloc, Storage, Trace
from fsdptrain.model.float8 import layers_in_float8
from fsdptrain.model.patches import import_quietly
from fsdptrain.model.units import Unit
from fsdptrain.model.weights import allocate
from fsdptrain.parallel.shard import build
from fsdptrain.parallel.world import World
from fsdptrain.plan.hardware import Hardware
from fsdptrain.plan.plan import Plan, varied
from fsdptrain.run_folder.events import Progress
from fsdptrain.train.optim import make_optimizer, optimizer_class, start_state
from fsdptrain.train.step import Engine

progress: list[Progress] = []  # of this process: how many moments of the simulated step have begun


def simulate(
    plan: Plan, config: PreTrainedConfig, pretend: bool, card: Hardware | None = None, masked: bool | None = None,
    place: int = 0,
) -> Trace:  # fmt: skip
    """Return the trace of one optimizer step, with optimizer state allocated, of as few micro-batches as show all.

    It is that of rank 0 or, in a pipeline, of the first rank at `place`, which receives what it waits for at once.
    `pretend`: on the pretended accelerator, else on the CPU. `config` is the transformers configuration of the model.
    `card` determines the attention kernels and what cuBLAS allocates; None: no particular one, and nothing. `masked`:
    whether masks are built, by default where a sequence may hold several documents.
    """
    recipe = plan.recipe
    masked = recipe.documents_share_sequences if masked is None else masked
    # The compiler cannot run on fake tensors, and without it a product in float8 would be many kernels.
    plan = varied(plan, {"train.compile": False, "train.float8": None})
    # Imported here, because these modules may compute tables.
    optimizer_class(plan.recipe.optim.name)
    if plan.recipe.adapter.kind:
        import_quietly("peft")
    if plan.recipe.adapter.kind == "qlora":
        import_quietly("bitsandbytes")
    device = pretend_accelerator() if pretend else torch.device(HOST)
    with (
        fake_tensor_patches(masked, Recorder.unrecorded),
        pretend_world(plan, device, place * plan.stage_ranks) as world,
        on_card(card),
        FakeTensorMode(allow_non_fake_inputs=True),
        # A thread of autograd's would free its last gradient at some later moment, so two traces would differ.
        torch.autograd.set_multithreading_enabled(False),
    ):
        engine, units = make_engine(plan, config, world)
        if recipe.train.float8:
            multiply_in_float8(layers_in_float8(engine.model, recipe).values(), recipe.train.float8)
        micro_batches = micro_batches_to_simulate(plan, world.rank)
        layers, moments = config.get_text_config().num_hidden_layers, 2 * len(units) * micro_batches  # about so many
        counted = itertools.count(1)

        def on_moment() -> None:
            done = next(counted)
            for report in progress:
                report(f"simulating a step of {layers} layers", min(done, moments), moments)

        with Recorder(device.type, config.get_text_config().vocab_size, on_moment) as recorder:
            trace = record_step(recorder, engine, units, plan, micro_batches)
    if card and pretend:  # from torch's allocator, at the first product of a run, and never freed
        workspaces = Storage(device.type, "temporaries")
        trace.before.append(Alloc(workspaces, card.cublas, COMPUTE_STREAM))
    return trace


def make_engine(plan: Plan, config: PreTrainedConfig, world: World) -> tuple[Engine, list[Unit]]:
    """Return the engine as a worker builds it, with unset weights."""
    model, units = build(plan, config, world)
    allocate(model, torch.device(HOST) if plan.recipe.fsdp.cpu_offload else world.device)
    optimizer = make_optimizer(model, plan.recipe.optim)
    start_state(optimizer)
    return Engine(model, optimizer, world, plan), units


def record_step(recorder: Recorder, engine: Engine, units: list[Unit], plan: Plan, micro_batches: int) -> Trace:
    """Make one step while the recorder is entered; return the trace, which starts with what is allocated already."""
    trace = recorder.trace
    for param in engine.model.parameters():
        recorder.tag(param.detach(), "parameter shards")
    for state in engine.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                recorder.tag(value, "optimizer state")
    for buffer in engine.model.buffers():
        recorder.tag(buffer, "inputs and buffers")
    trace.before, trace.events = [e for e in trace.events if isinstance(e, Alloc)], []
    mark_moments(recorder, engine, units)
    batches = [batch_of_zeros(plan) for _ in range(micro_batches)]
    engine.step(0, batches, 1, plan.recipe.optim.lr)
    return trace


def micro_batches_to_simulate(plan: Plan, rank: int) -> int:
    """Return how many micro-batches a trace needs, of which `Trace.repeated` repeats the last but one."""
    parallel = plan.recipe.parallel
    # Forward passes come before other backward passes than their own.
    if parallel.schedule != "1f1b" or plan.recipe.train.objective.estimates_kl:
        return plan.accumulation
    # The first differs if it alone gathers weights that stay. In a pipeline some are ahead of the first backward pass.
    enough = 3 if plan.recipe.fsdp.strategy.gathers_once else 2
    return min(plan.accumulation, enough + parallel.pipeline - 1 - plan.place_in_pipeline(rank))


def batch_of_zeros(plan: Plan) -> Batch:
    """Return a micro-batch of the plan's shape. Each row is one document, with which attention computes the most."""
    rows, seq_len = plan.recipe.train.micro_batch_size, plan.recipe.data.seq_len
    documents, _ = document_bounds([[seq_len]] * rows)
    ids, labels, positions = (torch.zeros((rows, plan.tokens_of_row), dtype=torch.long) for _ in range(3))
    batch: Batch = {
        "input_ids": ids, "labels": labels, "position_ids": positions, "is_token": torch.ones_like(ids).bool(),
        "documents": documents, "longest": seq_len,
    }  # fmt: skip
    objective = plan.recipe.train.objective
    if objective.answers:
        batch |= {"answers": torch.zeros_like(ids), "reference": torch.zeros(objective.answers, dtype=torch.float64)}
    if objective.estimates_kl:
        batch |= {"desirable": torch.ones(1, dtype=torch.bool), "mismatched": batch.copy()}
    if objective.needs_teacher:
        top_k = plan.recipe.teacher.top_k
        batch["teacher_ids"] = torch.zeros((*ids.shape, top_k), dtype=torch.int32)
        batch["teacher_log_probs"] = torch.zeros((*ids.shape, top_k + 1))
    return batch


def mark_moments(recorder: Recorder, engine: Engine, units: list[Unit]) -> None:
    """Register hooks that tell the recorder which unit computes; they change nothing."""

    def forward(unit: Unit) -> Callable[..., None]:
        def hook(*_: Any) -> None:  # FSDP's own hook ran before: the unit is gathered
            recorder.begin(f"forward of {unit.name}")
            for param in itertools.chain.from_iterable(module.parameters() for module in unit.modules):
                if not isinstance(param, DTensor):
                    recorder.tag(param.detach(), "gathered parameters", unless="parameter shards")

        return hook

    def backward(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = next((tensor for tensor in tensors_in(output) if tensor.requires_grad), None)
            if first is not None:
                first.register_hook(lambda grad: recorder.begin(f"backward of {name}"))

        return hook

    def update(*_: Any) -> None:
        recorder.begin("optimizer")
        for grad in engine.local_grads():
            recorder.tag(grad, "gradients")

    for unit in units:
        unit.modules[0].register_forward_pre_hook(forward(unit))
        unit.modules[-1].register_forward_hook(backward(unit.name))
    head = engine.model.get_output_embeddings()
    if all(head is not inner for unit in units for module in unit.modules for inner in module.modules()):
        head.register_forward_pre_hook(lambda *_: recorder.begin("forward of head"))  # tied: in the root

    def end(_model: Any, _args: Any, inputs: dict[str, Any], _output: Any) -> None:
        recorder.begin(LOSS if engine.stages.is_last(inputs.get("chunk", 0)) else END_OF_STAGE)

    engine.model.register_forward_hook(end, with_kwargs=True)
    engine.optimizer.register_step_pre_hook(update)
