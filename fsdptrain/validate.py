"""The levels of a dry run below the recipe, in order: plan, machine, data. Run by `fsdptrain validate` in a process.

A level says what it found before the next one starts; a problem ends the run with the exit code of its kind.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from fsdptrain.data import Corpus, prepare
from fsdptrain.errors import FsdptrainError
from fsdptrain.model import load_config
from fsdptrain.plan import Plan
from fsdptrain.report import GIB, Reporter, Screen
from fsdptrain.tokenizer import load_tokenizer

Level = tuple[str, dict[str, Any], list[str]]  # name, facts for --json, lines for the person


def levels(plan: Plan, progress: Any) -> Iterator[Level]:
    """Every level as it passes: (name, facts, lines). Raises the FsdptrainError of the level that does not."""
    yield "plan", *describe_plan(plan)
    yield "machine", *describe_machine(plan)
    tokenizer = load_tokenizer(plan, progress)
    stream, held_out, _ = prepare(plan, tokenizer, progress)
    load_config(plan, len(tokenizer))
    yield "data", *describe_data(plan, stream.corpus, len(stream), len(held_out), tokenizer)


def describe_plan(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """The arithmetic of the run."""
    train, topology = plan.recipe.train, plan.topology
    facts = {
        "strategy": plan.recipe.fsdp.strategy, "world_size": topology.world_size, "replicas": plan.replicas,
        "shard_size": plan.shard_size, "accumulation": plan.accumulation,
        "tokens_per_step": train.global_batch_size * plan.recipe.data.seq_len,
    }  # fmt: skip
    line = (
        f"{facts['strategy']} over {topology.world_size} ranks ({topology.nnodes} × {topology.nproc_per_node} "
        f"{topology.device}): {plan.replicas} × {plan.shard_size}; a step is {train.global_batch_size} sequences = "
        f"{topology.world_size} ranks × {plan.accumulation} micro-batches × {train.micro_batch_size}"
    )
    return facts, [line]


def describe_machine(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """What this machine has of what the run needs."""
    folder = next(path for path in [Path(plan.run_dir), *Path(plan.run_dir).parents] if path.exists())
    free = shutil.disk_usage(folder).free
    gpus = torch.cuda.device_count()
    facts = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gpus": gpus,
        "free_disk_bytes": free,
    }
    line = f"torch {torch.__version__}, transformers {transformers.__version__}, {gpus} GPUs, {free / GIB:.0f} GiB free"
    return facts, [line]


def describe_data(
    plan: Plan, corpus: Corpus, blocks: int, held_out: int, tokenizer: Any
) -> tuple[dict[str, Any], list[str]]:
    """What the rows became, with the first of them decoded."""
    steps = plan.total_steps(blocks)
    facts = {
        **corpus.notes, "sequences": blocks, "eval_sequences": held_out, "fill": corpus.fill(), "steps": steps,
        "vocab_size": len(tokenizer), "example": corpus.show(tokenizer),
    }  # fmt: skip
    notes = corpus.notes
    lines = [
        f"{notes['rows']:,} rows, {notes['tokens']:,} tokens ({notes['label_tokens']:,} trained)",
        f"{blocks:,} sequences of {corpus.seq_len}, {corpus.fill():.1%} real; {held_out:,} held out; {steps:,} steps",
        f"cut {notes['cut']:,}, split {notes['split']:,}, dropped {notes['dropped']:,} rows",
        f"the first sequence, trained parts in ⟦ ⟧:\n{corpus.show(tokenizer)}",
    ]
    return facts, lines


def main() -> None:
    """`python -m fsdptrain.validate [--json]` with a plan on standard input."""
    as_json = "--json" in sys.argv
    plan = Plan.from_json(sys.stdin.read())
    found: dict[str, Any] = {"problems": []}
    code = 0
    with Screen() as screen:
        progress = Reporter(None).progress if as_json else _shown(screen)
        try:
            for name, facts, lines in levels(plan, progress):
                found[name] = facts
                for line in [] if as_json else lines:
                    screen.say(f"{name:>8}  {line}")
        except FsdptrainError as error:
            found["problems"], code = str(error).splitlines(), error.exit_code
            if not as_json:
                print(f"fsdptrain: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps(found, indent=2))
    sys.exit(code)


def _shown(screen: Screen) -> Any:
    def progress(stage: str, done: int, total: int) -> None:
        screen.show({"event": "progress", "stage": stage, "done": done, "total": total})

    return progress


if __name__ == "__main__":
    main()
