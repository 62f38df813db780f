"""Rows on the disk → packed sequences on the disk: fsdptrain's preparation beside TRL's, in one run.

    python benchmarks/data.py [--rounds 5] [--rows FILE]

The rows are GSM8K's ({"question", "answer"} a line; the default is the part that ships with the recipes), the tokenizer
a byte-level BPE of 4,096 trained on them, the packing best-fit decreasing. TRL reads with `load_dataset` and prepares
with `SFTTrainer._prepare_dataset`; both read the same file of prompts and completions. In every round each contender
has its turn, in two fresh processes: the first finds an empty cache, the second what the first left. Before the clock
runs, each prepares 64 rows, so that no import is timed; making TRL's trainer is not timed either.

On `all` cores we tokenise with a thread a core, TRL in `dataset_num_proc` processes. Our default is all cores; TRL's
is one process, a row at a time, which no threads of the tokenizer's speed up. Packed share is real tokens to blocks
times their length; TRL lays blocks end to end, so that there it is batches that differ in size. Printed are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import common

T = TypeVar("T")
LENGTHS = (512, 2048)
VOCABULARY = 4096
BATCH = 8  # sequences in the first batch
FAR = 1000  # an epoch whose positions are late ones
Found = dict[str, dict[str, dict[str, float]]]  # cache ("cold", "warm") → sequence length → what was measured
CORES = {"one": 1, "all": os.cpu_count() or 1}
PAIRS = {"one core": ("one", "one"), "all cores": ("all", "all"), "each by default": ("all", "one")}  # ours, TRL's
RECIPE = """
output_dir: {folder}/run
model: {{config: {{model_type: llama, vocab_size: {size}}}, tokenizer: {{train: {size}}}, init: random}}
data: {{path: {folder}/rows.jsonl, format: prompt_completion}}
train: {{steps: 1}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=Path, default=common.ROOT / "recipes/data/gsm8k-train.jsonl")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = write_rows(asked.rows, folder)
        train_tokenizer(folder)
        who_where = [(who, cores) for who in ("ours", "TRL") for cores in CORES]
        turns = {f"{who}, {cores}": partial(turn, folder, who, CORES[cores]) for who, cores in who_where}
        found = common.alternate(turns, asked.rounds)
    print(f"{common.machine()}\n{count:,} rows, a vocabulary of {VOCABULARY:,}, {asked.rounds} rounds")
    for length in LENGTHS:
        report(found, str(length))


def write_rows(source: Path, folder: Path) -> int:
    """Prompts that end with a line break, and completions; and 64 rows to warm up."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    lines = [json.dumps({"prompt": row["question"] + "\n", "completion": row["answer"]}) + "\n" for row in rows]
    (folder / "rows.jsonl").write_text("".join(lines))
    (folder / "few.jsonl").write_text("".join(lines[:64]))
    return len(rows)


def train_tokenizer(folder: Path) -> None:
    """Our own, as a recipe that says `tokenizer: {train: 4096}` gets it."""
    from fsdptrain.config.plan import make_plan
    from fsdptrain.config.reader import load
    from fsdptrain.config.topology import Topology
    from fsdptrain.data.tokenizer import load_tokenizer

    os.environ["FSDPTRAIN_CACHE"] = str(folder / "trained")
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, size=VOCABULARY))
    plan = make_plan(load(folder / "recipe.yaml"), Topology("cpu", 1, 1))
    load_tokenizer(plan, lambda *_: None).save_pretrained(folder / "tokenizer")


def turn(folder: Path, who: str, cores: int) -> Found:
    """One contender's measurements, each in a fresh process: with an empty cache, then with what that left there."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    environment = os.environ | {
        "FSDPTRAIN_CACHE": f"{folder}/cache", "HF_DATASETS_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true" if cores > 1 else "false", "TOLD": f"{folder}/told.json",
        "CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    words, found = [sys.executable, __file__, who, str(cores), str(folder)], {}
    for cache in ("cold", "warm"):
        subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, check=True)
        found[cache] = json.loads((folder / "told.json").read_text())
    return found


def ours(_cores: int, folder: Path) -> dict[int, dict[str, float]]:
    """Our preparation, first batch and access to positions, for every sequence length."""
    import numpy as np
    from transformers import AutoTokenizer

    from fsdptrain.config.schema import Data
    from fsdptrain.data.corpus import Stream, open_corpus

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")

    def prepared(name: str, length: int) -> Any:
        data = Data(path=name, format="prompt_completion", seq_len=length, packing="bfd")
        corpus = open_corpus(str(folder / name), data, tokenizer, None, lambda *_: None)
        return Stream(corpus, np.arange(len(corpus)), seed=0)

    def position(stream: Any, first: int) -> float:
        return statistics.median(timed(stream.batch, [first + i])[0] for i in range(64))

    prepared("few.jsonl", 64).batch([0])
    found = {}
    for length in LENGTHS:
        seconds, stream = timed(prepared, "rows.jsonl", length)
        first, _ = timed(stream.batch, range(BATCH))
        found[length] = {
            "prepare": seconds, "first": seconds + first, "tokens": int(stream.corpus.pieces[:, 1].sum()),
            "blocks": len(stream), "near": position(stream, 0), "far": position(stream, FAR * len(stream)),
        }  # fmt: skip
    return found


def theirs(cores: int, folder: Path) -> dict[int, dict[str, float]]:
    """TRL's preparation and first batch, for every sequence length."""
    import datasets
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)

    def read(name: str, length: int) -> Any:
        own = f"{folder}/cache/{length}"
        return datasets.load_dataset("json", data_files=f"{folder}/{name}", split="train", cache_dir=own)

    args = SFTConfig(
        output_dir=str(folder / "trl"), packing=True, packing_strategy="bfd", max_length=64, bf16=False, use_cpu=True,
        per_device_train_batch_size=BATCH, dataset_num_proc=cores if cores > 1 else None, report_to=[],
    )  # fmt: skip
    trainer = SFTTrainer(
        LlamaForCausalLM(config), args, train_dataset=read("few.jsonl", 64), processing_class=tokenizer
    )

    def prepared(length: int) -> Any:
        return trainer._prepare_dataset(read("rows.jsonl", length), tokenizer, args, True, None, "train")

    found = {}
    for length in LENGTHS:
        args.max_length = length
        seconds, packed = timed(prepared, length)
        trainer.train_dataset = packed
        first, _ = timed(lambda: next(iter(trainer.get_train_dataloader())))
        found[length] = {
            "prepare": seconds, "first": seconds + first, "tokens": sum(map(sum, packed["seq_lengths"])),
            "blocks": len(packed),
        }  # fmt: skip
    return found


def timed(work: Callable[..., T], *given: Any) -> tuple[float, T]:
    """The seconds that it takes, and what it gives."""
    started, result = time.perf_counter(), work(*given)
    return time.perf_counter() - started, result


def report(found: dict[str, list[Found]], length: str) -> None:
    """The table of one sequence length, and what stands in relation to what."""

    def median(name: str, cache: str, what: str) -> float:
        return statistics.median(turn[cache][length][what] for turn in found[name])

    print(f"\nsequences of {length}")
    print(f"{'cores':9}{'tokens':>11}{'tokens/s':>11}{'seconds':>9}{'packed share':>14}{'warm: first batch s':>21}")
    for name in found:
        tokens, blocks, seconds = (median(name, "cold", what) for what in ("tokens", "blocks", "prepare"))
        share, warm = tokens / (blocks * int(length)), median(name, "warm", "first")
        print(f"{name:9}{tokens:11,.0f}{tokens / seconds:11,.0f}{seconds:9.2f}{share:14.2%}{warm:21.3f}")
    for label, (cores, their_cores) in PAIRS.items():
        mine, other = f"ours, {cores}", f"TRL, {their_cores}"
        cold, warm = (median(other, *what) / median(mine, *what) for what in (("cold", "prepare"), ("warm", "first")))
        print(f"{label}: TRL's seconds to ours {cold:.2f}, to the first batch from a warm cache {warm:.1f}")
    near, far = (1000 * median("ours, all", "warm", place) for place in ("near", "far"))
    print(f"one sequence of ours: {near:.3f} ms in epoch 0, {far:.3f} ms in epoch {FAR:,}: {far / near:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] in (["ours"], ["TRL"]):
        common.tell((ours if sys.argv[1] == "ours" else theirs)(int(sys.argv[2]), Path(sys.argv[3])))
    main()
