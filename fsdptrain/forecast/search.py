"""The fastest plans that fit for the same job, and what to change in a plan that ran out of memory.

Strategy, micro-batch, recomputation and offload change only memory and time. Other kinds of training change the
numerics, or what is trained: only the user can decide on them. So they are named apart, and not forecast. Other
processes forecast the plans (`forecast.forecaster`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import queue
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fsdptrain.config.keys import unused_with, value_at
from fsdptrain.config.optimizers import Weight
from fsdptrain.config.rules import FLOAT8_MULTIPLE, cross_field_problems, may_hold_shards
from fsdptrain.config.schema import Recipe
from fsdptrain.config.strategy import Strategy
from fsdptrain.errors import FsdptrainError, listed
from fsdptrain.forecast.forecaster import Forecast, hardware_of
from fsdptrain.plan.hardware import Hardware
from fsdptrain.plan.plan import Counts, Plan, elastic_problems, varied
from fsdptrain.run_folder.records import Record
from fsdptrain.text import seconds, size

RequestForecast = Callable[..., Forecast]  # (plan, hardware, **job): `Forecaster.forecast`
RECOMPUTATION = ("none", "selective", "full")  # the fastest first
TIGHT_COST = 1.05  # factor on the time of a step when memory is released and allocated again
SAME_TIME = 1.01  # steps whose times differ by a smaller factor count as equally fast
HELD = 2  # of the fastest plans that could hold shards of gradients: so many are tried with that
DIVIDED = ("parallel.tensor", "parallel.experts", "parallel.pipeline")  # the model may refuse these
TYPICAL = Weight((4096, 4096))
LEAST_TOKENS = 4096  # of a row that ranks share, on each of them: for fewer it is not worth the exchange
FORWARD_BACKWARD = 3 / 4  # of what is computed where layers are recomputed, which in a pipeline may not be needed
SHOWN = 3  # overrides, where memory ran out
LIMIT_S = 120.0  # no further forecast is started after this time: the run has failed, and somebody waits
NOTHING_FITS = "no override of strategy, micro-batch, recomputation or offload was found that fits"

# --- plans for the same job ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """What a plan may have instead: a strategy, its number of ranks per copy, and whether weights are offloaded.

    `divided` are overrides of `parallel`: how many ranks divide layers or experts, where that changes. `pipeline` is
    the number of groups of ranks in a pipeline.
    """

    strategy: Strategy
    ranks: int
    offload: bool
    divided: dict[str, Any] = field(default_factory=dict)
    pipeline: int = 1


def strategies_to_try(plan: Plan, offload: bool) -> list[list[Choice]]:
    """Return the strategies worth trying, first those that need the least memory, each with the numbers of ranks per
    copy in the order in which they are tried. With offload, only those that shard one copy over all ranks.
    """
    node = min(plan.topology.nproc_per_node, plan.stage_ranks)
    nodes = plan.stage_ranks // node
    strategies = [strategy for strategy in Strategy if not (offload and strategy.replicates)]
    found = []
    for strategy in sorted(strategies, key=lambda strategy: not strategy.reshards):
        choices = [Choice(strategy, ranks, offload) for ranks in strategy.sizes_to_try(nodes, node)]
        found.append([choice for choice in choices if _fits_range(plan, overrides_of(plan, choice, "full", 1))])
    return [choices for choices in found if choices]


def _fits_range(plan: Plan, overrides: Mapping[str, Any]) -> bool:
    """Return whether the run could go on with every number of nodes of its range, if it can do so as it is."""
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
    share, tokens = recipe.train.global_batch_size // plan.groups_of_rows, plan.tokens_of_row
    powers = {2**i for i in range(share.bit_length()) if share % 2**i == 2**i * tokens % multiple == 0}
    sizes = sorted(powers | {recipe.train.micro_batch_size})
    return [size for size in sizes if _fits_range(plan, {"train.micro_batch_size": size})]


def changes_for_long_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return what saves memory beside full recomputation of long rows on GPUs: first more ranks of a node in a row (the
    fewest first), then what layers keep in host memory, then both.
    """
    ranks = plan.topology.nproc_per_node
    sizes = [2**i for i in range(1, ranks.bit_length()) if ranks % 2**i == 0]
    shared = [
        {"parallel.context": size}
        for size in sizes
        if size > plan.ranks_of_row and plan.recipe.data.seq_len >= LEAST_TOKENS * size
    ]
    kept = [
        {"fsdp.activation_checkpointing": {"kind": "full", "offload": True, **attention}}
        for attention in ({"keep_attention": True}, {})
        if plan.tokens_of_row >= LEAST_TOKENS
    ]
    rows, offloaded = ([change for change in changes if _may_change(plan, change)] for changes in (shared, kept))
    return [*rows, *(change | kept for kept in offloaded[:1] for change in [{}, *rows])]


def _may_change(plan: Plan, change: Mapping[str, Any]) -> bool:
    """Return whether a plan on GPUs may have this change, as far as that is known without the model."""
    changed = varied(plan, change).recipe
    return plan.topology.device == "cuda" and not [*cross_field_problems(changed, {})] and _fits_range(plan, change)


def divided_layers(plan: Plan, fits: bool) -> list[dict[str, Any]]:
    """Return numbers of ranks of a node that may divide layers, the fewest first; fewer than now if a plan fits.

    With fewer sequences than ranks, as many ranks as now share a row, and some of them divide layers.
    """
    parallel, batch = plan.recipe.parallel, plan.recipe.train.global_batch_size
    node, world = plan.topology.nproc_per_node, plan.stage_ranks
    found: list[dict[str, Any]] = []
    for ranks in (2**i for i in range(node.bit_length()) if node % 2**i == 0):
        context = plan.ranks_of_row // ranks if batch < world else parallel.context
        shared = context * ranks
        if ranks == parallel.tensor or not (ranks < parallel.tensor or batch < world or not fits):
            continue
        if shared and batch * shared % world == 0 and (node % shared == 0 or shared % node == 0):
            found.append({"parallel.tensor": ranks, "parallel.context": context})
    changes = ({key: ranks for key, ranks in each.items() if value_at(plan.recipe, key) != ranks} for each in found)
    return [change for change in changes if _may_change(plan, change)]


def divided_experts(plan: Plan, experts: int) -> list[dict[str, Any]]:
    """Return numbers of ranks of a node that may divide `experts`: the most first, then one if they are divided now."""
    own = plan.recipe.parallel.experts
    most = math.gcd(plan.topology.nproc_per_node, experts) if experts else 1
    sizes = [most, 1, *(ranks for ranks in range(most - 1, 1, -1) if most % ranks == 0)]
    changes = [{"parallel.experts": ranks} for ranks in dict.fromkeys(sizes) if ranks != own]
    return [change for change in changes if _may_change(plan, change)]


def pipelines(plan: Plan) -> list[dict[str, Any]]:
    """Return numbers of groups of whole nodes that may be a pipeline: none, if there is one now, then the most first.

    Only in the groups of a single node no weights are gathered between nodes.
    """
    sizes = [2**i for i in range(plan.topology.nnodes.bit_length() - 1, 0, -1) if plan.topology.nnodes % 2**i == 0]
    groups, batch = plan.groups_of_rows * plan.recipe.parallel.pipeline, plan.recipe.train.global_batch_size
    sizes = [size for size in sizes if groups % size == batch % (groups // size) == 0]
    own = plan.recipe.parallel.pipeline
    changes = [{"parallel.pipeline": size} for size in [1, *sizes] if size != own]
    return [change for change in changes if _may_change(plan, change)]


def overrides_of(plan: Plan, choice: Choice, recomputation: str, micro: int) -> dict[str, Any]:
    """Return what this choice changes in the recipe.

    Keys that lose their effect are unset: with their values the recipe would be refused. A recipe that recomputes all
    layers already does so in its own way, with what they keep in host memory or on the device.
    """
    fsdp = plan.recipe.fsdp
    if recomputation == "full" and (fsdp.recomputation.kind, fsdp.recomputation.every) == ("full", 1):
        recomputation = fsdp.activation_checkpointing
    wanted: dict[str, Any] = {
        "fsdp.strategy": choice.strategy, "fsdp.shard_size": None, "train.micro_batch_size": micro,
        "fsdp.activation_checkpointing": recomputation, "fsdp.cpu_offload": choice.offload, **choice.divided,
    }  # fmt: skip
    if choice.strategy.in_groups:
        same = fsdp.strategy.in_groups and plan.shard_size == choice.ranks
        wanted["fsdp.shard_size"] = fsdp.shard_size if same else choice.ranks
    if fsdp.accumulation == "hold_shards" and not may_hold_shards(choice.strategy, choice.offload):
        wanted["fsdp.accumulation"] = "reduce"
    unused_before = unused_with("fsdp.strategy", fsdp.strategy)
    unused = unused_with("fsdp.strategy", choice.strategy)
    wanted |= {path: unset for path, unset in unused.items() if path not in unused_before}
    return {path: value for path, value in wanted.items() if value_at(plan.recipe, path) != value}


@dataclass(frozen=True)
class Option:
    """A plan that was tried. `overrides` is what it changes in the user's recipe; `own` marks the recipe's own plan."""

    overrides: dict[str, Any]
    strategy: Strategy
    shard_size: int
    micro_batch_size: int
    accumulation: int
    activation_checkpointing: Any
    cpu_offload: bool
    fits: bool
    tight: bool
    peak_bytes: int
    reserved_bytes: int
    needed_bytes: int
    memory_bytes: int
    host_bytes: int
    step_s: float
    compute_s: float
    tokens_per_s: float
    mfu: float
    own: bool
    waiting_share: float = 0.0

    @property
    def recomputed(self) -> str:
        """The kind of recomputation."""
        how = self.activation_checkpointing
        return how if isinstance(how, str) else str(how.get("kind", "full"))


@dataclass(frozen=True)
class Advice:
    """The result of a search. `options` fit, the best first, and include the recipe's own plan: last if it does not.

    `tried` counts the plans without the recipe's own, `failed` names those whose forecast failed, and why. `refused`
    says why the model has no plans in which ranks divide its layers, or its experts.
    """

    options: list[Option]
    tried: int
    failed: list[str]
    refused: list[str] = field(default_factory=list)

    @property
    def best(self) -> Option | None:
        """The fastest plan that fits; None if none does."""
        return next((option for option in self.options if option.fits), None)


def search(
    plan: Plan, hardware: Hardware, own: Forecast, requests: Sequence[RequestForecast], counts: Counts,
    progress: Callable[[int], None] = lambda tried: None, experts: int = 0, **job: Any,
) -> Advice:  # fmt: skip
    """Try other plans for the same job on the same ranks; `own` is the forecast of the recipe's plan.

    `requests` are used concurrently, each in a thread. `progress` gets the number of plans tried. `experts` is the
    number of experts in a layer of the model. `job` is passed on with every request.
    """
    if hardware.is_cpu:
        requests = requests[:1]  # rates are measured during the forecast: two at a time would disturb each other
    trials = _Trials(plan, hardware, own, requests, job, progress)
    found = [trials.own]
    with ThreadPoolExecutor(len(requests)) as threads:
        # Offload is slow: it is tried only when nothing fits without it.
        for offload in (False, True):
            if offload and (hardware.is_cpu or any(option.fits and not option.cpu_offload for option in found)):
                break
            candidates = strategies_to_try(plan, offload)
            for options in threads.map(lambda choices: _options_of(choices, trials, counts), candidates):
                found += options
            found += _with_shards_held(found, trials, threads)
            if not offload:
                found += _with_experts_divided(found, trials, counts, experts)
            fitting = any(option.fits for option in found)  # before layers are divided, which may be slower
            if not offload:
                found += _with_layers_divided(found, trials, counts, experts, threads)
                found += _with_pipeline(found, trials, counts)
            if not fitting:
                smallest = overrides_of(plan, candidates[0][0], "full", 1)
                for change in changes_for_long_rows(plan):
                    option = trials.option(smallest | change)
                    if option and option.fits:
                        found.append(option)
                        break
    options = ranked(option for option in found if option.fits or option.own)
    return Advice(options, len(trials.tried), trials.failed, trials.refusals())


def ranked(options: Iterable[Option]) -> list[Option]:
    """Sort plans by time, the fastest first; a tight fit comes after a comfortable one of about the same time."""
    return sorted(options, key=lambda o: (not o.fits, o.step_s * (TIGHT_COST if o.tight else 1), o.needed_bytes))


def _options_of(choices: list[Choice], trials: _Trials, counts: Counts) -> list[Option]:
    """Return the options of a strategy, with groups of ranks as large as needed: a larger group is slower."""
    found: list[Option] = []
    for choice in choices:
        least = varied(trials.plan, overrides_of(trials.plan, choice, "full", 1))
        if not cannot_fit(least, counts, trials.own.memory_bytes):
            found += _options_of_size(choice, trials)
        if any(option.fits and not option.tight for option in found):
            break
    return [option for option in found if not option.own]


def _options_of_size(choice: Choice, trials: _Trials) -> list[Option]:
    """Try micro-batches from small to large, with more recomputation only if less does not fit: it is slower."""
    found: list[Option] = []
    best_s = math.inf
    less = 0  # index of the least recomputation that may fit
    plan = varied(trials.plan, choice.divided)
    share = plan.recipe.train.global_batch_size // plan.groups_of_rows
    # With fewer micro-batches than a pipeline has groups, some of its ranks would never compute at the same time.
    micros = [micro for micro in micro_batches(plan) if share % micro == 0 and share >= micro * choice.pipeline]
    for micro in micros:
        if less == len(RECOMPUTATION):
            if micro != micros[-1]:
                continue
            less -= 1  # with one micro-batch per step, no gradients are held during its forward
        option = None
        while less < len(RECOMPUTATION):
            option = trials.option(overrides_of(trials.plan, choice, RECOMPUTATION[less], micro))
            if option:
                found.append(option)
            if option and option.fits and not option.tight:
                break
            less += 1
        if option and option.fits:
            best_s = min(best_s, option.step_s)
            if option.compute_s > best_s:  # a larger micro-batch saves communication, not compute
                break
    return found


def _with_shards_held(options: list[Option], trials: _Trials, threads: ThreadPoolExecutor) -> list[Option]:
    """Return the fastest plans that all-reduce or offload gradients in every micro-batch, changed to do it once a step.

    This needs more memory, and it is faster the more micro-batches there are. None is tried twice: the recipe's own
    plan is among `options` with and without offload.
    """
    if trials.plan.recipe.fsdp.accumulation != "reduce":
        return []
    held = [o for o in options if o.fits and o.accumulation > 1 and may_hold_shards(o.strategy, o.cpu_offload)]
    changes = [option.overrides | {"fsdp.accumulation": "hold_shards"} for option in ranked(held)[:HELD]]
    new = [change for change in changes if command_text(change) not in trials.tried]
    return [*filter(None, threads.map(trials.option, new))]


def _with_experts_divided(options: list[Option], trials: _Trials, counts: Counts, experts: int) -> list[Option]:
    """Return plans of the fastest strategy with experts divided: among the most ranks of a node, then among fewer.

    Whether that is faster depends on the size of the experts and of micro-batches: all sizes of the first are tried.
    """
    found: list[Option] = []
    undivided = _fastest_choice(options, trials.plan)
    for number, change in enumerate(divided_experts(trials.plan, experts)):
        if number == 0 or change["parallel.experts"] == 1:
            found += _options_of([dataclasses.replace(undivided, divided=change)], trials, counts)
        elif best := next((option for option in ranked(found) if option.fits), None):
            found += filter(None, [trials.option(best.overrides | change)])
    return found


def _with_layers_divided(
    options: list[Option], trials: _Trials, counts: Counts, experts: int, threads: ThreadPoolExecutor
) -> list[Option]:
    """Return plans that shard most with layers divided among ranks of a node, alone and with experts divided as well.

    Exchanging tokens in every layer takes longer than gathering weights: see `divided_layers` for when it is tried.
    """
    plan = trials.plan
    most = strategies_to_try(plan, False)[0][0]
    layers = divided_layers(plan, any(option.fits and not option.cpu_offload for option in options))
    others = [{}, *divided_experts(plan, experts)[:1]]
    choices = [[dataclasses.replace(most, divided=change | other) for change in layers] for other in others]
    found = threads.map(lambda sizes: _options_of(sizes, trials, counts), choices)
    return [option for options in found for option in options]


def _with_pipeline(options: list[Option], trials: _Trials, counts: Counts) -> list[Option]:
    """Return plans in which groups of whole nodes are a pipeline, with what the fastest plan so far divides.

    Fewer groups are tried as long as that is faster; none with which even its computation would take longer than the
    fastest plan. Such a forecast simulates several stages: other micro-batches, and weights that are
    gathered once a step, are tried with the fastest number of groups only, if that is faster than without a pipeline.
    """
    plan, found = trials.plan, list[Option]()
    best = next((option for option in ranked(options) if option.fits and not option.cpu_offload), None)
    divided = {key: ranks for key, ranks in (best.overrides if best else {}).items() if key.startswith("parallel.")}
    kinds = RECOMPUTATION[RECOMPUTATION.index(best.recomputed) :] if best else RECOMPUTATION[-1:]
    for change in pipelines(varied(plan, divided)):
        staged = varied(plan, divided | change)
        if best and _least_seconds(staged, best) > best.step_s:
            continue
        most = strategies_to_try(staged, False)[0][0]
        choice = dataclasses.replace(most, divided=divided | change, pipeline=change["parallel.pipeline"])
        tried = (trials.option(overrides_of(plan, choice, kind, 1)) for kind in kinds)
        option = next((each for each in tried if each and each.fits), None)
        if option is None:  # more stages than layers, or too many activations
            continue
        if found and found[-1].step_s < option.step_s:
            break
        found.append(option)
        fastest = choice, staged
    if found and (best is None or found[-1].step_s < best.step_s):
        choice, staged = fastest
        for sizes in strategies_to_try(staged, False):
            if not (sizes[0].strategy.replicates or sizes[0].strategy.in_groups):
                new = _options_of([dataclasses.replace(choice, strategy=sizes[0].strategy)], trials, counts)
                found += [option for option in new if option not in found]
    return found


def _least_seconds(staged: Plan, best: Option) -> float:
    """Return what a step in a pipeline takes at least: what the best plan computes, and the wait for other stages."""
    groups, micro_batches = staged.recipe.parallel.pipeline, staged.recipe.train.global_batch_size
    micro_batches //= staged.groups_of_rows  # of one sequence: the most
    compute_s = best.compute_s * (1 if best.activation_checkpointing == "none" else FORWARD_BACKWARD)
    return compute_s * (micro_batches + groups - 1) / micro_batches


def _fastest_choice(options: list[Option], plan: Plan) -> Choice:
    """Return the choice of the fastest plan that fits without offload, else that which shards most."""
    fitting = (option for option in ranked(options) if option.fits and not option.cpu_offload)
    if best := next(fitting, None):
        return Choice(best.strategy, best.shard_size, False)
    return strategies_to_try(plan, False)[0][0]


def cannot_fit(plan: Plan, counts: Counts, memory: int) -> bool:
    """Return whether weights, optimizer state and the gathered weights that stay until backward exceed `memory` bytes.

    The rest of what a step needs is not counted, so False does not mean that the plan fits.
    """
    recipe = plan.recipe
    state = gathered = 0.0
    parts = max(recipe.parallel.tensor, recipe.parallel.experts)  # at the most, of the weights of layers
    stages = recipe.parallel.pipeline  # a rank has at least an equal part of the layers
    if not recipe.fsdp.cpu_offload:
        each = plan.state_bytes([TYPICAL]) / TYPICAL.numel  # of a large matrix: no optimizer keeps less of others
        state = (each * counts.trained + plan.gathered_bytes(counts.of_frozen())) / max(plan.shard_size, parts) / stages
    if not recipe.fsdp.strategy.reshards and not plan.has_whole_shards:
        gathered = plan.gathered_bytes(counts) / (parts * stages)
    return state + gathered > memory


class _Trials:
    """Forecasts of plans, requested from several threads, and a record of them."""

    def __init__(
        self, plan: Plan, hardware: Hardware, own: Forecast, requests: Sequence[RequestForecast], job: dict[str, Any],
        progress: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.plan, self._hardware, self._job, self._progress = plan, hardware, job, progress
        self.own = _option(plan, {}, own)
        self.tried: list[str] = []
        self._made: dict[str, Option] = {}
        self.failed: list[str] = []
        self._refused: dict[tuple[str, int], str] = {}
        self._divided: set[str] = set()  # keys of DIVIDED with which plans were forecast
        self._free: queue.SimpleQueue[RequestForecast] = queue.SimpleQueue()
        for request in requests:
            self._free.put(request)

    def option(self, overrides: dict[str, Any]) -> Option | None:
        """Return the plan with these overrides and its forecast; None, with an entry in `failed`, if that failed.

        None as well if the model refuses to be divided in this way, which is asked once.
        """
        if not overrides:
            return self.own
        if known := self._made.get(command_text(overrides)):
            return known
        divided = [(key, overrides[key]) for key in DIVIDED if overrides.get(key, 1) > 1]
        if any(each in self._refused for each in divided):
            return None
        plan = varied(self.plan, overrides)
        self.tried.append(command_text(overrides))
        self._progress(len(self.tried))
        request = self._free.get()  # waits for one if all are busy
        try:
            option = _option(plan, overrides, request(plan, self._hardware, **self._job))
            self._made[command_text(overrides)] = option
            self._divided.update(key for key, _ in divided)
            return option
        except FsdptrainError as error:
            refused = {each: str(error) for each in divided if str(error).startswith(f"{each[0]}: ")}
            self._refused |= refused
            if refused:
                return None
            self.failed.append(f"{command_text(overrides)}: {error}")
            return None
        finally:
            self._free.put(request)

    def refusals(self) -> list[str]:
        """Return the first refusal of each key with which no plan was forecast."""
        first = {key: message for (key, _), message in reversed(self._refused.items()) if key not in self._divided}
        return [*first.values()]


def _option(plan: Plan, overrides: dict[str, Any], forecast: Forecast) -> Option:
    fsdp = plan.recipe.fsdp
    return Option(
        overrides, fsdp.strategy, plan.shard_size, plan.recipe.train.micro_batch_size, plan.accumulation,
        fsdp.activation_checkpointing, fsdp.cpu_offload, forecast.fits, forecast.tight, forecast.peak_bytes,
        forecast.reserved_bytes, forecast.needed_bytes, forecast.memory_bytes, forecast.host_bytes, forecast.step_s,
        forecast.compute_s, forecast.tokens_per_s, forecast.mfu, not overrides, forecast.waiting_share,
    )  # fmt: skip


# --- out of memory ---------------------------------------------------------------------------------------------------


def changes_that_save_memory(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield overrides of the recipe that need less memory, in the order of what they cost; each at most once.

    First single changes: gradients reduced in every micro-batch, all weights sharded, recomputation, a smaller
    micro-batch, more sharding. Then the last three together, then more ranks in a row, what layers keep in host memory,
    and all offload last.
    """
    recipe, world = plan.recipe, plan.topology.world_size
    fsdp, micro = recipe.fsdp, recipe.train.micro_batch_size
    now = Choice(fsdp.strategy, plan.shard_size, fsdp.cpu_offload)
    most = now  # the strategy that shards most
    if world > 1:
        most = Choice(strategies_to_try(plan, fsdp.cpu_offload)[0][0].strategy, world, fsdp.cpu_offload)
    offloaded = Choice(most.strategy, world, plan.topology.device != "cpu")
    smaller = max((size for size in micro_batches(plan) if size < micro), default=micro)
    kind = fsdp.activation_checkpointing
    choices = [
        (now, "full", micro),
        (now, kind, smaller),
        (most, kind, micro),
        (now, "full", smaller),
        (most, "full", smaller),
        (most, "full", 1),
        (offloaded, "full", 1),
    ]
    holds_more = fsdp.accumulation == "hold" or (fsdp.accumulation == "hold_shards" and fsdp.cpu_offload)
    if holds_more and plan.accumulation > 1:
        yield {"fsdp.accumulation": "reduce"}
    seen: list[dict[str, Any]] = [{}]
    for choice, recomputation, micro in choices:
        overrides = overrides_of(plan, choice, recomputation, micro)
        if choice is offloaded:
            yield from (seen[-1] | change for change in changes_for_long_rows(plan))
        if overrides not in seen:
            seen.append(overrides)
            yield overrides


def other_kinds(plan: Plan) -> list[dict[str, Any]]:
    """Return overrides for other kinds of training that need less memory: the smallest change first."""
    recipe, found = plan.recipe, list[dict[str, Any]]()
    smaller = recipe.optim.name.leaner
    if recipe.adapter.kind is None and smaller is not None:
        found.append({"optim.name": smaller})
    if recipe.adapter.kind is None and recipe.model.dtype != "bfloat16":
        found.append({"model.dtype": "bfloat16"})
    if not plan.freezes and plan.pretrained:
        # A recipe that sets the dtype of its export exports a whole model.
        beside: dict[str, Any] = {}
        if recipe.export.dtype != Recipe().export.dtype:
            beside["export.adapter"] = "merged"
        if recipe.train.float8:
            beside["train.float8"] = None
        found += [{"adapter.kind": kind} | beside for kind in ("lora", "qlora")]
    elif recipe.adapter.kind == "lora" and not recipe.adapter.use_dora:
        found.append({"adapter.kind": "qlora"})
    return found


def other_kinds_note(plan: Plan) -> str:
    """Return a note that names these overrides; "" if there are none."""
    commands = [command_text(overrides) for overrides in other_kinds(plan)]
    if not commands:
        return ""
    return f"these also need less memory, but change which weights are trained, or the precision: {listed(commands)}"


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
    lines = [f"forecast: {size(own.needed_bytes)} of {size(own.memory_bytes)}, the peak in the {own.moment}"]
    if own.fits and not own.tight:
        lines[0] += "; that fits, so look for another process on this GPU (nvidia-smi)"
    fitting: list[tuple[dict[str, Any], Forecast]] = []
    for overrides in changes:
        if len(fitting) == SHOWN or time.monotonic() > deadline:
            break
        with contextlib.suppress(FsdptrainError):  # a change that cannot be forecast is passed over
            forecast = request(varied(plan, overrides), hardware, **job)
            if forecast.fits:
                fitting.append((overrides, forecast))
    if fitting:
        lines.append("these overrides need less:" if own.fits else "with these overrides it would fit:")
        for overrides, forecast in fitting:
            need = f"{size(forecast.needed_bytes)}, {seconds(forecast.step_s)} s a step"
            lines.append(f"  {command_text(overrides)}  ({need})")
    else:
        lines.append(NOTHING_FITS)
    # Other kinds of training only where all that fits is offloaded, which is slow.
    offloads = [overrides.get("fsdp.cpu_offload", plan.recipe.fsdp.cpu_offload) for overrides, _ in fitting]
    if all(offloads) and (note := other_kinds_note(plan)):
        lines.append(note)
    return lines


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
