"""FULL_SHARD and HYBRID_SHARD on 1 to 128 nodes of 8 × H100 80 GB, as forecast: time, memory, traffic, goodput.

    python benchmarks/nodes.py --plot docs/nodes.png

Llama 3.3 70B, one sequence of 4,096 tokens a rank on any number of nodes: the whole model, and LoRA. The figures are
forecasts as `fsdptrain validate --advise` makes them: a step of two shallow copies of the model is simulated for each
layout, its trace replayed for each network, and the result extrapolated to all blocks. HYBRID_SHARD has the smallest
groups of whole nodes in which FULL_SHARD fits. No GPU is needed. Prints a table as Markdown.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from dataclasses import dataclass
from pathlib import Path

from common import ROOT

from fsdptrain.checkpoint.disk import disk_facts
from fsdptrain.config.hardware import KNOWN
from fsdptrain.config.plan import Counts, Plan, draft_plan
from fsdptrain.config.reader import load
from fsdptrain.config.topology import Topology
from fsdptrain.forecast.client import Forecast
from fsdptrain.forecast.goodput import goodput
from fsdptrain.forecast.shallow import Shallow, extrapolate
from fsdptrain.model.adapter import quantised_ids
from fsdptrain.model.config import load_config
from fsdptrain.model.flops import model_flops
from fsdptrain.model.parameters import weights_of
from fsdptrain.simulate import server
from fsdptrain.simulate.device import PRETEND
from fsdptrain.simulate.step import simulate
from fsdptrain.text import GIB

CARD = KNOWN["h100-80gb"]
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
TRAINED = {"whole model": "llama3.3-70b-hybrid-shard-8x8", "LoRA": "llama3.3-70b-lora"}  # recipes
# Bytes/s of a rank: nine tenths of the line, as the table of cards has it for 400 Gb/s a GPU.
NETWORKS = {"400 Gb/s a GPU": CARD.inter_bw, "400 Gb/s a node": 5.6e9, "100 Gb/s a node": 1.4e9}
MTBF_HOURS = 6300.0  # of a node: Llama 3's 16,384 H100s had a failure every 3.1 hours (arXiv:2407.21783, section 3.3.4)
WEEK = 7 * 24.0


@dataclass(frozen=True)
class Row:
    """The forecast of one layout; `group` is the number of nodes that share a copy. Times are in seconds.

    `inside` and `network` are the bytes a step that a rank sends to its own node and to others; `step_s` is by the name
    of the network, `goodput_hours` those of a week in which new steps are made, on the fastest network.
    """

    trained: str
    strategy: str
    nodes: int
    group: int
    fits: bool
    needed: int
    inside: int
    network: int
    step_s: dict[str, float]
    goodput_hours: float


def main() -> None:
    """Print the table, and draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plot", type=Path, help="draw the rows into this file")
    plot = parser.parse_args().plot
    rows = []
    for trained in TRAINED:
        full = [forecast(trained, "FULL_SHARD", nodes) for nodes in NODES]
        group = next(row.nodes for row in full if row.fits)
        hybrid = [forecast(trained, "HYBRID_SHARD", nodes, group) for nodes in NODES if nodes > group]
        rows += [row for row in full if row.fits] + hybrid
        print(table([*full, *hybrid]), end="\n\n", flush=True)
    if plot:
        draw(rows, plot)


def forecast(trained: str, strategy: str, nodes: int, group: int | None = None) -> Row:
    """Forecast a step of a layout on every network."""
    print(f"{trained}, {strategy} on {nodes} nodes", file=sys.stderr, flush=True)
    plan = plan_of(trained, strategy, nodes, group)
    shallow = shallow_of(trained)
    few, more = depths = shallow.depths(plan) or (0, 0)
    copies = [forecasts_of_copy(trained, shallow.cut(plan, depth), depth) for depth in depths]
    found = {name: extrapolate(copies[0][name], copies[1][name], few, more, shallow.layers) for name in NETWORKS}
    fastest = next(iter(NETWORKS))
    best = found[fastest]
    step_s = {name: each.step_s for name, each in found.items() if each}
    assert best is not None and len(step_s) == len(NETWORKS)
    # Each further block sends the same bytes.
    sent = [[sum(each[key] for each in copy[fastest].collectives) for key in ("wire", "network")] for copy in copies]
    wire, network = (round(a + (b - a) * (shallow.layers - few) / (more - few)) for a, b in zip(*sent, strict=True))
    model = models_of(trained).skeleton(plan)
    disk = disk_facts(plan, weights_of(model, quantised_ids(model, plan.recipe)).values(), None)
    lost = goodput(plan, CARD, best.step_s, disk["checkpoint_bytes"], MTBF_HOURS)
    return Row(
        trained, strategy, nodes, group or nodes, best.fits and not best.tight, best.needed_bytes, wire - network,
        network, step_s, WEEK * lost.share,
    )  # fmt: skip


def forecasts_of_copy(trained: str, plan: Plan, depth: int) -> dict[str, Forecast]:
    """Simulate a step of a shallow copy once; return its forecast on each network."""
    models = models_of(trained, depth)
    plan = models.with_kernel(plan)
    model = models.skeleton(plan)
    counts = Counts.of(weights_of(model, quantised_ids(model, plan.recipe)).values())
    trace = simulate(plan, models.config, True, CARD)
    tokens = plan.recipe.train.global_batch_size * plan.recipe.data.seq_len
    flops = model_flops(model, tokens, plan.recipe.data.seq_len)
    rest = server.memory(trace, PRETEND, CARD) | server.communication(plan, trace, counts)
    rest |= {"model_flops": flops, "hardware": CARD.name, "method": "pretended accelerator"}
    return {
        name: Forecast(**rest, **server.time(plan, trace, dataclasses.replace(CARD, inter_bw=rate), tokens, flops))
        for name, rate in NETWORKS.items()
    }


@functools.cache
def models_of(trained: str, depth: int | None = None) -> server.Models:
    """Return the model of a recipe, or its shallow copy with `depth` blocks."""
    plan = plan_of(trained, "FULL_SHARD", 1, None)
    return server.Models(load_config(shallow_of(trained).cut(plan, depth) if depth else plan, None))


def shallow_of(trained: str) -> Shallow:
    """Return how to cut the model of a recipe."""
    shallow = Shallow.of(models_of(trained).config.to_dict())
    assert shallow is not None
    return shallow


def plan_of(trained: str, strategy: str, nodes: int, group: int | None) -> Plan:
    """Return the plan of a recipe on so many nodes, with one sequence a rank."""
    overrides = [
        f"fsdp.strategy={strategy}", f"fsdp.shard_size={group * CARD.gpus_per_node if group else 'null'}",
        f"train.global_batch_size={nodes * CARD.gpus_per_node}", "train.micro_batch_size=1", f"launch.nnodes={nodes}",
        *(["launch.rdzv_endpoint=host:29500"] if nodes > 1 else []),
    ]  # fmt: skip
    recipe = load(ROOT / "recipes" / f"{TRAINED[trained]}.yaml", overrides)
    plan, problems = draft_plan(recipe, Topology("cuda", nodes, CARD.gpus_per_node), elsewhere=True)
    assert not problems, problems
    return plan


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    header = ["", "nodes", "memory a GPU", *NETWORKS, "sent inside the node", "to other nodes", "goodput"]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        groups = f" of {row.group * CARD.gpus_per_node}" if row.strategy == "HYBRID_SHARD" else ""
        cells = [f"{row.trained}, {row.strategy}{groups}", f"{row.nodes}", f"{row.needed / GIB:.1f} GiB"]
        if row.fits:
            cells += [f"{seconds:.2f} s" for seconds in row.step_s.values()]
            cells += [f"{size / GIB:.1f} GiB" for size in (row.inside, row.network)] + [f"{row.goodput_hours:.1f} h"]
        else:
            cells += ["does not fit", *[""] * (len(header) - len(cells) - 1)]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(rows: list[Row], path: Path) -> None:
    """Draw time, memory and traffic against the number of nodes, a line of panels for what is trained."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(TRAINED), 3, figsize=(11, 6.4), sharex=True, layout="constrained")
    styles = {"FULL_SHARD": "-o", "HYBRID_SHARD": "--s"}
    for line, trained in zip(panels, TRAINED, strict=True):
        time, memory, traffic = line
        for strategy, style in styles.items():
            found = [row for row in rows if (row.trained, row.strategy) == (trained, strategy)]
            nodes, group = [row.nodes for row in found], found[0].group * CARD.gpus_per_node
            name = strategy if strategy == "FULL_SHARD" else f"{strategy} of {group}"

            for i, network in enumerate(NETWORKS):
                seconds = [row.step_s[network] for row in found]
                time.plot(nodes, seconds, style, ms=4, color=f"C{i}", label=f"{name}, {network}")
            for panel, sizes in ((memory, [row.needed for row in found]), (traffic, [row.network for row in found])):
                panel.plot(nodes, [size / GIB for size in sizes], style, ms=4, color="0.2", label=name)
        memory.axhline(CARD.memory / GIB, color="0.6", lw=1)
        time.set(yscale="log", ylabel=f"{trained}\nseconds a step", ylim=(4, 600))
        time.set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"], minor=False)
        time.minorticks_off()
        memory.set(ylabel="GiB needed of a GPU", ylim=(0, None))
        most = max(row.network for row in rows if row.trained == trained) / GIB
        traffic.set(ylabel="GiB a rank sends to other nodes", ylim=(0, 1.3 * most))  # room for the legend
        for panel in line:
            panel.set_xscale("log", base=2)
            panel.set_xticks(NODES, [str(nodes) for nodes in NODES])
            panel.legend(fontsize=6, loc="best" if panel is not time else "upper left")
    for panel in panels[-1]:
        panel.set_xlabel("nodes of 8 × H100 80 GB")
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
