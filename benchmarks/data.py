"""Time of data preparation (rows on the disk → packed sequences on the disk): fsdptrain and TRL in one run.

    python benchmarks/data.py [--rounds 5] [--rows FILE]

The rows are those of GSM8K (one {"question", "answer"} a line; by default the part that ships with the recipes). The
tokenizer is a byte-level BPE of 4,096 tokens trained on them, packing is `bfd` on both sides. Both contenders read
the same file of prompts and completions; TRL with `load_dataset` and `SFTTrainer._prepare_dataset`. In every round each
contender runs in two fresh processes: the first with an empty cache, the second with the cache of the first. Each
prepares 64 rows before the clock starts, so that imports are not timed; neither is the construction of TRL's trainer.

On `all` cores fsdptrain tokenises with one thread a core (its default), TRL with `dataset_num_proc` processes. TRL's
default is one process and one row at a time, so that the tokenizer's threads do not help. The packed share is real
tokens / (blocks × length). TRL concatenates blocks, so its batches differ in size. The output has medians; `ours` is
fsdptrain.
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
LATE_EPOCH = 1000  # access to a position must not depend on the epoch
Figures = dict[str, dict[str, dict[str, float]]]  # cache ("cold", "warm") → sequence length → what was measured
CORES = {"one": 1, "all": os.cpu_count() or 1}
PAIRS = {
    "one core": ("one", "one"),
    "all cores": ("all", "all"),
    "each by default": ("all", "one"),
}  # cores of fsdptrain, of TRL
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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = write_rows(options.rows, folder)
        train_tokenizer(folder)
        pairs = [(contender, cores) for contender in ("ours", "TRL") for cores in CORES]
        turns = {f"{name}, {cores}": partial(measure, folder, name, CORES[cores]) for name, cores in pairs}
        found = common.alternate(turns, options.rounds)
    print(f"{common.describe_machine()}\n{count:,} rows, a vocabulary of {VOCABULARY:,}, {options.rounds} rounds")
    for length in LENGTHS:
        report(found, str(length))


def write_rows(source: Path, folder: Path) -> int:
    """Write the rows as prompts (ending with a line break) and completions; also the first 64 for the warm-up."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    lines = [json.dumps({"prompt": row["question"] + "\n", "completion": row["answer"]}) + "\n" for row in rows]
    (folder / "rows.jsonl").write_text("".join(lines))
    (folder / "few.jsonl").write_text("".join(lines[:64]))
    return len(rows)


def train_tokenizer(folder: Path) -> None:
    """Train the tokenizer that a recipe with `tokenizer: {train: 4096}` gets."""
    from fsdptrain.config.plan import make_plan
    from fsdptrain.config.reader import load
    from fsdptrain.config.topology import Topology
    from fsdptrain.data.tokenizer import load_tokenizer

    os.environ["FSDPTRAIN_CACHE"] = str(folder / "trained")
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, size=VOCABULARY))
    plan = make_plan(load(folder / "recipe.yaml"), Topology("cpu", 1, 1))
    load_tokenizer(plan, lambda *_: None).save_pretrained(folder / "tokenizer")


def measure(folder: Path, contender: str, cores: int) -> Figures:
    """Measure a contender in fresh processes: first with an empty cache, then with the cache that this left."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    environment = os.environ | {
        "FSDPTRAIN_CACHE": f"{folder}/cache", "HF_DATASETS_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true" if cores > 1 else "false", "RESULT_FILE": f"{folder}/result.json",
        "CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    command, found = [sys.executable, __file__, contender, str(cores), str(folder)], {}
    for cache in ("cold", "warm"):
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        found[cache] = json.loads((folder / "result.json").read_text())
    return found


def measure_fsdptrain(_cores: int, folder: Path) -> dict[int, dict[str, float]]:
    """Time fsdptrain's preparation, first batch and access to a position, for every sequence length."""
    import numpy as np
    from transformers import AutoTokenizer

    from fsdptrain.config.schema import Data
    from fsdptrain.data.corpus import Stream, open_rows, pack_rows

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")

    def prepare(name: str, length: int) -> Any:
        data = Data(path=name, format="prompt_completion", seq_len=length, packing="bfd")
        (corpus,) = pack_rows(open_rows(str(folder / name), data, tokenizer, None, lambda *_: None), data, seed=0)
        return Stream(corpus, np.arange(len(corpus)), seed=0)

    def seconds_a_position(stream: Any, first: int) -> float:
        return statistics.median(timed(stream.batch, [first + i])[0] for i in range(64))

    prepare("few.jsonl", 64).batch([0])
    found = {}
    for length in LENGTHS:
        seconds, stream = timed(prepare, "rows.jsonl", length)
        first, _ = timed(stream.batch, range(BATCH))
        found[length] = {
            "prepare": seconds, "first": seconds + first, "tokens": int(stream.corpus.pieces[:, 1].sum()),
            "blocks": len(stream), "early": seconds_a_position(stream, 0),
            "late": seconds_a_position(stream, LATE_EPOCH * len(stream)),
        }  # fmt: skip
    return found


def measure_trl(cores: int, folder: Path) -> dict[int, dict[str, float]]:
    """Time TRL's preparation and first batch, for every sequence length."""
    import datasets
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)

    def read(name: str, length: int) -> Any:
        cache = f"{folder}/cache/{length}"
        return datasets.load_dataset("json", data_files=f"{folder}/{name}", split="train", cache_dir=cache)

    args = SFTConfig(
        output_dir=str(folder / "trl"), packing=True, packing_strategy="bfd", max_length=64, bf16=False, use_cpu=True,
        per_device_train_batch_size=BATCH, dataset_num_proc=cores if cores > 1 else None, report_to=[],
    )  # fmt: skip
    trainer = SFTTrainer(
        LlamaForCausalLM(config), args, train_dataset=read("few.jsonl", 64), processing_class=tokenizer
    )

    def prepare(length: int) -> Any:
        return trainer._prepare_dataset(read("rows.jsonl", length), tokenizer, args, True, None, "train")

    found = {}
    for length in LENGTHS:
        args.max_length = length
        seconds, packed = timed(prepare, length)
        trainer.train_dataset = packed
        first, _ = timed(lambda: next(iter(trainer.get_train_dataloader())))
        found[length] = {
            "prepare": seconds, "first": seconds + first, "tokens": sum(map(sum, packed["seq_lengths"])),
            "blocks": len(packed),
        }  # fmt: skip
    return found


def timed(work: Callable[..., T], *args: Any) -> tuple[float, T]:
    """Call `work`; return its seconds and its result."""
    started, result = time.perf_counter(), work(*args)
    return time.perf_counter() - started, result


def report(found: dict[str, list[Figures]], length: str) -> None:
    """Print the table of one sequence length, and the ratios."""

    def median(name: str, cache: str, figure: str) -> float:
        return statistics.median(turn[cache][length][figure] for turn in found[name])

    print(f"\nsequences of {length}")
    print(f"{'cores':9}{'tokens':>11}{'tokens/s':>11}{'seconds':>9}{'packed share':>14}{'warm: first batch s':>21}")
    for name in found:
        tokens, blocks, seconds = (median(name, "cold", figure) for figure in ("tokens", "blocks", "prepare"))
        share, warm = tokens / (blocks * int(length)), median(name, "warm", "first")
        print(f"{name:9}{tokens:11,.0f}{tokens / seconds:11,.0f}{seconds:9.2f}{share:14.2%}{warm:21.3f}")
    for label, (cores, trl_cores) in PAIRS.items():
        ours, trl = f"ours, {cores}", f"TRL, {trl_cores}"
        cold, warm = (
            median(trl, *figure) / median(ours, *figure) for figure in (("cold", "prepare"), ("warm", "first"))
        )
        print(f"{label}: seconds of TRL / fsdptrain {cold:.2f}, to the first batch from a warm cache {warm:.1f}")
    early, late = (1000 * median("ours, all", "warm", epoch) for epoch in ("early", "late"))
    print(
        f"fsdptrain, one sequence: {early:.3f} ms in epoch 0, {late:.3f} ms in epoch {LATE_EPOCH:,}: {late / early:.2f}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] in (["ours"], ["TRL"]):
        contender = measure_fsdptrain if sys.argv[1] == "ours" else measure_trl
        common.exit_with_result(contender(int(sys.argv[2]), Path(sys.argv[3])))
    main()
