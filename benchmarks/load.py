"""Time and memory of loading safetensors into a sharded model: fsdptrain, and transformers on every rank.

    python benchmarks/load.py [--rounds 3] [--folder DIR]

The weights are random: a Llama of 300 million parameters, 0.6 GB of bfloat16 in files of 200 MB, read into float32
master weights as training does. `ours` calls what a worker of fsdptrain calls (`build`, `read_weights`); `transformers`
is `AutoModelForCausalLM.from_pretrained` on every rank. Memory does not count what the process had after its imports
and the start of its process group. `own` is anonymous memory (RssAnon, read every 5 ms). `resident` is the kernel's
high-water mark (VmHWM), which includes mapped pages of the files; the kernel drops these when memory is short. The
target for `own` is the rank's shard in float32, the largest tensor whole, and 200 MB.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import common

WORLDS = (1, 2, 4)
ALLOWANCE = 200e6  # bytes beyond the shard and the largest tensor
SHAPE = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 14,
    "num_attention_heads": 16, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
RECIPE = f"""
output_dir: FOLDER/run
model: {{id: FOLDER/model, tokenizer: {{train: 512}}}}
data: {{path: {common.ROOT}/recipes/data/tinyshakespeare.txt, seq_len: 128}}
train: {{steps: 1, global_batch_size: 4}}
"""
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write the weights; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        (Path(folder) / "recipe.yaml").write_text(RECIPE.replace("FOLDER", folder))
        facts = common.run_ranks(Path(__file__), 1, "write", folder)[0]
        contenders: dict[str, Callable[[], Figures]] = {
            f"{method} {world}": functools.partial(measure, method, world, folder)
            for world in WORLDS
            for method in ("ours", "transformers")
        }
        report(common.alternate(contenders, options.rounds), facts)


def measure(method: str, world: int, folder: str) -> Figures:
    """Run fresh ranks; return the largest of every figure over the ranks."""
    results = common.run_ranks(Path(__file__), world, method, folder)
    return {name: max(each[name] for each in results) for name in results[0]}


def report(found: dict[str, list[Figures]], facts: Figures) -> None:
    """Print the medians of the worst rank, the target, and the ratios."""
    print(common.describe_machine())
    print(f"{facts['params'] / 1e6:.0f} million parameters, {facts['bytes'] / 1e9:.2f} GB of files")
    print(f"{len(next(iter(found.values())))} rounds, medians of the worst rank, MB (10^6 bytes)\n")
    print(f"{'':16}{'ranks':>6}{'seconds':>9}{'own':>8}{'resident':>10}{'shard':>8}{'target':>8}{'own, to target':>16}")
    middle = {name: {w: statistics.median(e[w] for e in each) for w in each[0]} for name, each in found.items()}
    for name, figures in middle.items():
        method, _, world = name.partition(" ")
        shard = 4 * facts["params"] / int(world)
        target = shard + facts["largest"] + ALLOWANCE
        print(
            f"{method:16}{world:>6}{figures['seconds']:9.2f}{figures['own'] / 1e6:8.0f}"
            f"{figures['resident'] / 1e6:10.0f}{shard / 1e6:8.0f}{target / 1e6:8.0f}{figures['own'] / target:14.2f} x"
        )
    for world in WORLDS:
        ours, transformers = middle[f"ours {world}"], middle[f"transformers {world}"]
        ratios = {name: ours[name] / transformers[name] for name in ours}
        print(f"fsdptrain / transformers, {world} ranks: " + ", ".join(f"{name} {r:.2f}" for name, r in ratios.items()))


class Peak:
    """Measures the peak of anonymous and of resident memory within a `with` block, minus the memory at its start."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        self._before, self._resident = common.process_memory("RssAnon"), common.rss()
        self._most, self._ended = self._before, threading.Event()
        self._started = time.perf_counter()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        seconds = time.perf_counter() - self._started
        self._ended.set()
        self._thread.join()
        own = max(self._most, common.process_memory("RssAnon")) - self._before
        self.figures = {"seconds": seconds, "own": own, "resident": common.peak_rss() - self._resident}

    def _poll(self) -> None:
        while not self._ended.wait(0.005):
            self._most = max(self._most, common.process_memory("RssAnon"))


def load_with_fsdptrain(folder: Path) -> None:
    """Load on one rank as a worker does."""
    import torch
    import torch.distributed as dist

    from fsdptrain.config.plan import make_plan
    from fsdptrain.config.reader import load
    from fsdptrain.config.topology import Topology
    from fsdptrain.model.config import load_config
    from fsdptrain.model.skeleton import skeleton
    from fsdptrain.model.weights import read_weights
    from fsdptrain.parallel.shard import build
    from fsdptrain.parallel.world import World
    from fsdptrain.processes import StopRequest

    plan = make_plan(load(folder / "recipe.yaml"), Topology("cpu", 1, int(os.environ["WORLD_SIZE"])))
    world = World.start(plan, StopRequest())
    config = load_config(plan, None)
    import_model_class(config)
    dist.barrier(world.side)
    with Peak() as peak:
        bare = skeleton(config, plan.recipe.model)
        model, _ = build(plan, config, world)
        read_weights(model, bare, plan, torch.device("cpu"), lambda stage, done, total: None)
        dist.barrier(world.side)
    common.exit_with_result(peak.figures)


def load_with_transformers(folder: Path) -> None:
    """Load the whole model on one rank."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    import_model_class(AutoConfig.from_pretrained(folder / "model"))
    dist.barrier()
    with Peak() as peak:
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        dist.barrier()
    common.exit_with_result(peak.figures)


def import_model_class(config: object) -> None:
    """Import the module of the architecture, which transformers would otherwise import while it loads."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def write(folder: Path) -> None:
    """Write the random model that is loaded."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16)
    model.save_pretrained(folder / "model", max_shard_size="200MB")
    sizes = [param.numel() for param in model.parameters()]
    files = [path.stat().st_size for path in (folder / "model").glob("*.safetensors")]
    common.exit_with_result({"params": sum(sizes), "largest": 4 * max(sizes), "bytes": sum(files)})


if __name__ == "__main__":
    if "RANK" in os.environ:
        roles = {"ours": load_with_fsdptrain, "transformers": load_with_transformers, "write": write}
        roles[sys.argv[1]](Path(sys.argv[2]))
    main()
