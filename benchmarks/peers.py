"""The loops that benchmarks compare fsdptrain with, for a rank on a CPU or a GPU. They pass on what they measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from common import WARM_UP, exit_with_result, peak_rss, rss
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


@dataclass(frozen=True)
class Workload:
    """What every loop trains, computing in `compute`: a model from scratch or adapters, and rows of equal length.

    `rows` returns the token ids of all ranks, int64 [rows, seq_len]; it is called after the memory before the model was
    measured. With `recompute` the activations of layers are computed again in backward, and with `compiled` every layer
    is compiled. `base` is the folder of the frozen model that gets the adapters of `lora`; None: all weights of a new
    model are trained.
    """

    config: dict[str, Any]
    rows: Callable[[], torch.Tensor]
    micro_batch: int
    place: Path
    device: str = "cpu"
    recompute: bool = False
    compiled: bool = False
    base: Path | None = None
    compute: torch.dtype = torch.bfloat16
    world: int = field(default_factory=lambda: int(os.environ["WORLD_SIZE"]))

    @property
    def compiler(self) -> str:
        """The backend that compiles: on a CPU Inductor takes a minute."""
        return "inductor" if self.device == "cuda" else "aot_eager"

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield the micro-batches of this rank: token ids, [micro-batch, seq_len]."""
        ids, rank = self.rows(), dist.get_rank()
        for at in range(rank * self.micro_batch, len(ids), self.world * self.micro_batch):
            yield ids[at : at + self.micro_batch].to(self.device)

    def model(self) -> Any:
        """Return the model on the device: trained weights in float32, frozen ones in `compute`."""
        torch.manual_seed(0)
        with torch.device(self.device):
            if self.base is None:
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config))
            else:
                model = AutoModelForCausalLM.from_pretrained(self.base, dtype=self.compute)
                model = get_peft_model(model, lora())
        if self.recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model


def lora() -> LoraConfig:
    """Return the adapters that fsdptrain adds by default: rank 16, alpha 32, on all linear layers but the head."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def memory(device: str) -> int:
    """Return the peak memory of this rank in bytes: what torch has allocated on a GPU, resident memory on a CPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else peak_rss()


def start_ranks(device: str) -> int:
    """Join the process group of the ranks; return the memory of this rank before it has a model, in bytes."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return rss() if device == "cpu" else 0


def train_plain(work: Workload) -> NoReturn:
    """Train with fully_shard on every layer and the model, and transformers' own loss."""
    baseline = start_ranks(work.device)
    model = work.model()
    policy = MixedPrecisionPolicy(param_dtype=work.compute, reduce_dtype=torch.float32)
    for layer in model.get_decoder().layers:
        fully_shard(layer, mp_policy=policy)
        if work.compiled:  # now: FSDP's class has a `forward` of its own, without which nothing would be recomputed
            layer.forward = torch.compile(layer.forward, backend=work.compiler, dynamic=False)
    fully_shard(model, mp_policy=policy)
    run_loop(model, work, baseline)


def train_ddp(work: Workload, bucket_mb: float) -> NoReturn:
    """Train with DistributedDataParallel, which reduces gradients in buckets of this size beside backward."""
    baseline = start_ranks(work.device)
    model = work.model()
    model.forward = torch.autocast(work.device, work.compute, enabled=work.compute != torch.float32)(model.forward)
    run_loop(DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True), work, baseline)


def run_loop(model: Any, work: Workload, baseline: int) -> NoReturn:
    """Run the loop that a user writes by hand, and pass on its figures."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.1, fused=True)
    model.train()
    ends, tokens = [], 0
    for ids in work.batches():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        ends.append(time.perf_counter())
        tokens = work.world * ids.numel()
    finish(ends, [tokens] * len(ends), baseline, work.device)


def trainer_arguments(work: Workload, steps: int) -> dict[str, Any]:
    """Return the arguments of the Trainer and of TRL's SFTTrainer."""
    return {
        "output_dir": str(work.place / "trainer"), "per_device_train_batch_size": work.micro_batch,
        "max_steps": steps, "bf16": work.compute == torch.bfloat16, "use_cpu": work.device == "cpu",
        "learning_rate": 3e-4, "lr_scheduler_type": "constant", "weight_decay": 0.1, "report_to": "none",
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "ddp_find_unused_parameters": False,
        "optim": "adamw_torch_fused", "torch_compile_backend": work.compiler if work.compiled else None,
        "gradient_checkpointing": work.recompute, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }  # fmt: skip


def train_trainer(work: Workload, steps: int) -> NoReturn:
    """Train with the transformers Trainer: with DDP if there are several ranks, else as without torchrun."""
    if work.compiled:  # by layers: the whole model takes minutes
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    if work.world == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    training_args = TrainingArguments(**trainer_arguments(work, steps))
    baseline = rss() if work.device == "cpu" else 0
    rows = [{"input_ids": row, "labels": row} for row in work.rows()]  # of all ranks: the Trainer divides them itself
    peer = Trainer(model=work.model(), args=training_args, train_dataset=rows)  # type: ignore[arg-type]
    run_trainer(peer, baseline, lambda batch: batch["input_ids"].numel(), work.device)


def run_trainer(peer: Any, baseline: int, real: Callable[[Any], int], device: str = "cpu") -> NoReturn:
    """Run a Trainer, and pass on the ends of its steps and their real tokens, which `real` counts in a batch."""
    ends: list[float] = []
    counts: list[int] = []

    class RecordStepEnd(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    compute_loss = peer.compute_loss

    def counting_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(real(inputs))
        return compute_loss(model, inputs, *args, **kwargs)

    peer.compute_loss = counting_loss
    peer.add_callback(RecordStepEnd())
    peer.train()
    tokens = torch.tensor(counts, device=device)
    if dist.is_initialized():
        dist.all_reduce(tokens)
    finish(ends, tokens.tolist(), baseline, device)


def finish(ends: list[float], tokens: list[int], baseline: int, device: str) -> NoReturn:
    """Pass on the seconds and tokens (of all ranks) of every step after the warm-up, and the memory."""
    times = [now - before for before, now in pairwise(ends)][WARM_UP - 1 :]
    exit_with_result({"step_s": times, "tokens": tokens[WARM_UP:], "peak": memory(device), "baseline": baseline})
