"""The share of a step in which the ranks of a pipeline wait for one another, beside the formula of the papers.

    python benchmarks/bubble.py [--schedule 1f1b] [--rounds 3]

Two ranks on this CPU, with one thread each, train eight equal layers with 1, 2, 4 … micro-batches a step. What a rank
waits for messages is measured inside the passes of a step, of which (P - 1) / (M + P - 1) is expected: P ranks with
equal stages, M micro-batches (times the stages of a rank). A machine whose cores are busy shows more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from common import LLAMA, RANKS, ROOT, alternate, describe_machine, run_ranks

RANKS_OF_PIPELINE, CHUNKS = 2, {"1f1b": 1, "gpipe": 1, "interleaved": 2}
RECIPE = """
model: {config: CONFIG, tokenizer: {train: 512}, init: random}
data: {path: ROOT/recipes/data/tinyshakespeare.txt, seq_len: 512, packing: concat}
fsdp: {mixed_precision: {param_dtype: float32}}
train: {steps: 100, global_batch_size: 1, micro_batch_size: 1}
parallel: {pipeline: 2}
checkpoint: {every: null}
launch: {nproc_per_node: 2}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=CHUNKS, default="1f1b")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        config = json.dumps(LLAMA | {"vocab_size": 512, "num_hidden_layers": 8})
        path.write_text(RECIPE.replace("CONFIG", config).replace("ROOT", str(ROOT)))

        def waits(micro_batches: int) -> float:
            overrides = [f"train.global_batch_size={micro_batches}", f"parallel.schedule={options.schedule}"]
            job = {"device": "cpu", "recipe": str(path), "overrides": overrides, "steps": 6}
            arguments = "share_of_waits", json.dumps(job)
            return statistics.mean(run_ranks(RANKS, RANKS_OF_PIPELINE, *arguments, FSDPTRAIN_CACHE=f"{folder}/cache"))

        counts = [count for count in (1, 2, 4, 8, 16) if options.schedule != "interleaved" or count > 1]
        contenders = {f"{count}": lambda count=count: waits(count) for count in counts}
        found = alternate(contenders, options.rounds)
    print(f"{options.schedule}: micro-batches, measured (median of {options.rounds}), formula")
    for count in counts:
        filled = count * CHUNKS[options.schedule]
        expected = (RANKS_OF_PIPELINE - 1) / (filled + RANKS_OF_PIPELINE - 1)
        print(f"{count:4}  {statistics.median(found[f'{count}']):6.1%}  {expected:6.1%}")


if __name__ == "__main__":
    main()
