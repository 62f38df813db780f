"""What can be changed in a plan for the same job, as overrides of its recipe, and what helps where memory ran out.

Strategy, micro-batch, recomputation and offload change only memory and time. Other kinds of training change the
numerics, or what is trained: only the user can decide on them. So they are offered apart, and only where nothing fits
without offload.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdptrain.config.keys import unused_with, value_at
from fsdptrain.config.rules import FLOAT8_MULTIPLE, cross_field_problems, may_hold_shards
from fsdptrain.config.schema import Recipe
from fsdptrain.config.strategy import Strategy
from fsdptrain.errors import FsdptrainError
from fsdptrain.forecast.forecaster import Forecast
from fsdptrain.plan.hardware import CPU, Hardware, card
from fsdptrain.plan.plan import Counts, Plan, elastic_problems, varied
from fsdptrain.run_folder.records import Record
from fsdptrain.text import seconds, size

RequestForecast = Callable[..., Forecast]  # (plan, hardware, **job): `Forecaster.forecast`
SHOWN = 3  # overrides
LEAST_TOKENS = 4096  # of a row that ranks share, on each of them: for fewer it is not worth the exchange
NOTHING_FITS = "no override of strategy, micro-batch, recomputation or offload was found that fits"
NOTHING: dict[str, Any] = {}  # is overridden
LIMIT_S = 120.0  # no further forecast is started after this time: the run has failed, and somebody waits


@dataclass(frozen=True)
class Ladder:
    """A strategy, and the numbers of ranks per copy in the order in which they are tried."""

    strategy: Strategy
    sizes: list[int]
    offload: bool


def ladders_of(plan: Plan, offload: bool) -> list[Ladder]:
    """Return the strategies worth trying. With offload, only those that shard one copy over all ranks."""
    nodes, node = plan.topology.nnodes, plan.topology.nproc_per_node
    wanted = [strategy for strategy in Strategy if not (offload and strategy.replicates)]
    wanted.sort(key=lambda strategy: not strategy.reshards)  # those that need less memory first
    ladders = []
    for strategy in wanted:
        ladder = Ladder(strategy, strategy.sizes_to_try(nodes, node), offload)
        sizes = [ranks for ranks in ladder.sizes if _fits_range(plan, overrides_of(plan, ladder, ranks, "full", 1))]
        ladders.append(dataclasses.replace(ladder, sizes=sizes))
    return [ladder for ladder in ladders if ladder.sizes]


def _fits_range(plan: Plan, overrides: Mapping[str, Any]) -> bool:
    """Return whether the run could go on with every number of nodes of its range; True if that number is fixed.

    A recipe that does not fit the range itself has been refused: its options are not judged.
    """
    recipes = plan.recipe, varied(plan, overrides).recipe
    own, changed = (elastic_problems(recipe, plan.topology) for recipe in recipes)
    return bool(own) or not changed


def micro_batches(plan: Plan) -> list[int]:
    """Return the powers of two that divide a rank's share of the global batch, and the recipe's own size.

    With a range of nodes they divide the share of each number of nodes. Where the recipe's attention kernel needs
    micro-batches of one row, there are no others; products in float8 need multiples of some number of tokens.
    """
    recipe, multiple = plan.recipe, FLOAT8_MULTIPLE if plan.recipe.train.float8 else 1
    if recipe.model.attn_implementation == "flash_attention_2" and recipe.documents_share_sequences:
        return [1]
    share, tokens = recipe.train.global_batch_size * plan.context // plan.topology.world_size, plan.tokens_of_row
    powers = {2**i for i in range(share.bit_length()) if share % 2**i == 2**i * tokens % multiple == 0}
    sizes = sorted(powers | {recipe.train.micro_batch_size})
    return [size for size in sizes if _fits_range(plan, {"train.micro_batch_size": size})]


def more_context(plan: Plan) -> list[dict[str, Any]]:
    """Return overrides that let more ranks share a row, first the fewest: for long rows on the GPUs of a node."""
    sizes = [2**i for i in range(1, plan.topology.nproc_per_node.bit_length())]
    overrides = [{"parallel.context": size} for size in sizes if size > plan.context]
    return [
        change
        for change in overrides
        if plan.topology.device == "cuda"
        and plan.recipe.data.seq_len >= LEAST_TOKENS * change["parallel.context"]
        and not [*cross_field_problems(varied(plan, change).recipe, {})]
        and _fits_range(plan, change)
        and plan.topology.nproc_per_node % change["parallel.context"] == 0
    ]


def layers_offloaded(plan: Plan) -> list[dict[str, Any]]:
    """Return the override that lets what layers keep wait in host memory, for long rows on GPUs; else nothing."""
    if plan.topology.device != "cuda" or plan.tokens_of_row < LEAST_TOKENS:
        return []
    whole = {"kind": "full", "offload": True, "keep_attention": True}
    overrides = [{"fsdp.activation_checkpointing": value} for value in (whole, {"kind": "full", "offload": True})]
    return [change for change in overrides if not [*cross_field_problems(varied(plan, change).recipe, {})]][:1]


def overrides_of(plan: Plan, ladder: Ladder, ranks: int, recomputation: str, micro: int) -> dict[str, Any]:
    """Return what this choice changes in the recipe.

    Keys that lose their effect are unset: with their values the recipe would be refused. A recipe that recomputes all
    layers already does so in its own way, with what they keep in host memory or on the device.
    """
    fsdp = plan.recipe.fsdp
    if recomputation == "full" and (fsdp.recomputation.kind, fsdp.recomputation.every) == ("full", 1):
        recomputation = fsdp.activation_checkpointing
    wanted: dict[str, Any] = {
        "fsdp.strategy": ladder.strategy, "fsdp.shard_size": None, "train.micro_batch_size": micro,
        "fsdp.activation_checkpointing": recomputation, "fsdp.cpu_offload": ladder.offload,
    }  # fmt: skip
    if ladder.strategy.in_groups:
        same = fsdp.strategy.in_groups and plan.shard_size == ranks
        wanted["fsdp.shard_size"] = fsdp.shard_size if same else ranks
    if fsdp.accumulation == "hold_shards" and not may_hold_shards(ladder.strategy, ladder.offload):
        wanted["fsdp.accumulation"] = "reduce"
    unused_before = unused_with("fsdp.strategy", fsdp.strategy)
    unused = unused_with("fsdp.strategy", ladder.strategy)
    wanted |= {path: unset for path, unset in unused.items() if path not in unused_before}
    return {path: value for path, value in wanted.items() if value_at(plan.recipe, path) != value}


def changes_that_save_memory(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield overrides of the recipe that need less memory, in the order of what they cost; each at most once.

    First single changes: gradients reduced in every micro-batch, all weights sharded, recomputation, a smaller
    micro-batch, more sharding. Then the last three together, then more ranks in a row, what layers keep in host memory,
    and all offload last.
    """
    recipe, world = plan.recipe, plan.topology.world_size
    fsdp, micro = recipe.fsdp, recipe.train.micro_batch_size
    now = Ladder(fsdp.strategy, [plan.shard_size], fsdp.cpu_offload)
    most = ladders_of(plan, fsdp.cpu_offload)[0] if world > 1 else now  # the strategy that shards most
    offloaded = dataclasses.replace(most, offload=plan.topology.device != "cpu")
    smaller = max((size for size in micro_batches(plan) if size < micro), default=micro)
    kind = fsdp.activation_checkpointing
    choices = [
        (now, plan.shard_size, "full", micro),
        (now, plan.shard_size, kind, smaller),
        (most, world, kind, micro),
        (now, plan.shard_size, "full", smaller),
        (most, world, "full", smaller),
        (most, world, "full", 1),
        (offloaded, world, "full", 1),
    ]
    holds_more = fsdp.accumulation == "hold" or (fsdp.accumulation == "hold_shards" and fsdp.cpu_offload)
    if holds_more and plan.accumulation > 1:
        yield {"fsdp.accumulation": "reduce"}
    seen: list[dict[str, Any]] = [{}]
    for ladder, ranks, recomputation, micro in choices:
        overrides = overrides_of(plan, ladder, ranks, recomputation, micro)
        if ladder is offloaded:
            for kept in [NOTHING, *layers_offloaded(plan)]:
                yield from (seen[-1] | rows | kept for rows in [*[NOTHING] * bool(kept), *more_context(plan)])
        if overrides not in seen:
            seen.append(overrides)
            yield overrides


@dataclass(frozen=True)
class Kind:
    """A kind of training, by the overrides that turn a recipe into it; `effect` says what they change."""

    name: str
    effect: str
    overrides: dict[str, Any]


def leaner_kinds(plan: Plan) -> list[Kind]:
    """Return the kinds that need less memory than the plan's, and are possible for it: the smallest change first."""
    recipe, found = plan.recipe, []
    smaller = recipe.optim.name.leaner
    if recipe.adapter.kind is None and smaller is not None:
        found.append(Kind(smaller.value, "changes the numerics (moments in 8 bits)", {"optim.name": smaller}))
    if recipe.adapter.kind is None and recipe.model.dtype != "bfloat16":
        effect = "changes the numerics (8 significant bits)"
        found.append(Kind("bfloat16 master weights", effect, {"model.dtype": "bfloat16"}))
    if not plan.freezes and plan.pretrained:
        # A recipe that sets the dtype of its export exports a whole model.
        beside: dict[str, Any] = {"export.adapter": "merged"} if recipe.export.dtype != Recipe().export.dtype else {}
        beside |= {"train.float8": None} if recipe.train.float8 else {}
        rank = f"adapters of rank {recipe.adapter.r}, usually at a higher optim.lr"
        effect = f"changes what is trained ({rank}; the model is frozen)"
        found.append(Kind("LoRA", effect, {"adapter.kind": "lora"} | beside))
        effect = f"changes what is trained and the numerics ({rank}; the model is frozen, in 4 bits)"
        found.append(Kind("QLoRA", effect, {"adapter.kind": "qlora"} | beside))
    elif recipe.adapter.kind == "lora" and not recipe.adapter.use_dora:
        found.append(Kind("QLoRA", "changes the numerics (the frozen model is in 4 bits)", {"adapter.kind": "qlora"}))
    return found


def all_kinds(plan: Plan) -> list[tuple[Kind, Plan]]:
    """Return training of the whole model and every leaner kind, each with the plan that trains so."""
    whole = varied(plan, {"adapter.kind": None, "model.trainable": []})
    kinds = [Kind("full", "trains the whole model", {}), *leaner_kinds(whole)]
    return [(kind, varied(whole, kind.overrides)) for kind in kinds]


def least_counts(plan: Plan, counts: Counts) -> Counts:
    """Return the least numbers of parameters of a plan; `counts` are those of another kind of training of its model.

    Adapters are not counted, and all frozen weights of QLoRA count as quantised.
    """
    model = counts.all - counts.adapters
    if plan.recipe.adapter.kind is None:
        return Counts(model, counts.trained if plan.freezes else model)
    return Counts(model, 0, 0, model if plan.recipe.adapter.kind == "qlora" else 0)


def changes_of_kind(plan: Plan, offload: bool) -> list[tuple[Kind, dict[str, Any]]]:
    """Return the kinds of training that need less memory, each with the overrides that save the most with it."""
    ladder = ladders_of(plan, offload)[0]  # the strategy that shards most
    smallest = overrides_of(plan, ladder, ladder.sizes[0], "full", 1)
    return [(kind, smallest | kind.overrides) for kind in leaner_kinds(plan)]


def relief_lines(plan: Plan, start: Record | None, request: RequestForecast, **job: Any) -> list[str]:
    """Return the forecast of a plan that ran out of memory, and the first overrides with which it fits.

    `start` is the run's `start` event, which names the card; without it, or if the card is unknown, nothing is
    forecast. Where nothing is forecast, the overrides are those that save the most for the least time.
    """
    plan = plan.of_attempt(start)
    changes = [*changes_that_save_memory(plan)]
    hardware = hardware_of(start) if start else None
    if hardware is None:
        return ["no forecast: the card is not known", *_untried(changes)]
    deadline = time.monotonic() + LIMIT_S
    try:
        own = request(plan, hardware, **job)
    except FsdptrainError as error:
        return [f"no forecast: {error}", *_untried(changes)]
    fitting = list(_fitting(plan, changes, hardware, request, deadline, job))
    title = "these overrides need less:" if own.fits else "with these overrides it would fit:"
    lines = [_own_line(own), *([title, *map(_line, fitting)] if fitting else [NOTHING_FITS])]
    # Other kinds of training only where all that fits is offloaded, which is slow.
    if all(overrides.get("fsdp.cpu_offload", plan.recipe.fsdp.cpu_offload) for overrides, _ in fitting):
        for kind, overrides in changes_of_kind(plan, offload=False):
            for fit in _fitting(plan, [overrides], hardware, request, deadline, job):
                lines += [f"fits with {kind.name}; {kind.effect}:", _line(fit)]
    return lines


def hardware_of(start: Mapping[str, Any]) -> Hardware | None:
    """Return the hardware that a `start` event names; None for an unknown card."""
    if start["device"] == "cpu":
        return dataclasses.replace(CPU, memory=start["device_memory_bytes"])
    return card(start["device"], start["device_memory_bytes"], start.get("flash", "flash"))


def _own_line(own: Forecast) -> str:
    """Return the forecast peak beside the memory of the card."""
    line = f"forecast: {size(own.needed_bytes)} of {size(own.memory_bytes)}, the peak in the {own.moment}"
    if own.fits and not own.tight:
        line += "; that fits, so look for another process on this GPU (nvidia-smi)"
    return line


def _fitting(
    plan: Plan, changes: list[dict[str, Any]], hardware: Hardware, request: RequestForecast, deadline: float,
    job: Mapping[str, Any],
) -> Iterator[tuple[dict[str, Any], Forecast]]:  # fmt: skip
    """Yield the first changes that fit, with their forecasts; changes that cannot be forecast are passed over."""
    found = 0
    for overrides in changes:
        if found == SHOWN or time.monotonic() > deadline:
            return
        try:
            forecast = request(varied(plan, overrides), hardware, **job)
        except FsdptrainError:
            continue
        if forecast.fits:
            found += 1
            yield overrides, forecast


def _line(fit: tuple[dict[str, Any], Forecast]) -> str:
    overrides, forecast = fit
    return f"  {command_text(overrides)}  ({size(forecast.needed_bytes)}, {seconds(forecast.step_s)} s a step)"


def _untried(changes: list[dict[str, Any]]) -> list[str]:
    if not changes:
        return ["no override of strategy, micro-batch, recomputation or offload would save memory"]
    return ["overrides that need less memory:", *(f"  {command_text(overrides)}" for overrides in changes[:SHOWN])]


def override_words(overrides: Mapping[str, Any]) -> list[str]:
    """Return the overrides as words of the command line: `fsdp.strategy=NO_SHARD`, `fsdp.shard_size=null`."""
    return [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in overrides.items()]


def command_text(overrides: Mapping[str, Any]) -> str:
    """Return those words as one line, quoted for a shell."""
    return shlex.join(override_words(overrides))
