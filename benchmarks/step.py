"""Profile a step: a trace for chrome://tracing or Perfetto, and a table of operators.

    python benchmarks/step.py [RECIPE] [key=value ...] [--steps 5] [--out runs/profile]

Runs the ranks of the recipe on this machine (by default the shape `small` of benchmarks/throughput.py), makes some
steps, and then records the next ones on rank 0 with torch's profiler.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from common import LLAMA, RANKS, ROOT, describe_machine, run_ranks

from fsdptrain.config.reader import load
from fsdptrain.launch.launcher import GLIBC_TUNABLES
from fsdptrain.plan.topology import find_topology

SMALL = """
model: {config: LLAMA, tokenizer: {train: 8192}, init: random}
data: {path: ROOT/recipes/data/tinyshakespeare.txt, seq_len: 512, packing: concat}
train: {steps: 100, global_batch_size: 8, micro_batch_size: 4}
checkpoint: {every: null}
launch: {nproc_per_node: 2}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", type=Path)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/profile", help="folder for the trace")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = options.recipe
        if path is None:
            path = Path(folder) / "recipe.yaml"
            config = json.dumps(LLAMA | {"vocab_size": 8192})
            path.write_text(SMALL.replace("LLAMA", config).replace("ROOT", str(ROOT)))
        overrides = [*options.overrides, f"output_dir={folder}/run"]
        topology = find_topology(load(path, overrides).recipe, {})
        job = {"device": topology.device, "recipe": str(path.resolve()), "folder": str(options.out.resolve())}
        settings = {"FSDPTRAIN_CACHE": f"{folder}/cache", "GLIBC_TUNABLES": GLIBC_TUNABLES}  # as in a run on a CPU
        if topology.device == "cuda":
            settings["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(topology.nproc_per_node)))
        arguments = "profiled", json.dumps(job | {"steps": options.steps, "overrides": overrides})
        found, *_ = run_ranks(RANKS, topology.nproc_per_node, *arguments, **settings)
    print(describe_machine())
    print(f"a step of rank 0: {found['step_s']:.3f} s; with the profiler {found['profiled_s']:.3f} s")
    print((options.out / "profile.txt").read_text())
    print(f"trace: {options.out / 'profile.json.gz'}")


if __name__ == "__main__":
    main()
