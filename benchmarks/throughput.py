"""Tokens a second and memory of a training step: fsdptrain beside what a user would take instead.

    python benchmarks/throughput.py [--shapes small vocabulary gsm8k] [--rounds 3] [--steps 8]

Two gloo ranks train a Llama (hidden 512, 6 layers, tied embeddings) from scratch in the bf16 policy, with the same
rows, batch and optimizer. In every round each contender has its turn, in processes of its own. A step takes the time
from the end of the step before to its own end, as the wall clock has it; the first two steps of a turn are left out.

    ours      `fsdptrain run`, as it comes
    plain     fully_shard on every block and the model, transformers' own loss, a loop of twelve lines
    native    transformers' `distributed_config`, which shards while it loads, and the same loop
    trainer   the transformers Trainer: DDP, for it has no FSDP on a CPU
    trl       TRL's SFTTrainer with its best-fit packing: DDP too

Shapes: `small` (vocabulary 8,192, 4 sequences of 512 a micro-batch, each a part of one document), `vocabulary`
(131,072, 2 a micro-batch), `gsm8k` (`small` with packed GSM8K rows, counted in tokens that are no padding). The share
of the limit is 6·N·T + 12·L·A·S·T FLOPs (arXiv:2204.02311) over the rate of a bf16 matrix product of the MLP's shape,
on all ranks at once and in the same rounds. Memory is the most a rank had resident, and what of it came after its
imports.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import LLAMA, ROOT, alternate, machine, peak_rss, ranks, rss, tell, train

WORLD, LEFT_OUT = 2, 2
SEQ_LEN = 512
SHAPES = {"small": (8192, 4), "vocabulary": (131072, 2), "gsm8k": (8192, 4)}  # vocabulary, sequences a micro-batch
PEERS = {"small": ("plain", "native", "trainer"), "vocabulary": ("plain", "native", "trainer"), "gsm8k": ("trl",)}
RECIPE = """
model: {{config: {config}, tokenizer: {tokenizer}, init: random}}
data: {{path: {rows}, format: {format}, seq_len: 512, packing: {packing}}}
optim: {{lr: 3e-4}}
schedule: {{name: constant, warmup: 0}}
train: {{steps: {steps}, global_batch_size: {batch}, micro_batch_size: {micro_batch}}}
checkpoint: {{every: null}}
export: {{at_end: false}}
launch: {{nproc_per_node: 2}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps a turn")
    parser.add_argument("--gsm8k", type=Path, default=ROOT / "recipes/data/gsm8k-train.jsonl", help="its rows")
    parser.add_argument("--only", nargs="+", help="of the contenders, these alone")
    asked = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        for shape in asked.shapes:
            place = Path(folder) / shape
            place.mkdir()
            prepare(shape, place, asked.gsm8k, asked.steps + LEFT_OUT)
            contenders: dict[str, Callable[[], Any]] = {
                "matrix": lambda: ranks(Path(__file__), WORLD, "matrix"),
                "ours": functools.partial(ours, shape, place),
            }
            for peer in PEERS[shape]:
                contenders[peer] = functools.partial(ranks, Path(__file__), WORLD, peer, shape, str(place))
            if asked.only:
                contenders = {name: run for name, run in contenders.items() if name in ("matrix", *asked.only)}
            report(shape, alternate(contenders, asked.rounds))


def prepare(shape: str, place: Path, gsm8k: Path, steps: int) -> None:
    """The rows and the tokenizer that all contenders use, and how many steps they make."""
    from fsdptrain.data.tokenizer import train_bpe

    if shape == "gsm8k":
        rows = [json.loads(line) for line in gsm8k.read_text().splitlines()]
        rows = [{"prompt": row["question"] + "\n", "completion": row["answer"]} for row in rows]
        texts = [row["prompt"] + row["completion"] for row in rows]
    else:
        whole = (ROOT / "recipes/data/tinyshakespeare.txt").read_text()
        wanted = steps * WORLD * SHAPES[shape][1]
        texts = [whole[i * 4999 % (len(whole) - 5000) :][:5000] for i in range(wanted)]  # each longer than 512 tokens
        rows = [{"text": text} for text in texts]
        (place / "whole.jsonl").write_text(json.dumps({"text": whole}) + "\n")  # ours cuts it into full blocks itself
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_bpe(iter(texts), 8192).save_pretrained(place / "tokenizer")
    (place / "steps").write_text(str(steps))


def ours(shape: str, place: Path) -> list[dict[str, Any]]:
    """`fsdptrain run`."""
    vocabulary, micro_batch = SHAPES[shape]
    packed = shape == "gsm8k"
    steps = int((place / "steps").read_text())
    recipe = RECIPE.format(
        config=json.dumps(LLAMA | {"vocab_size": vocabulary}), tokenizer=place / "tokenizer",
        rows=place / ("rows.jsonl" if packed else "whole.jsonl"), format="prompt_completion" if packed else "text",
        packing="bfd" if packed else "concat", steps=steps, batch=WORLD * micro_batch, micro_batch=micro_batch,
    )  # fmt: skip
    events = train(recipe, place)
    start = next(event for event in events if event["event"] == "start")
    ends = [event for event in events if event["event"] == "step"]
    times = [now["at"] - before["at"] for before, now in pairwise(ends)][LEFT_OUT - 1 :]
    real = WORLD * micro_batch * SEQ_LEN * start["fill"]
    return [
        {
            "step_s": times,
            "tokens": [real] * len(times),
            "peak": max(event["peak_memory_bytes"] for event in ends),
            "baseline": start["baseline_memory_bytes"],
        }
    ]


def blocks(shape: str, place: Path, rank: int) -> Iterator[Any]:
    """A rank's micro-batches of token ids, [micro-batch, 512]."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "tokenizer")
    texts = [json.loads(line)["text"] for line in (place / "rows.jsonl").read_text().splitlines()]
    ids = torch.tensor(tokenizer(texts, truncation=True, max_length=SEQ_LEN)["input_ids"])
    size = SHAPES[shape][1]
    for at in range(rank * size, len(ids), WORLD * size):
        yield ids[at : at + size]


def llama(shape: str) -> Any:
    """The configuration of the model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**LLAMA, vocab_size=SHAPES[shape][0])


def loop(model: Any, batches: Iterator[Any], baseline: int) -> None:
    """The loop that a user writes by hand; tells what it took."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    model.train()
    ends, tokens = [], 0
    for ids in batches:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        ends.append(time.perf_counter())
        tokens = WORLD * ids.numel()
    finish(ends, [tokens] * len(ends), baseline)


def finish(ends: list[float], tokens: list[int], baseline: int) -> None:
    """Tell the steps' seconds and tokens of all ranks, but for the first steps."""
    times = [now - before for before, now in pairwise(ends)][LEFT_OUT - 1 :]
    tell({"step_s": times, "tokens": tokens[LEFT_OUT:], "peak": peak_rss(), "baseline": baseline})


def plain(shape: str, place: Path) -> None:
    """fully_shard by hand, with transformers' own model and loss."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    dist.init_process_group("gloo")
    baseline = rss()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama(shape))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    loop(model, blocks(shape, place, dist.get_rank()), baseline)


def native(shape: str, place: Path) -> None:
    """transformers' own sharding while loading."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    baseline = rss()
    saved = place / "model"
    if dist.get_rank() == 0 and not saved.exists():
        AutoModelForCausalLM.from_config(llama(shape)).save_pretrained(place / "half")
        (place / "half").rename(saved)
    dist.barrier()
    config = DistributedConfig(fsdp_size=WORLD, fsdp_mixed_precision=True)
    model = AutoModelForCausalLM.from_pretrained(saved, distributed_config=config)
    loop(model, blocks(shape, place, dist.get_rank()), baseline)


def arguments(shape: str, place: Path) -> dict[str, Any]:
    """What the Trainer and TRL's are told."""
    return {
        "output_dir": str(place / "trainer"), "per_device_train_batch_size": SHAPES[shape][1],
        "max_steps": int((place / "steps").read_text()), "bf16": True, "use_cpu": True, "learning_rate": 3e-4,
        "lr_scheduler_type": "constant", "weight_decay": 0.1, "report_to": "none", "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "ddp_find_unused_parameters": False, "optim": "adamw_torch_fused",
    }  # fmt: skip


def trainer(shape: str, place: Path) -> None:
    """The transformers Trainer."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    given = TrainingArguments(**arguments(shape, place))
    baseline = rss()
    ids = [row for rank in range(WORLD) for batch in blocks(shape, place, rank) for row in batch]
    rows = [{"input_ids": row, "labels": row} for row in ids]  # of all ranks: the Trainer divides them itself
    watched = Trainer(model=AutoModelForCausalLM.from_config(llama(shape)), args=given, train_dataset=rows)
    drive(watched, baseline, lambda batch: batch["input_ids"].numel())


def trl(shape: str, place: Path) -> None:
    """TRL's SFTTrainer, packing best-fit."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    given = SFTConfig(
        **arguments(shape, place), packing=True, packing_strategy="bfd", max_length=SEQ_LEN,
        completion_only_loss=True, gradient_checkpointing=False,
    )  # fmt: skip
    baseline = rss()
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    watched = SFTTrainer(
        model=AutoModelForCausalLM.from_config(llama(shape)), args=given, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(place / "tokenizer"),
    )  # fmt: skip

    def real(batch: Any) -> int:
        mask = batch.get("attention_mask")
        return int(mask.sum()) if mask is not None else batch["input_ids"].numel()

    drive(watched, baseline, real)


def drive(watched: Any, baseline: int, real: Callable[[Any], int]) -> None:
    """Let a Trainer train, and tell when its steps ended and what they held."""
    import torch
    from transformers import TrainerCallback

    ends: list[float] = []
    counts: list[int] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    compute_loss = watched.compute_loss

    def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(real(inputs))
        return compute_loss(model, inputs, *args, **kwargs)

    watched.compute_loss = counted
    watched.add_callback(Watch())
    watched.train()
    tokens = torch.tensor(counts)
    torch.distributed.all_reduce(tokens)
    finish(ends, tokens.tolist(), baseline)


def matrix(*_: Any) -> None:
    """The rate of a bf16 matrix product of the MLP's shape, on one thread of every rank at once, in FLOP/s."""
    import torch

    a = torch.randn(2048, LLAMA["hidden_size"], dtype=torch.bfloat16)
    b = torch.randn(LLAMA["intermediate_size"], LLAMA["hidden_size"], dtype=torch.bfloat16)
    rates = []
    for _ in range(200):
        started = time.perf_counter()
        torch.nn.functional.linear(a, b)
        rates.append(2 * a.numel() * b.shape[0] / (time.perf_counter() - started))
    tell(statistics.median(rates))


def report(shape: str, found: dict[str, list[Any]]) -> None:
    """The table: medians over rounds of each turn's tokens a second."""
    vocabulary, _ = SHAPES[shape]
    rate = statistics.median(sum(turn) for turn in found.pop("matrix"))
    flops = flops_per_token(vocabulary)
    for name, turns in found.items():
        each = [f"{sum(turn[0]['tokens']) / sum(turn[0]['step_s']):,.0f}" for turn in turns]
        print(f"{shape}: tokens/s of {name} by round: {' '.join(each)}", file=sys.stderr)
    print(f"\n{shape}: bf16 matrix product {rate / 1e9:.0f} GFLOP/s on {WORLD} ranks")
    print(f"{'':10}{'tokens/s':>10}{'of limit':>10}{'ours is':>9}{'peak MiB':>10}{'own MiB':>9}{'ours is':>9}")
    medians = {}
    for name, turns in found.items():
        speed = statistics.median(sum(turn[0]["tokens"]) / sum(turn[0]["step_s"]) for turn in turns)
        peak = statistics.median(max(rank["peak"] for rank in turn) for turn in turns)
        own = statistics.median(max(rank["peak"] - rank["baseline"] for rank in turn) for turn in turns)
        medians[name] = (speed, peak, own)
    for name, (speed, peak, own) in medians.items():
        mine = medians.get("ours", (speed, peak, own))
        print(
            f"{name:10}{speed:10,.0f}{speed * flops / rate:10.1%}{mine[0] / speed:8.2f}×"
            f"{peak / 2**20:10,.0f}{own / 2**20:9,.0f}{mine[2] / own:8.2f}×",
            flush=True,
        )


def flops_per_token(vocabulary: int) -> float:
    """6·N + 12·L·A·S, all parameters counted but norms; the tied table counts once, as the head."""
    hidden, layers = LLAMA["hidden_size"], LLAMA["num_hidden_layers"]
    weights = vocabulary * hidden + layers * (4 * hidden**2 + 3 * hidden * LLAMA["intermediate_size"])
    return 6.0 * weights + 12.0 * layers * hidden * SEQ_LEN


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in (peers := {f.__name__: f for f in (plain, native, trainer, trl, matrix)}):
        words = sys.argv[2:]
        peers[sys.argv[1]](*words[:1], *(Path(word) for word in words[1:]))
    else:
        main()
