"""Time of saving a checkpoint, and how long it blocks: fsdptrain and torch.distributed.checkpoint (DCP) in one run.

    python benchmarks/checkpoint.py [--rounds 5] [--folder DIR]

Two gloo ranks hold a Llama of 148 million parameters with AdamW's moments. In every round each method saves once, in an
order of the round's own, because a save is slower after some others. All methods write to the same folder, which should
be on the disk that is to be measured. The output has the medians of the slower rank's seconds; `ours` is fsdptrain, by
default with `checkpoint.verify: read-back`. `checksum` (which is computed while the disk is busy) and `read back` are
parts that DCP does not have: DCP neither hashes nor reads back what it wrote. `resume` is fsdptrain's: it verifies the
checkpoint and reads it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from common import ROOT, exit_with_result, run_ranks, set_up_rank

WORLD = 2
LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 12,
    "num_attention_heads": 12,
}  # fmt: skip
RECIPE = f"""
output_dir: OUTPUT
model: {{config: {json.dumps(LLAMA)}, tokenizer: {{train: 512}}, init: random}}
data: {{path: {ROOT}/recipes/data/tinyshakespeare.txt, seq_len: 128}}
fsdp: {{mixed_precision: {{param_dtype: float32}}}}
train: {{steps: 1000000, global_batch_size: 2}}
checkpoint: {{keep: 1, every: null}}
launch: {{nproc_per_node: {WORLD}}}
"""
Times = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder, removed at the end")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        (Path(folder) / "recipe.yaml").write_text(RECIPE.replace("OUTPUT", f"{folder}/run"))
        arguments = str(options.rounds), folder
        report(run_ranks(Path(__file__), WORLD, *arguments, FSDPTRAIN_CACHE=f"{folder}/cache")[0])


def report(results: dict[str, Any]) -> None:
    """Print the table and the ratios."""
    size, times = results["bytes"], results["times"]

    def median(method: str, part: str) -> float:
        return statistics.median(seconds.get(part, 0.0) for seconds in times[method])

    print(f"\n{size / 1e9:.3f} GB of {results['parameters']:,} parameters and moments, {len(times['plain'])} rounds")
    parts = ("write", "fsync", "checksum", "read back")
    print(
        f"{'':14}{'GB/s':>7}{'total s':>9}{'blocked s':>11}{'later s':>9}" + "".join(f"{p + ' s':>13}" for p in parts)
    )
    for method in times:
        total, blocked = median(method, "total"), median(method, "blocked")
        row = f"{method:14}{size / total / 1e9:7.2f}{total:9.2f}{blocked:11.2f}{total - blocked:9.2f}"
        print(row + "".join(f"{median(method, part):13.2f}" for part in parts))
    blocked, dcp_blocked = median("ours async", "blocked"), median("dcp async", "blocked")
    print(f"\nfsdptrain, an async save blocks for {blocked / median('ours sync', 'total'):.1%} of a sync save")
    print(f"fsdptrain, the first async save, which allocates the copy, blocks for {results['first']:.2f} s")
    print(f"blocked, async, fsdptrain / DCP: {blocked / dcp_blocked:.2f}")
    for method, verify in (("ours sync", "read-back"), ("ours checksum", "checksum")):
        ratio = median(method, "total") / median("dcp sync", "total")
        print(f"total, sync, fsdptrain with checkpoint.verify: {verify} / DCP: {ratio:.2f}")
    print(f"the disk alone (plain): write {median('plain', 'write'):.2f} s, fsync {median('plain', 'fsync'):.2f} s")


def measure(rounds: int, folder: Path) -> NoReturn:
    """Run one rank; pass on the times of the slowest."""
    import torch.distributed as dist

    from fsdptrain.config.reader import load
    from fsdptrain.plan.plan import make_plan
    from fsdptrain.plan.topology import Topology

    run = set_up_rank(make_plan(load(folder / "recipe.yaml"), Topology("cpu", 1, WORLD)))
    methods = methods_of(run, folder)
    times: dict[str, list[Times]] = {method: [] for method in methods}
    first = 0.0
    for number in range(rounds + 1):  # round 0 is the warm-up
        for method in random.Random(number).sample(list(methods), len(methods)):
            os.sync()
            dist.barrier(run.world.side)
            seconds = methods[method](number)
            of_ranks: list[Any] = [None] * WORLD
            dist.all_gather_object(of_ranks, seconds, group=run.world.side)
            slowest = {part: max(each[part] for each in of_ranks) for part in seconds}
            if number:
                times[method].append(slowest)
            elif method == "ours async":
                first = slowest["blocked"]
    parameters = run.sizes.counts.trained
    dist.barrier(run.world.side)
    exit_with_result({"times": times, "parameters": parameters, "bytes": 12 * parameters, "first": first})


def methods_of(run: Any, folder: Path) -> dict[str, Callable[[int], Times]]:
    """Return each method of saving, as a function of the round that returns this rank's seconds."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    model, optimizer = run.engine.model, run.engine.optimizer
    parts, steps = time_parts(), iter(range(1, 10**6))

    def save_with_fsdptrain(wait: bool, verify: str = "read-back") -> Times:
        run.plan.recipe.checkpoint.verify = verify
        parts.clear()
        started = time.perf_counter()
        run.checkpointer.save(next(steps), model, optimizer, wait)
        blocked = time.perf_counter() - started
        run.checkpointer.wait()
        return {"total": time.perf_counter() - started, "blocked": blocked, **parts}

    def save_with_dcp(number: int, wait: bool) -> Times:
        target = folder / f"dcp-{number}-{wait}"
        started = time.perf_counter()
        state = {"model": model.state_dict(), "optim": optimizer_state(model, optimizer)}
        save = dcp.save if wait else dcp.async_save
        saving = save(state, checkpoint_id=target, process_group=run.world.side)
        blocked = time.perf_counter() - started
        if not wait:
            saving.result()
        total = time.perf_counter() - started
        dist.barrier(run.world.side)
        shutil.rmtree(target, ignore_errors=True)
        return {"total": total, "blocked": blocked}

    def write_plainly(_: int) -> Times:
        """Write the bytes of this rank's shards to one file, to measure the disk alone."""
        from fsdptrain.checkpoint.shards import shards_of

        target = folder / f"plain-{run.world.rank}"
        pieces = [
            shard.local.contiguous().numpy() for shard in shards_of(model, optimizer, run.plan.recipe.optim).values()
        ]
        started = time.perf_counter()
        with target.open("wb", buffering=0) as stream:
            for piece in pieces:
                stream.write(piece.data.cast("B")) if piece.size else None
            written = time.perf_counter()
            os.fsync(stream.fileno())
        ended = time.perf_counter()
        target.unlink()
        return {
            "total": ended - started,
            "blocked": ended - started,
            "write": written - started,
            "fsync": ended - written,
        }

    def resume(_: int) -> Times:
        started = time.perf_counter()
        run.checkpointer.load_newest(model, optimizer)
        total = time.perf_counter() - started
        return {"total": total, "blocked": total}

    return {
        "ours sync": lambda _: save_with_fsdptrain(wait=True),
        "ours checksum": lambda _: save_with_fsdptrain(wait=True, verify="checksum"),
        "ours async": lambda _: save_with_fsdptrain(wait=False),
        "dcp sync": lambda number: save_with_dcp(number, wait=True),
        "dcp async": lambda number: save_with_dcp(number, wait=False),
        "plain": write_plainly,
        "resume": resume,
    }


def optimizer_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's state by name, as DTensors; torch's get_state_dict knows no optimizer of local parts."""
    from torch.distributed.tensor import DTensor

    from fsdptrain.checkpoint.shards import named_parts

    params, state = dict(model.named_parameters()), {}
    for name, part in named_parts(optimizer).items():
        param = params[name]
        for key, value in optimizer.state[part].items():
            if value.numel() == part.numel():
                local = value.view(param.to_local().shape)
                shape = {"shape": param.shape, "stride": param.stride()}
                value = DTensor.from_local(local, param.device_mesh, param.placements, run_check=False, **shape)
            state[f"{name}.{key}"] = value
    return state


def time_parts() -> Times:
    """Wrap the parts of a save of fsdptrain; return their seconds, which every save adds to."""
    from fsdptrain.checkpoint import save as checkpoint

    parts: Times = {}

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed_work(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                parts[name] = parts.get(name, 0.0) + time.perf_counter() - started

        return timed_work

    names = {"save_file": "write", "fsync": "fsync", "checksum_of": "checksum", "file_holds": "read back"}
    for function, name in names.items():
        setattr(checkpoint, function, timed(name, getattr(checkpoint, function)))
    return parts


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(int(sys.argv[1]), Path(sys.argv[2]))
    main()
