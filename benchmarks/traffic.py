"""Bytes that a rank sends for a micro-batch and for a step, as `fsdptrain validate` counts them: before and after.

    git worktree add /tmp/before COMMIT
    python benchmarks/traffic.py --before /tmp/before

The counts are the collectives of a simulated step: no GPU is needed. Each layout is validated twice in each version,
which takes about 10 minutes on two cores. Prints a table in GiB, with the two versions as `before → after`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from common import ROOT

GIB = 2**30
MICRO_BATCHES = 8  # of a step
KINDS = {"gathered": ("all-gather",), "reduced": ("reduce-scatter", "all-reduce")}
LAYOUTS = {  # ranks, recipe, overrides
    "8B on 8, FULL_SHARD": (8, "llama3.1-8b-full-shard-8xh100", []),
    "8B on 8, SHARD_GRAD_OP": (8, "llama3.1-8b-full-shard-8xh100", ["fsdp.strategy=SHARD_GRAD_OP"]),
    "70B on 64, FULL_SHARD": (
        64,
        "llama3.3-70b-hybrid-shard-8x8",
        ["fsdp.strategy=FULL_SHARD", "fsdp.shard_size=null"],
    ),
    "70B on 64, HYBRID_SHARD over 32": (64, "llama3.3-70b-hybrid-shard-8x8", []),
}


def sent(checkout: Path, layout: str, micro_batches: int) -> dict[str, float]:
    """Return the GiB that a rank sends in a step of so many micro-batches, by kind of KINDS."""
    ranks, recipe, overrides = LAYOUTS[layout]
    command = [
        sys.executable, "-m", "fsdptrain", "validate", str(checkout / "recipes" / f"{recipe}.yaml"), "--json",
        "--hardware", "h100-80gb", f"train.global_batch_size={ranks * micro_batches}", "train.micro_batch_size=1",
        *overrides,
    ]  # fmt: skip
    print(f"{checkout.name}: {layout}, {micro_batches} micro-batches", file=sys.stderr, flush=True)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=False, cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)}
    )  # exits with 3 if the plan does not fit: the counts are there all the same
    found = json.loads(done.stdout)["collectives"]
    return {name: sum(c["wire"] for c in found if c["kind"] in kinds) / GIB for name, kinds in KINDS.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the version to compare with")
    before = parser.parse_args().before.resolve()
    columns = [f"{kind}, {what}" for what in ("a micro-batch alone", f"a step of {MICRO_BATCHES}") for kind in KINDS]
    print(f"| GiB a rank sends | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
    for layout in LAYOUTS:
        cells = []
        for count in (1, MICRO_BATCHES):
            old, new = sent(before, layout, count), sent(ROOT, layout, count)
            cells += [f"{old[kind]:,.1f} → {new[kind]:,.1f}" for kind in KINDS]
        print(f"| {layout} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
