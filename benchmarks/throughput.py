"""Tokens a second and memory of a training step: fsdptrain and its alternatives.

    python benchmarks/throughput.py [--shapes small vocabulary gsm8k lora copies] [--rounds 3] [--steps 8]

Two gloo ranks train a Llama (hidden 512, 6 layers, tied embeddings), computing in `--dtype` (by default bfloat16 if the
CPU has instructions for it, else float32), with the same rows, batch and optimizer. In every round each contender runs
once, in fresh processes. The time of a step is the wall time from the end of the previous step to its own end; the
first two steps of a turn are not counted.

    ours      `fsdptrain run` with its defaults
    plain     fully_shard on every layer and the model, transformers' own loss, a loop of twelve lines
    ddp       DistributedDataParallel with its buckets of 25 MB; `unhidden` with one, which is reduced after backward
    trl       TRL's SFTTrainer: DDP, because it has no FSDP on a CPU; with its best-fit packing for `gsm8k`

Shapes: `small` (from scratch, vocabulary 8,192, micro-batches of 4 sequences of 512, each a part of one document),
`vocabulary` (131,072, micro-batches of 2), `gsm8k` (`small` with packed GSM8K rows; padding is not counted), `lora`
(`small` with adapters of rank 16 on all linear layers of a frozen model, which everyone reads from the same folder:
ours and `plain` into the compute dtype, `trl` into the one that it chooses), `copies` (`small` with NO_SHARD: how much
of the reduction backward hides).

Memory is the peak resident memory of a rank, and the part of it (`own`) that came after the imports.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import LLAMA, ROOT, WARM_UP, alternate, compute_dtype, describe_machine, rss, run_fsdptrain, run_ranks

if TYPE_CHECKING:
    from peers import Workload

WORLD = 2
SEQ_LEN = 512
RANK = 16  # of adapters
SHAPES = {  # vocabulary, sequences a micro-batch
    "small": (8192, 4), "vocabulary": (131072, 2), "gsm8k": (8192, 4), "lora": (8192, 4), "copies": (8192, 4),
}  # fmt: skip
PEERS = {
    "small": ("plain",), "vocabulary": ("plain",), "gsm8k": ("trl",), "lora": ("plain", "trl"),
    "copies": ("ddp", "unhidden"),
}  # fmt: skip
RECIPE = """
model: {model}
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
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=compute_dtype())
    parser.add_argument("--only", nargs="+", help="run only these contenders")
    options = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes:
            place = Path(folder) / shape
            place.mkdir()
            prepare(shape, place, options)
            contenders: dict[str, Callable[[], Any]] = {"ours": functools.partial(measure_fsdptrain, shape, place)}
            for peer in PEERS[shape]:
                contenders[peer] = functools.partial(run_ranks, Path(__file__), WORLD, peer, shape, str(place))
            if options.only:
                contenders = {name: run for name, run in contenders.items() if name in options.only}
            report(shape, alternate(contenders, options.rounds))


def prepare(shape: str, place: Path, options: argparse.Namespace) -> None:
    """Write the rows, the tokenizer, the number of steps and the compute dtype for all contenders to `place`."""
    from fsdptrain.data.tokenizer import train_bpe

    steps = options.steps + WARM_UP
    if shape == "gsm8k":
        rows = [json.loads(line) for line in options.gsm8k.read_text().splitlines()]
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
    if shape == "lora":
        save_model(shape, place)
    (place / "steps").write_text(str(steps))
    (place / "dtype").write_text(options.dtype)


def save_model(shape: str, place: Path) -> None:
    """Write a model with random weights, in bfloat16, to `place`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA, vocab_size=SHAPES[shape][0]))
    model.to(torch.bfloat16).save_pretrained(place / "model")


def fsdptrain_job(shape: str, place: Path) -> tuple[str, list[str]]:
    """Return the recipe and the overrides of the work."""
    vocabulary, micro_batch = SHAPES[shape]
    packed = shape == "gsm8k"
    model: dict[str, Any] = {"tokenizer": str(place / "tokenizer")}
    if shape == "lora":
        model |= {"id": str(place / "model")}
    else:
        model |= {"config": LLAMA | {"vocab_size": vocabulary}, "init": "random"}
    recipe = RECIPE.format(
        model=json.dumps(model), rows=place / ("rows.jsonl" if packed else "whole.jsonl"),
        format="prompt_completion" if packed else "text", packing="bfd" if packed else "concat",
        steps=int((place / "steps").read_text()), batch=WORLD * micro_batch, micro_batch=micro_batch,
    )  # fmt: skip
    overrides = [f"fsdp.mixed_precision.param_dtype={(place / 'dtype').read_text()}"]
    overrides += ["adapter.kind=lora", f"adapter.r={RANK}"] if shape == "lora" else []
    overrides += ["fsdp.strategy=NO_SHARD"] if shape == "copies" else []
    return recipe, overrides


def measure_fsdptrain(shape: str, place: Path) -> list[dict[str, Any]]:
    """Train with `fsdptrain run`; return the figures."""
    recipe, overrides = fsdptrain_job(shape, place)
    events = run_fsdptrain(recipe, place, *overrides)
    start = next(event for event in events if event["event"] == "start")
    ends = [event for event in events if event["event"] == "step"]
    times = [now["at"] - before["at"] for before, now in pairwise(ends)][WARM_UP - 1 :]
    real = WORLD * SHAPES[shape][1] * SEQ_LEN * start["fill"]
    return [
        {
            "step_s": times,
            "tokens": [real] * len(times),
            "peak": max(event["peak_memory_bytes"] for event in ends),
            "baseline": start["baseline_memory_bytes"],
        }
    ]


def workload(shape: str, place: Path) -> Workload:
    """Return the model and the rows of a shape."""
    import torch
    from peers import Workload
    from transformers import AutoTokenizer

    def rows() -> Any:
        tokenizer = AutoTokenizer.from_pretrained(place / "tokenizer")
        texts = [json.loads(line)["text"] for line in (place / "rows.jsonl").read_text().splitlines()]
        return torch.tensor(tokenizer(texts, truncation=True, max_length=SEQ_LEN)["input_ids"])

    vocabulary, micro_batch = SHAPES[shape]
    base = place / "model" if shape == "lora" else None
    config, compute = LLAMA | {"vocab_size": vocabulary}, getattr(torch, (place / "dtype").read_text())
    return Workload(config, rows, micro_batch, place, base=base, compute=compute)


def train_peer(name: str, shape: str, place: Path) -> None:
    """Train on this rank with a peer; what it measured is passed on there."""
    from peers import train_ddp, train_plain

    if name == "trl":
        train_trl(shape, place)
    elif name == "plain":
        train_plain(workload(shape, place))
    else:
        train_ddp(workload(shape, place), bucket_mb={"ddp": 25, "unhidden": 2**20}[name])


def train_trl(shape: str, place: Path) -> None:
    """Train with TRL's SFTTrainer: packed rows of GSM8K by best fit, or adapters."""
    from datasets import Dataset
    from peers import lora, run_trainer, trainer_arguments
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    work = workload(shape, place)
    packed = {"packing": True, "packing_strategy": "bfd", "completion_only_loss": True} if shape == "gsm8k" else {}
    steps = int((place / "steps").read_text())
    training_args = SFTConfig(**trainer_arguments(work, steps), max_length=SEQ_LEN, **packed)  # type: ignore[arg-type]
    baseline = rss()
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    peer = SFTTrainer(
        model=str(work.base) if work.base else work.model(), args=training_args, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(place / "tokenizer"),
        peft_config=lora() if work.base else None,
    )  # fmt: skip

    def real(batch: Any) -> int:
        mask = batch.get("attention_mask")
        return int(mask.sum()) if mask is not None else batch["input_ids"].numel()

    run_trainer(peer, baseline, real)


def report(shape: str, found: dict[str, list[Any]]) -> None:
    """Print the table: medians over the rounds."""
    for name, turns in found.items():
        each = [f"{sum(turn[0]['tokens']) / sum(turn[0]['step_s']):,.0f}" for turn in turns]
        print(f"{shape}: tokens/s of {name} by round: {' '.join(each)}", file=sys.stderr)
    print(f"\n{shape:10}{'tokens/s':>10}{'ours is':>9}{'peak MiB':>10}{'own MiB':>9}{'ours is':>9}")
    medians = {}
    for name, turns in found.items():
        speed = statistics.median(sum(turn[0]["tokens"]) / sum(turn[0]["step_s"]) for turn in turns)
        peak = statistics.median(max(rank["peak"] for rank in turn) for turn in turns)
        own = statistics.median(max(rank["peak"] - rank["baseline"] for rank in turn) for turn in turns)
        medians[name] = (speed, peak, own)
    for name, (speed, peak, own) in medians.items():
        ours = medians.get("ours", (speed, peak, own))
        print(
            f"{name:10}{speed:10,.0f}{ours[0] / speed:8.2f}×"
            f"{peak / 2**20:10,.0f}{own / 2**20:9,.0f}{ours[2] / own:8.2f}×",
            flush=True,
        )


if __name__ == "__main__":
    if "RESULT_FILE" in os.environ:
        train_peer(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    else:
        main()
