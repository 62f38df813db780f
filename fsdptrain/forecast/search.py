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
from fsdptrain.config.rules import cross_field_problems, may_hold_shards
from fsdptrain.config.schema import Recipe
from fsdptrain.config.strategy import DEFAULT_STRATEGY, Strategy
from fsdptrain.errors import FsdptrainError, listed
from fsdptrain.forecast.forecaster import Forecast, hardware_of
from fsdptrain.plan.hardware import Hardware
from fsdptrain.plan.plan import Counts, Plan, layout_problems, varied
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

    `divided` are overrides of `parallel`: what ranks divide, where that changes.
    """

    strategy: Strategy
    ranks: int
    offload: bool
    divided: dict[str, Any] = field(default_factory=dict)


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
        found.append([choice for choice in choices if micro_batches(plan, choice)])
    return [choices for choices in found if choices]


def _is_valid(plan: Plan, overrides: Mapping[str, Any]) -> bool:
    """Return whether the recipe may be changed so, as far as that is known without the model."""
    recipe = varied(plan, overrides).recipe
    return not (layout_problems(recipe, plan.topology) or [*cross_field_problems(recipe, {})])


def _on_gpus(plan: Plan, changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those changes that a recipe for the least memory may have on GPUs; none on a CPU."""
    most = Choice(DEFAULT_STRATEGY, plan.stage_ranks, plan.recipe.fsdp.cpu_offload)  # no other shards more
    smallest = overrides_of(plan, most, "full", 1)
    return [each for each in changes if plan.topology.device == "cuda" and _is_valid(plan, smallest | each)]


def _powers_of_two(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length())]


def micro_batches(plan: Plan, choice: Choice) -> list[int]:
    """Return the micro-batches that a choice may have: the recipe's own size, and powers of two."""
    train = plan.recipe.train
    sizes = sorted({*_powers_of_two(train.global_batch_size), train.micro_batch_size})
    return [size for size in sizes if _is_valid(plan, overrides_of(plan, choice, "full", size))]


def changes_for_long_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return what saves memory beside full recomputation of long rows on GPUs: first more ranks of a node in a row (the
    fewest first), then what layers keep in host memory, then both.
    """
    shared = [
        {"parallel.context": ranks}
        for ranks in _powers_of_two(plan.topology.nproc_per_node)
        if ranks > plan.ranks_of_row and plan.recipe.data.seq_len >= LEAST_TOKENS * ranks
    ]
    kept = [
        {"fsdp.activation_checkpointing": {"kind": "full", "offload": True, **attention}}
        for attention in ({"keep_attention": True}, {})
        if plan.tokens_of_row >= LEAST_TOKENS
    ]
    rows = _on_gpus(plan, shared)
    return [*rows, *(change | kept for kept in _on_gpus(plan, kept)[:1] for change in [{}, *rows])]


def divided_layers(plan: Plan, fits: bool) -> list[dict[str, Any]]:
    """Return numbers of ranks of a node that may divide layers, the fewest first; fewer than now if a plan fits.

    With fewer sequences than ranks, as many ranks as now share a row, and some of them divide layers.
    """
    parallel, found = plan.recipe.parallel, list[dict[str, Any]]()
    few_rows = plan.recipe.train.global_batch_size < plan.stage_ranks
    for ranks in _powers_of_two(plan.topology.nproc_per_node):
        context = plan.ranks_of_row // ranks if few_rows else parallel.context
        if context and ranks != parallel.tensor and (ranks < parallel.tensor or few_rows or not fits):
            change = {"parallel.tensor": ranks, "parallel.context": context}
            found.append({key: number for key, number in change.items() if value_at(plan.recipe, key) != number})
    return _on_gpus(plan, found)


def divided_experts(plan: Plan, experts: int) -> list[dict[str, Any]]:
    """Return numbers of ranks of a node that may divide `experts`: the most, then one if they are divided now."""
    most = math.gcd(plan.topology.nproc_per_node, experts) if experts else 1
    sizes = [ranks for ranks in dict.fromkeys([most, 1]) if ranks != plan.recipe.parallel.experts]
    return _on_gpus(plan, [{"parallel.experts": ranks} for ranks in sizes])


def pipelines(plan: Plan) -> list[dict[str, Any]]:
    """Return numbers of groups of whole nodes that may be a pipeline: none, if there is one now, then the most first.

    Only in the groups of a single node no weights are gathered between nodes.
    """
    sizes = [1, *reversed(_powers_of_two(plan.topology.nnodes)[1:])]
    return _on_gpus(plan, [{"parallel.pipeline": n} for n in sizes if n != plan.recipe.parallel.pipeline])


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
    needed_bytes: int
    memory_bytes: int
    host_bytes: int
    step_s: float
    compute_s: float
    tokens_per_s: float
    mfu: float
    own: bool
    waiting_share: float = 0.0


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
    with ThreadPoolExecutor(len(requests)) as threads:
        trials = _Trials(plan, hardware, own, requests, counts, experts, threads, progress, job)
        trials.try_strategies(offload=False)
        trials.try_experts_divided()
        fitting = trials.best() is not None  # before layers are divided, which may be slower
        trials.try_layers_divided()
        trials.try_pipelines()
        if not fitting:
            trials.try_long_rows(offload=False)
        # Offload is slow: it is tried only when nothing fits well without it, or the recipe has it and is faster.
        best, now = trials.best(), trials.made[""]
        offloads = best is None or best.tight or (now.cpu_offload and now.fits and now.step_s < best.step_s)
        if offloads and not hardware.is_cpu:
            trials.try_strategies(offload=True)
            if not any(option.fits for option in trials.made.values()):
                trials.try_long_rows(offload=True)
    options = ranked(option for option in trials.made.values() if option.fits or option.own)
    return Advice(options, len(trials.tried), trials.failed, trials.refusals())


def ranked(options: Iterable[Option]) -> list[Option]:
    """Sort plans by time, the fastest first; a tight fit comes after a comfortable one of about the same time.

    Of equal ones, the one with the fewest overrides is first.
    """

    def rank(option: Option) -> tuple[Any, ...]:
        time_s = option.step_s * (TIGHT_COST if option.tight else 1)
        return not option.fits, time_s, option.needed_bytes, len(option.overrides), command_text(option.overrides)

    return sorted(options, key=rank)


class _Trials:
    """Forecasts of plans, requested from several threads, and a record of them: `made` has all, with the own one."""

    def __init__(
        self, plan: Plan, hardware: Hardware, own: Forecast, requests: Sequence[RequestForecast], counts: Counts,
        experts: int, threads: ThreadPoolExecutor, progress: Callable[[int], None], job: dict[str, Any],
    ) -> None:  # fmt: skip
        self.plan, self._hardware, self._counts, self._experts = plan, hardware, counts, experts
        self._threads, self._progress, self._job = threads, progress, job
        self.made = {"": _option(plan, {}, own)}  # overrides → plan
        self.tried: list[str] = []
        self.failed: list[str] = []
        self._refused: dict[tuple[str, int], str] = {}
        self._free: queue.SimpleQueue[RequestForecast] = queue.SimpleQueue()
        for request in requests:
            self._free.put(request)

    def option(self, overrides: dict[str, Any]) -> Option | None:
        """Return the plan with these overrides and its forecast; None, with an entry in `failed`, if that failed.

        None as well if the model refuses to be divided in this way, which is asked once.
        """
        name = command_text(overrides)
        if name in self.made:
            return self.made[name]
        divided = [(key, overrides[key]) for key in DIVIDED if overrides.get(key, 1) > 1]
        if any(each in self._refused for each in divided):
            return None
        plan = varied(self.plan, overrides)
        self.tried.append(name)
        self._progress(len(self.tried))
        request = self._free.get()  # waits for one if all are busy
        try:
            self.made[name] = _option(plan, overrides, request(plan, self._hardware, **self._job))
            return self.made[name]
        except FsdptrainError as error:
            refused = {each: str(error) for each in divided if str(error).startswith(f"{each[0]}: ")}
            self._refused |= refused
            if not refused:
                self.failed.append(f"{name}: {error}")
            return None
        finally:
            self._free.put(request)

    def refusals(self) -> list[str]:
        """Return the first refusal of each key with which no plan was forecast."""
        divided = {key for option in self.made.values() for key in option.overrides}
        first = {key: message for (key, _), message in reversed(self._refused.items()) if key not in divided}
        return [*first.values()]

    def best(self) -> Option | None:
        """Return the fastest plan so far that fits without offload."""
        return next((option for option in ranked(self.made.values()) if option.fits and not option.cpu_offload), None)

    def try_strategies(self, offload: bool) -> None:
        """Try every strategy; then the fastest plans with shards of gradients held until the end of a step.

        Without that they all-reduce or offload gradients in every micro-batch. It needs more memory, and it is faster
        the more micro-batches there are.
        """
        self._try_each(strategies_to_try(self.plan, offload))
        if self.plan.recipe.fsdp.accumulation == "reduce":
            options = (option for option in self.made.values() if option.fits and option.accumulation > 1)
            held = ranked(option for option in options if may_hold_shards(option.strategy, option.cpu_offload))
            changes = (option.overrides | {"fsdp.accumulation": "hold_shards"} for option in held[:HELD])
            list(self._threads.map(self.option, changes))

    def _try_each(self, candidates: Iterable[list[Choice]]) -> None:
        list(self._threads.map(self._try_sizes, candidates))

    def _try_sizes(self, choices: list[Choice]) -> None:
        """Try groups of ranks as large as needed: a larger group is slower."""
        for choice in choices:
            least = varied(self.plan, overrides_of(self.plan, choice, "full", 1))
            if not cannot_fit(least, self._counts, self.made[""].memory_bytes) and self._fits_well(choice):
                break

    def _fits_well(self, choice: Choice) -> bool:
        """Try micro-batches from small to large, with more recomputation only if less does not fit: it is slower.

        Return whether one fits comfortably.
        """
        comfortable = False
        best_s = math.inf
        less = 0  # index of the least recomputation that may fit
        plan = varied(self.plan, choice.divided)
        # With fewer micro-batches than a pipeline has groups, some of its ranks would never compute at the same time.
        most = max(1, plan.recipe.train.global_batch_size // plan.groups_of_rows // plan.recipe.parallel.pipeline)
        micros = [micro for micro in micro_batches(self.plan, choice) if micro <= most]
        for micro in micros:
            if less == len(RECOMPUTATION):
                if micro != micros[-1]:
                    continue
                less -= 1  # with one micro-batch per step, no gradients are held during its forward
            option = None
            while less < len(RECOMPUTATION):
                option = self.option(overrides_of(self.plan, choice, RECOMPUTATION[less], micro))
                if option and option.fits and not option.tight:
                    comfortable = True
                    break
                less += 1
            if option and option.fits:
                best_s = min(best_s, option.step_s)
                if option.compute_s > best_s:  # a larger micro-batch saves communication, not compute
                    break
        return comfortable

    def try_experts_divided(self) -> None:
        """Try the fastest strategy with experts divided among as many ranks of a node as possible, or undivided."""
        best = self.best()
        choice = Choice(best.strategy, best.shard_size, False) if best else self._most()
        for change in divided_experts(self.plan, self._experts):
            self._try_sizes([dataclasses.replace(choice, divided=change)])

    def try_layers_divided(self) -> None:
        """Try plans that shard most with layers divided among ranks of a node, alone and with experts divided as well.

        Exchanging tokens in every layer takes longer than gathering weights: see `divided_layers` for when it is tried.
        """
        layers, most = divided_layers(self.plan, self.best() is not None), self._most()
        others = [{}, *divided_experts(self.plan, self._experts)[:1]]
        self._try_each([dataclasses.replace(most, divided=each | other) for each in layers] for other in others)

    def try_pipelines(self) -> None:
        """Try plans in which groups of whole nodes are a pipeline, with what the fastest plan so far divides.

        Fewer groups are tried as long as that is faster; none with which even its computation would take longer than
        the fastest plan. Such a forecast simulates several stages: other micro-batches, and weights that are gathered
        once a step, are tried with the fastest number of groups only, if that is faster than without a pipeline.
        """
        plan, best, least = self.plan, self.best(), len(RECOMPUTATION) - 1  # the least recomputation that is tried
        divided: dict[str, Any] = {}
        if best:
            divided = {key: ranks for key, ranks in best.overrides.items() if key.startswith("parallel.")}
            least = RECOMPUTATION.index(varied(plan, best.overrides).recipe.fsdp.recomputation.kind)
        fastest: tuple[Option, Choice] | None = None
        for change in pipelines(varied(plan, divided)):
            staged = varied(plan, divided | change)
            if best and _least_seconds(staged, best) > best.step_s:
                continue
            most = strategies_to_try(staged, False)[0][0]
            choice = dataclasses.replace(most, divided=divided | change)
            tried = (self.option(overrides_of(plan, choice, kind, 1)) for kind in RECOMPUTATION[least:])
            option = next((each for each in tried if each and each.fits), None)
            if option is None:  # more stages than layers, or too many activations
                continue
            if fastest and fastest[0].step_s < option.step_s:
                break
            fastest = option, choice
        if fastest and (best is None or fastest[0].step_s < best.step_s):
            strategies = (strategy for strategy in Strategy if not strategy.replicates)
            self._try_each([dataclasses.replace(fastest[1], strategy=strategy)] for strategy in strategies)

    def try_long_rows(self, offload: bool) -> None:
        """Try what saves memory beside full recomputation, until a plan fits."""
        smallest = overrides_of(self.plan, self._most(offload), "full", 1)
        for change in changes_for_long_rows(self.plan):
            option = self.option(smallest | change)
            if option and option.fits:
                break

    def _most(self, offload: bool = False) -> Choice:
        """Return the choice that shards most."""
        return strategies_to_try(self.plan, offload)[0][0]


def _option(plan: Plan, overrides: dict[str, Any], forecast: Forecast) -> Option:
    fsdp = plan.recipe.fsdp
    return Option(
        overrides, fsdp.strategy, plan.shard_size, plan.recipe.train.micro_batch_size, plan.accumulation,
        fsdp.activation_checkpointing, fsdp.cpu_offload, forecast.fits, forecast.tight, forecast.needed_bytes,
        forecast.memory_bytes, forecast.host_bytes, forecast.step_s, forecast.compute_s, forecast.tokens_per_s,
        forecast.mfu, not overrides, forecast.waiting_share,
    )  # fmt: skip


def _least_seconds(staged: Plan, best: Option) -> float:
    """Return what a step in a pipeline takes at least: what the best plan computes, and the wait for other stages."""
    groups, micro_batches = staged.recipe.parallel.pipeline, staged.recipe.train.global_batch_size
    micro_batches //= staged.groups_of_rows  # of one sequence: the most
    compute_s = best.compute_s * (1 if best.activation_checkpointing == "none" else FORWARD_BACKWARD)
    return compute_s * (micro_batches + groups - 1) / micro_batches


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


# --- out of memory ---------------------------------------------------------------------------------------------------


def changes_that_save_memory(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield overrides of the recipe that need less memory, in the order of what they cost; each at most once.

    First single changes: gradients reduced in every micro-batch, all weights sharded, recomputation, a smaller
    micro-batch, more sharding. Then the last three together, then more ranks in a row, what layers keep in host memory,
    and all offload last.
    """
    fsdp, micro = plan.recipe.fsdp, plan.recipe.train.micro_batch_size
    now = Choice(fsdp.strategy, plan.shard_size, fsdp.cpu_offload)
    # The strategy that shards most: one rank shards nothing.
    most = strategies_to_try(plan, fsdp.cpu_offload)[0][0] if plan.topology.world_size > 1 else now
    offloaded = dataclasses.replace(most, offload=plan.topology.device != "cpu")
    smaller = max((size for size in micro_batches(plan, now) if size < micro), default=micro)
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
        if overrides not in seen and _is_valid(plan, overrides):
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
    deadline = time.monotonic() + LIMIT_S
    try:
        if hardware is None:
            raise FsdptrainError("the card is not known")
        own = request(plan, hardware, **job)
    except FsdptrainError as error:
        untried = [f"  {command_text(overrides)}" for overrides in changes[:SHOWN]]
        return [f"no forecast: {error}", "overrides that need less memory:", *(untried or ["  none is left"])]
    lines = [f"forecast: {size(own.needed_bytes)} of {size(own.memory_bytes)}, the peak in the {own.moment}"]
    if own.fits and not own.tight:
        lines[0] += "; that fits, so look for another process on this GPU (nvidia-smi)"
    fitting, in_memory = list[str](), False
    for overrides in changes:
        if len(fitting) == SHOWN or time.monotonic() > deadline:
            break
        with contextlib.suppress(FsdptrainError):  # a change that cannot be forecast is passed over
            changed = varied(plan, overrides)
            forecast = request(changed, hardware, **job)
            if forecast.fits:
                need = f"{size(forecast.needed_bytes)}, {seconds(forecast.step_s)} s a step"
                fitting.append(f"  {command_text(overrides)}  ({need})")
                in_memory = in_memory or not changed.recipe.fsdp.cpu_offload
    if fitting:
        lines.append("these overrides need less:" if own.fits else "with these overrides it would fit:")
    lines += fitting or [NOTHING_FITS]
    # Other kinds of training only where all that fits is offloaded, which is slow.
    if not in_memory and (note := other_kinds_note(plan)):
        lines.append(note)
    return lines


def override_words(overrides: Mapping[str, Any]) -> list[str]:
    """Return the overrides as words of the command line: `fsdp.strategy=NO_SHARD`, `fsdp.shard_size=null`."""
    return [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in overrides.items()]


def command_text(overrides: Mapping[str, Any]) -> str:
    """Return those words as one line, quoted for a shell."""
    return shlex.join(override_words(overrides))
