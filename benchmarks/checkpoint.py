"""How long saving a checkpoint takes and blocks: fsdptrain's beside torch.distributed.checkpoint's, in one run.

    python benchmarks/checkpoint.py [--rounds 5] [--folder DIR]

Two gloo ranks hold a Llama of 148 million parameters with AdamW's moments. In every round each way of saving has its
turn, the first of one round being the last of the next; all write to the same folder, which should be on the disk that
matters. Printed are medians of the slower rank's seconds. `checksum` and `read back` are parts of our background time
that DCP has no counterpart of: it neither hashes nor reads again what it wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parent.parent
WORLD = 2
RECIPE = f"""
output_dir: OUTPUT
model:
  config: {{model_type: llama, vocab_size: 32000, hidden_size: 768, intermediate_size: 2560, num_hidden_layers: 12,
            num_attention_heads: 12}}
  tokenizer: {{train: 512}}
  init: random
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
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
        free.close()
        (Path(folder) / "recipe.yaml").write_text(RECIPE.replace("OUTPUT", f"{folder}/run"))
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(WORLD)}
        environment |= {
            "LOCAL_WORLD_SIZE": str(WORLD),
            "CUDA_VISIBLE_DEVICES": "",
            "FSDPTRAIN_CACHE": f"{folder}/cache",
        }
        words = [sys.executable, __file__, "--rounds", str(asked.rounds), "--folder", folder]
        ranks = [
            subprocess.Popen(
                words, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.DEVNULL
            )
            for rank in range(WORLD)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            sys.exit(f"the ranks ended with {codes}")
        report(json.loads((Path(folder) / "found.json").read_text()))


def report(found: dict[str, Any]) -> None:
    """The table, and what stands in relation to what."""
    size, times = found["bytes"], found["times"]

    def median(way: str, what: str) -> float:
        return statistics.median(each.get(what, 0.0) for each in times[way])

    print(f"\n{size / 1e9:.2f} GB of {found['parameters']:,} parameters and moments, {len(times['plain'])} rounds")
    print(f"{'':14}{'GB/s':>7}{'total s':>9}{'blocked s':>11}{'background s':>14}{'checksum s':>12}{'read back s':>13}")
    for way in times:
        total, blocked = median(way, "total"), median(way, "blocked")
        print(
            f"{way:14}{size / total / 1e9:7.2f}{total:9.2f}{blocked:11.2f}{total - blocked:14.2f}"
            f"{median(way, 'checksum'):12.2f}{median(way, 'read back'):13.2f}"
        )
    ours, theirs = median("ours async", "blocked"), median("dcp async", "blocked")
    print(f"\nblocked, of a synchronous save: ours {ours / median('ours sync', 'total'):.1%}")
    print(f"blocked, in the first save, which gets the memory for the copy: {found['first']:.2f} s")
    print(f"blocked, async, ours to DCP's: {ours / theirs:.2f}")
    print(f"total, sync, ours to DCP's: {median('ours sync', 'total') / median('dcp sync', 'total'):.2f}")
    shares = {part: median("ours sync", part) / median("ours sync", "total") for part in ("checksum", "read back")}
    print(f"of a synchronous save of ours: checksum {shares['checksum']:.1%}, read back {shares['read back']:.1%}")
    print(f"the disk alone (plain): write {median('plain', 'write'):.2f} s, fsync {median('plain', 'fsync'):.2f} s")


def measure(rounds: int, folder: Path) -> NoReturn:
    """Be one rank; rank 0 leaves the times in `found.json`."""
    import torch.distributed as dist

    from fsdptrain.config.plan import make_plan
    from fsdptrain.config.reader import load
    from fsdptrain.config.topology import Topology
    from fsdptrain.events import Reporter
    from fsdptrain.processes import StopRequest
    from fsdptrain.rundir import RunDir
    from fsdptrain.train.setup import Session
    from fsdptrain.train.trainer import Trainer
    from fsdptrain.train.watchdog import Watchdog

    plan = make_plan(load(folder / "recipe.yaml"), Topology("cpu", 1, WORLD))
    session = Session(plan, RunDir(Path(plan.run_dir)), Reporter(None), StopRequest(), Watchdog(plan, 0))
    run = Trainer.set_up(session)
    ways = ways_of(run, folder)
    times: dict[str, list[Times]] = {way: [] for way in ways}
    first = 0.0
    for number in range(rounds + 1):  # the first is for warming up
        for way in list(ways) if number % 2 else reversed(list(ways)):
            os.sync()
            dist.barrier(run.world.side)
            mine = ways[way](number)
            everyone: list[Any] = [None] * WORLD
            dist.all_gather_object(everyone, mine, group=run.world.side)
            slowest = {what: max(each[what] for each in everyone) for what in mine}
            if number:
                times[way].append(slowest)
            elif way == "ours async":
                first = slowest["blocked"]
    parameters = run.sizes.parameters
    if run.world.rank == 0:
        (folder / "found.json").write_text(
            json.dumps({"times": times, "parameters": parameters, "bytes": 12 * parameters, "first": first})
        )
    dist.barrier(run.world.side)
    sys.stdout.flush()
    os._exit(0)


def ways_of(run: Any, folder: Path) -> dict[str, Callable[[int], Times]]:
    """Each way of saving, as a function of the round that returns this rank's seconds."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = run.engine.model, run.engine.optimizer
    parts, steps = watch_parts(), iter(range(1, 10**6))

    def ours(wait: bool) -> Times:
        parts.clear()
        started = time.perf_counter()
        run.checkpointer.save(next(steps), model, optimizer, wait)
        blocked = time.perf_counter() - started
        run.checkpointer.wait()
        return {"total": time.perf_counter() - started, "blocked": blocked, **parts}

    def theirs(number: int, wait: bool) -> Times:
        target = folder / f"dcp-{number}-{wait}"
        started = time.perf_counter()
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        save = dcp.save if wait else dcp.async_save
        saving = save(state, checkpoint_id=target, process_group=run.world.side)
        blocked = time.perf_counter() - started
        if not wait:
            saving.result()
        total = time.perf_counter() - started
        dist.barrier(run.world.side)
        shutil.rmtree(target, ignore_errors=True)
        return {"total": total, "blocked": blocked}

    def plain(_: int) -> Times:
        """The bytes of this rank's shards, one after the other into one file: what the disk can do."""
        from fsdptrain.checkpoint.shards import shards_of

        target = folder / f"plain-{run.world.rank}"
        pieces = [shard.local.contiguous().numpy() for shard in shards_of(model, optimizer).values()]
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

    return {
        "ours sync": lambda _: ours(wait=True),
        "ours async": lambda _: ours(wait=False),
        "dcp sync": lambda number: theirs(number, wait=True),
        "dcp async": lambda number: theirs(number, wait=False),
        "plain": plain,
    }


def watch_parts() -> Times:
    """The seconds our own writing spends in its parts, filled in while it goes."""
    from fsdptrain.checkpoint import save as checkpoint

    parts: Times = {}

    def timed(names: list[str], work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, timed under the first of `names` that is not taken yet, or the last."""

        def working(*given: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return work(*given, **named)
            finally:
                name = next((name for name in names if name not in parts), names[-1])
                parts[name] = parts.get(name, 0.0) + time.perf_counter() - started

        return working

    checkpoint.save_file = timed(["write"], checkpoint.save_file)
    checkpoint.fsync = timed(["fsync"], checkpoint.fsync)
    checkpoint.file_entry = timed(["checksum", "read back"], checkpoint.file_entry)
    return parts


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(int(sys.argv[2]), Path(sys.argv[4]))
    main()
