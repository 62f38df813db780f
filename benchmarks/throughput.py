"""Tokens a second and memory of a training step: fsdptrain and its alternatives.

    python benchmarks/throughput.py [--shapes small vocabulary gsm8k] [--rounds 3] [--steps 8]

Two gloo ranks train a Llama (hidden 512, 6 layers, tied embeddings) from scratch in the bf16 policy, with the same
rows, batch and optimizer. In every round each contender runs once, in fresh processes. The time of a step is the wall
time from the end of the previous step to its own end; the first two steps of a turn are not counted.

    ours      `fsdptrain run` with its defaults
    plain     fully_shard on every block and the model, transformers' own loss, a loop of twelve lines
    native    transformers' `distributed_config`, which shards while it loads, and the same loop
    trainer   the transformers Trainer: DDP, because it has no FSDP on a CPU
    trl       TRL's SFTTrainer with its best-fit packing: DDP too

Shapes: `small` (vocabulary 8,192, micro-batches of 4 sequences of 512, each a part of one document), `vocabulary`
(131,072, micro-batches of 2), `gsm8k` (`small` with packed GSM8K rows; padding is not counted). The share of the limit
is 6·N·T + 12·L·A·S·T FLOPs (arXiv:2204.02311) divided by the rate of a bf16 matrix product of the MLP's shape, measured
on all ranks at once in the same rounds. Memory is the peak resident memory of a rank, and the part of it (`own`) that
came after the imports.
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

from common import LLAMA, ROOT, alternate, describe_machine, exit_with_result, peak_rss, rss, run_fsdptrain, run_ranks

WORLD = 2
WARM_UP = 2  # first steps of a turn that are not counted
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
    parser.add_argument(
        "--gsm8k", type=Path, default=ROOT / "recipes/data/gsm8k-train.jsonl", help="file with its rows"
    )
    parser.add_argument("--only", nargs="+", help="run only these contenders")
    options = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes:
            place = Path(folder) / shape
            place.mkdir()
            prepare(shape, place, options.gsm8k, options.steps + WARM_UP)
            contenders: dict[str, Callable[[], Any]] = {
                "matrix": lambda: run_ranks(Path(__file__), WORLD, "matrix"),
                "ours": functools.partial(measure_fsdptrain, shape, place),
            }
            for peer in PEERS[shape]:
                contenders[peer] = functools.partial(run_ranks, Path(__file__), WORLD, peer, shape, str(place))
            if options.only:
                contenders = {name: run for name, run in contenders.items() if name in ("matrix", *options.only)}
            report(shape, alternate(contenders, options.rounds))


def prepare(shape: str, place: Path, gsm8k: Path, steps: int) -> None:
    """Write the rows, the tokenizer and the number of steps for all contenders to `place`."""
    from fsdptrain.data.tokenizer import train_bpe

    if shape == "gsm8k":
        rows = [json.loads(line) for line in gsm8k.read_text().splitlines()]
        rows = [{"prompt": row["question"] + "\n", "completion": row["answer"]} for row in rows]
        texts = [row["prompt"] + row["completion"] for row in rows]
    else:
        whole = (ROOT / "recipes/data/tinyshakespeare.txt").read_text()
        count = steps * WORLD * SHAPES[shape][1]
        texts = [whole[i * 4999 % (len(whole) - 5000) :][:5000] for i in range(count)]  # each longer than 512 tokens
        rows = [{"text": text} for text in texts]
        (place / "whole.jsonl").write_text(json.dumps({"text": whole}) + "\n")  # fsdptrain cuts it itself
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_bpe(iter(texts), 8192).save_pretrained(place / "tokenizer")
    (place / "steps").write_text(str(steps))


def measure_fsdptrain(shape: str, place: Path) -> list[dict[str, Any]]:
    """Train with `fsdptrain run`; return the figures."""
    vocabulary, micro_batch = SHAPES[shape]
    packed = shape == "gsm8k"
    steps = int((place / "steps").read_text())
    recipe = RECIPE.format(
        config=json.dumps(LLAMA | {"vocab_size": vocabulary}), tokenizer=place / "tokenizer",
        rows=place / ("rows.jsonl" if packed else "whole.jsonl"), format="prompt_completion" if packed else "text",
        packing="bfd" if packed else "concat", steps=steps, batch=WORLD * micro_batch, micro_batch=micro_batch,
    )  # fmt: skip
    events = run_fsdptrain(recipe, place)
    start = next(event for event in events if event["event"] == "start")
    ends = [event for event in events if event["event"] == "step"]
    times = [now["at"] - before["at"] for before, now in pairwise(ends)][WARM_UP - 1 :]
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
    """Yield the micro-batches of a rank: token ids, [micro-batch, 512]."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "tokenizer")
    texts = [json.loads(line)["text"] for line in (place / "rows.jsonl").read_text().splitlines()]
    ids = torch.tensor(tokenizer(texts, truncation=True, max_length=SEQ_LEN)["input_ids"])
    size = SHAPES[shape][1]
    for at in range(rank * size, len(ids), WORLD * size):
        yield ids[at : at + size]


def llama(shape: str) -> Any:
    """Return the configuration of the model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**LLAMA, vocab_size=SHAPES[shape][0])


def loop(model: Any, batches: Iterator[Any], baseline: int) -> None:
    """Run the loop that a user writes by hand, and pass on its figures."""
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
    """Pass on the seconds and tokens (of all ranks) of every step after the warm-up, and the memory."""
    times = [now - before for before, now in pairwise(ends)][WARM_UP - 1 :]
    exit_with_result({"step_s": times, "tokens": tokens[WARM_UP:], "peak": peak_rss(), "baseline": baseline})


def plain(shape: str, place: Path) -> None:
    """Train with fully_shard and transformers' own model and loss."""
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
    """Train with transformers' own sharding, which happens while it loads."""
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
    """Return the arguments of the Trainer and of TRL's SFTTrainer."""
    return {
        "output_dir": str(place / "trainer"), "per_device_train_batch_size": SHAPES[shape][1],
        "max_steps": int((place / "steps").read_text()), "bf16": True, "use_cpu": True, "learning_rate": 3e-4,
        "lr_scheduler_type": "constant", "weight_decay": 0.1, "report_to": "none", "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "ddp_find_unused_parameters": False, "optim": "adamw_torch_fused",
    }  # fmt: skip


def trainer(shape: str, place: Path) -> None:
    """Train with the transformers Trainer."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    training_args = TrainingArguments(**arguments(shape, place))
    baseline = rss()
    ids = [row for rank in range(WORLD) for batch in blocks(shape, place, rank) for row in batch]
    rows = [{"input_ids": row, "labels": row} for row in ids]  # of all ranks: the Trainer divides them itself
    peer = Trainer(model=AutoModelForCausalLM.from_config(llama(shape)), args=training_args, train_dataset=rows)
    run_trainer(peer, baseline, lambda batch: batch["input_ids"].numel())


def trl(shape: str, place: Path) -> None:
    """Train with TRL's SFTTrainer and best-fit packing."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    training_args = SFTConfig(
        **arguments(shape, place), packing=True, packing_strategy="bfd", max_length=SEQ_LEN,
        completion_only_loss=True, gradient_checkpointing=False,
    )  # fmt: skip
    baseline = rss()
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    peer = SFTTrainer(
        model=AutoModelForCausalLM.from_config(llama(shape)), args=training_args, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(place / "tokenizer"),
    )  # fmt: skip

    def real(batch: Any) -> int:
        mask = batch.get("attention_mask")
        return int(mask.sum()) if mask is not None else batch["input_ids"].numel()

    run_trainer(peer, baseline, real)


def run_trainer(peer: Any, baseline: int, real: Callable[[Any], int]) -> None:
    """Run a Trainer, and pass on the ends of its steps and their real tokens, which `real` counts in a batch."""
    import torch
    from transformers import TrainerCallback

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
    tokens = torch.tensor(counts)
    torch.distributed.all_reduce(tokens)
    finish(ends, tokens.tolist(), baseline)


def matrix(*_: Any) -> None:
    """Measure the rate of a bf16 matrix product of the MLP's shape, on all ranks at once, in FLOP/s."""
    import torch

    a = torch.randn(2048, LLAMA["hidden_size"], dtype=torch.bfloat16)
    b = torch.randn(LLAMA["intermediate_size"], LLAMA["hidden_size"], dtype=torch.bfloat16)
    rates = []
    for _ in range(200):
        started = time.perf_counter()
        torch.nn.functional.linear(a, b)
        rates.append(2 * a.numel() * b.shape[0] / (time.perf_counter() - started))
    exit_with_result(statistics.median(rates))


def report(shape: str, found: dict[str, list[Any]]) -> None:
    """Print the table: medians over the rounds."""
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
        ours = medians.get("ours", (speed, peak, own))
        print(
            f"{name:10}{speed:10,.0f}{speed * flops / rate:10.1%}{ours[0] / speed:8.2f}×"
            f"{peak / 2**20:10,.0f}{own / 2**20:9,.0f}{ours[2] / own:8.2f}×",
            flush=True,
        )


def flops_per_token(vocabulary: int) -> float:
    """Return 6·N + 12·L·A·S. N is all parameters except norms; the tied embedding counts once, as the head."""
    hidden, layers = LLAMA["hidden_size"], LLAMA["num_hidden_layers"]
    weights = vocabulary * hidden + layers * (4 * hidden**2 + 3 * hidden * LLAMA["intermediate_size"])
    return 6.0 * weights + 12.0 * layers * hidden * SEQ_LEN


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in (peers := {f.__name__: f for f in (plain, native, trainer, trl, matrix)}):
        shape, place = sys.argv[2:3], map(Path, sys.argv[3:])
        peers[sys.argv[1]](*shape, *place)
    else:
        main()
