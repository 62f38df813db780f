"""Profile a step: a trace for chrome://tracing or Perfetto, and a table of operators.

    python benchmarks/step.py [RECIPE] [key=value ...] [--steps 5] [--out runs/profile]

Runs the ranks of the recipe on this machine (by default the shape `small` of benchmarks/throughput.py), makes some
steps, and then records the next ones on rank 0 with torch's profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from common import LLAMA, ROOT, describe_machine, exit_with_result, run_ranks

WARM_UP = 3  # steps
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
    from fsdptrain.config.reader import load
    from fsdptrain.launch.launcher import GLIBC_TUNABLES
    from fsdptrain.plan.plan import make_plan
    from fsdptrain.plan.topology import find_topology

    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = options.recipe
        if path is None:
            path = Path(folder) / "recipe.yaml"
            config = json.dumps(LLAMA | {"vocab_size": 8192})
            path.write_text(SMALL.replace("LLAMA", config).replace("ROOT", str(ROOT)))
        written = load(path, [f"output_dir={folder}/run", *options.overrides])
        plan = make_plan(written, find_topology(written.recipe, {}))
        (Path(folder) / "plan.json").write_text(plan.to_json())
        arguments = (folder, str(options.steps), str(options.out.resolve()))
        settings = {"FSDPTRAIN_CACHE": f"{folder}/cache", "GLIBC_TUNABLES": GLIBC_TUNABLES}  # as in a run on a CPU
        if plan.topology.device == "cuda":
            settings["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(plan.topology.nproc_per_node)))
        results = run_ranks(Path(__file__), plan.topology.nproc_per_node, *arguments, **settings)
    print(describe_machine())
    print(f"a step of rank 0: {results[0]['step_s']:.3f} s; with the profiler {results[0]['profiled_s']:.3f} s")
    print(results[0]["table"])
    print(f"trace: {options.out / 'trace.json'}")


def measure(folder: Path, steps: int, out: Path) -> NoReturn:
    """Set up one rank as the worker does, make a few steps, and then profiled ones."""
    from torch.profiler import ProfilerActivity, profile

    from fsdptrain.folder.events import Reporter
    from fsdptrain.plan.plan import Plan
    from fsdptrain.processes import StopRequest
    from fsdptrain.train.setup import Session
    from fsdptrain.train.trainer import Trainer
    from fsdptrain.train.watchdog import Watchdog

    plan = Plan.from_json((folder / "plan.json").read_text())
    plan.rundir.root.mkdir(parents=True, exist_ok=True)  # as the command does
    watchdog = Watchdog(plan, int(os.environ["RANK"]))
    trainer = Trainer.set_up(Session(plan, Reporter(None), StopRequest(), watchdog))
    step_s = statistics.median(seconds(trainer.step, step) for step in range(WARM_UP + steps))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if trainer.world.device.type == "cuda" else [])]
    with profile(activities=activities) as recorded:
        profiled = [seconds(trainer.step, step) for step in range(WARM_UP + steps, WARM_UP + 2 * steps)]
    if trainer.world.rank:
        exit_with_result(None)
    recorded.export_chrome_trace(str(out / "trace.json"))
    table = recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50)
    exit_with_result({"step_s": step_s, "profiled_s": statistics.median(profiled), "table": table})


def seconds(work: Any, *args: Any) -> float:
    started = time.perf_counter()
    work(*args)
    return time.perf_counter() - started


if __name__ == "__main__":
    if "RESULT_FILE" in os.environ:
        measure(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
