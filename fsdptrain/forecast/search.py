"""Search for the fastest plan that fits: over strategies, micro-batches, recomputation and offload.

Other processes forecast the plans (`forecast.forecaster`), from shallow copies of the model where its layers are equal.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fsdptrain.config.optimizers import Weight
from fsdptrain.config.rules import cross_field_problems, may_hold_shards
from fsdptrain.config.strategy import Strategy
from fsdptrain.errors import FsdptrainError
from fsdptrain.forecast.changes import (
    NOTHING,
    Kind,
    Ladder,
    RequestForecast,
    all_kinds,
    changes_of_kind,
    command_text,
    ladders_of,
    layers_offloaded,
    least_counts,
    micro_batches,
    more_context,
    overrides_of,
)
from fsdptrain.forecast.depth_extrapolation import Shallow, extrapolate
from fsdptrain.forecast.forecaster import Forecast
from fsdptrain.plan.hardware import Hardware
from fsdptrain.plan.plan import Counts, Plan, may_share_rows, varied
from fsdptrain.plan.topology import Topology

SearchProgress = Callable[..., None]  # (done, in total[, what]): plans, unless `what` names something else
RECOMPUTATION = ("none", "selective", "full")  # the fastest first
TIGHT_COST = 1.05  # factor on the time of a step when memory is released and allocated again
SAME_TIME = 1.01  # steps whose times differ by a smaller factor count as equally fast
FINALISTS = 2  # how many of the fastest plans are simulated in full
ROUNDS = 3  # how often that is repeated when the full simulation makes other plans the fastest
TYPICAL = Weight((4096, 4096))
MAX_NODES = 64  # up to which the cards that a kind of training needs are counted
MAX_DRIFT = {"peak_bytes": 0.005, "step_s": 0.03}  # with a larger relative error, the layers do not count as equal


@dataclass(frozen=True)
class Option:
    """A plan that was tried. `overrides` is what it changes in the user's recipe; `own` marks the recipe's own plan.

    `exact`: simulated in full. Otherwise the figures come from shallow copies of the model. Then the allocator is not
    simulated, and `tight` means that the allocated memory fits but fragments may not.
    """

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
    exact: bool
    own: bool


@dataclass(frozen=True)
class Leaner:
    """A plan of another kind of training, which fits."""

    kind: Kind
    option: Option


@dataclass(frozen=True)
class Advice:
    """The result of a search. `options` fit, the best first, and include the recipe's own plan: last if it does not.

    `leaner` are plans of other kinds of training, searched only if nothing fits without offload. `cards` has the least
    number of cards for each kind of training, by its name: None for more than are tried. `tried` counts the plans
    without the recipe's own, `failed` names those whose forecast failed, and why.
    """

    options: list[Option]
    leaner: list[Leaner]
    cards: dict[str, int | None]
    tried: int
    failed: list[str]

    @property
    def best(self) -> Option | None:
        """The fastest plan that fits; None if none does."""
        return next((option for option in self.options if option.fits), None)


def search(
    plan: Plan, hardware: Hardware, own: Forecast, requests: Sequence[RequestForecast], counts: Counts,
    config: Mapping[str, Any] | None = None, progress: SearchProgress = lambda *_: None,
    count_cards: bool = False, so_far: Callable[[Advice], None] = lambda _: None, **job: Any,
) -> Advice:  # fmt: skip
    """Try other plans for the same job on the same ranks; `own` is the forecast of the recipe's plan.

    `requests` are used concurrently, each in a thread. `config` is the model's configuration as a mapping. Without it,
    or if its layers are not equal, every plan is simulated in full. `count_cards`: also count the cards that each kind
    of training needs. `so_far` gets the plans that are known whenever one more is forecast. `job` is passed on with
    every request.
    """
    if hardware.is_cpu:
        requests = requests[:1]  # rates are measured during the forecast: two at a time would disturb each other
    trials = _Trials(plan, hardware, own, requests, job, so_far)
    found = [trials.own]
    with ThreadPoolExecutor(len(requests)) as threads:
        if "config_dir" not in job:  # the configuration of a folder cannot be changed
            trials.shallow = _if_accurate(Shallow.of(config or {}), trials, own)
        # Offload is slow: it is tried only when nothing fits without it.
        for offload in (False, True):
            if offload and (hardware.is_cpu or any(option.fits and not option.cpu_offload for option in found)):
                break
            found += _climb_all(ladders_of(plan, offload), trials, counts, threads, progress)
            found += _with_shards_held(found, trials, threads)
            if not any(option.fits for option in found):
                found += _with_shared_rows(trials)
            found = _with_finalists_simulated(found, trials, threads)
        best_first = _best_first(found)
        # Other kinds of training are for the user to decide on: they are tried where all that fits is slow.
        leaner = []
        if all(option.cpu_offload for option in best_first if option.fits):
            offloads = (False,) if best_first[0].fits or hardware.is_cpu else (False, True)
            leaner = _leaner_plans(trials, counts, threads, offloads)
        cards = {}
        if count_cards and not hardware.is_cpu:
            cards = _cards_needed(trials, counts, threads, hardware.gpus_per_node, progress)
    return Advice(best_first, leaner, cards, len(trials.tried), trials.failed)


def _best_first(options: Iterable[Option]) -> list[Option]:
    """Return the options that fit, the best first, and the recipe's own plan: last if it does not fit."""
    return ranked(option for option in options if option.fits or option.own)


def ranked(options: Iterable[Option]) -> list[Option]:
    """Sort plans by time, the fastest first; a tight fit comes after a comfortable one of about the same time."""
    return sorted(options, key=lambda o: (not o.fits, o.step_s * (TIGHT_COST if o.tight else 1), o.needed_bytes))


def _with_shards_held(options: list[Option], trials: _Trials, threads: ThreadPoolExecutor) -> list[Option]:
    """Return the fastest plans that all-reduce or offload gradients in every micro-batch, changed to do it once a step.

    This needs more memory, and it is faster the more micro-batches there are.
    """
    if trials.plan.recipe.fsdp.accumulation != "reduce":
        return []
    held = [o for o in options if o.fits and o.accumulation > 1 and may_hold_shards(o.strategy, o.cpu_offload)]
    changes = [option.overrides | {"fsdp.accumulation": "hold_shards"} for option in ranked(held)[:FINALISTS]]
    return [option for option in threads.map(trials.option, changes) if option is not None]


def _with_shared_rows(trials: _Trials) -> list[Option]:
    """Return the plans that fit with the fewest ranks in a row, with all else that saves memory but offload of weights.

    One keeps what its layers keep on the device, and one in host memory.
    """
    plan = trials.plan
    ladder = ladders_of(plan, False)[0]
    smallest = overrides_of(plan, ladder, ladder.sizes[0], "full", 1)
    found = []
    for kept in [NOTHING, *layers_offloaded(plan)]:
        options = (trials.option(smallest | rows | kept) for rows in [*[NOTHING] * bool(kept), *more_context(plan)])
        found += [*itertools.islice((option for option in options if option is not None and option.fits), 1)]
    return found


def _with_finalists_simulated(options: list[Option], trials: _Trials, threads: ThreadPoolExecutor) -> list[Option]:
    """Return the options with the fastest of them simulated in full."""
    for _ in range(ROUNDS):
        first = [o for o in ranked(options)[:FINALISTS] if o.fits and not o.exact]
        if not first:
            break
        again = threads.map(lambda option: trials.option(option.overrides, full=True), first)
        options = [o for o in options if o not in first] + [o for o in again if o is not None]
    return options


def _leaner_plans(
    trials: _Trials, counts: Counts, threads: ThreadPoolExecutor, offloads: Sequence[bool]
) -> list[Leaner]:
    """Return a plan for each kind of training that fits: of several `offloads`, with the first that suffices.

    The fastest plan of a kind is not searched.
    """

    def fitting(choice: tuple[Kind, dict[str, Any]]) -> Leaner | None:
        kind, overrides = choice
        plan = varied(trials.plan, overrides)
        if problem := next(cross_field_problems(plan.recipe, {}), None):  # a library is missing
            trials.failed.append(f"{command_text(kind.overrides)}: {problem}")
            return None
        too_large = cannot_fit(plan, least_counts(plan, counts), trials.memory)
        option = None if too_large else trials.option(overrides)
        return Leaner(kind, option) if option is not None and option.fits else None

    found: dict[str, Leaner] = {}
    for offload in offloads:
        wanted = [choice for choice in changes_of_kind(trials.plan, offload) if choice[0].name not in found]
        found |= {leaner.kind.name: leaner for leaner in threads.map(fitting, wanted) if leaner}
    return list(found.values())


def _cards_needed(
    trials: _Trials, counts: Counts, threads: ThreadPoolExecutor, node: int, progress: SearchProgress
) -> dict[str, int | None]:
    """Return the least number of cards for each kind of training, in nodes of `node` cards.

    Nothing is offloaded, layers are recomputed, micro-batches have one sequence. A kind whose forecast fails is left
    out. The memory of a card does not grow with their number, so few numbers are tried: the first that can hold the
    state, then twice as far in the list each time, then between the last two.
    """
    topology, parallel = trials.plan.topology, trials.plan.recipe.parallel
    node = topology.nproc_per_node if topology.nnodes > 1 else node
    sizes = [*(2**i for i in range(node.bit_length()) if 2**i < node), *range(node, MAX_NODES * node + 1, node)]
    sizes = [cards for cards in sizes if may_share_rows(parallel.context, min(cards, node), cards)]

    def least(choice: tuple[Kind, Plan]) -> int | None:
        _, plan = choice
        state = state_bytes(plan, least_counts(plan, counts))
        possible = [cards for cards in sizes if state / cards <= trials.memory]

        @functools.cache
        def fits(cards: int) -> bool:
            return trials.estimate(_on_cards(plan, cards, node)).fits

        end = 1
        while end < len(possible) and not fits(possible[end - 1]):
            end *= 2
        end = min(end, len(possible))
        place = bisect.bisect_left(possible, True, end // 2, end, key=fits)
        return possible[place] if place < len(possible) else None

    def tried(choice: tuple[Kind, Plan]) -> dict[str, int | None]:
        try:
            return {choice[0].name: least(choice)}
        except FsdptrainError as error:
            trials.failed.append(f"{choice[0].name}: {error}")
            return {}

    kinds = all_kinds(trials.plan)
    found: dict[str, int | None] = {}
    what = "counting the cards needed"
    progress(0, len(kinds), what)
    for done, cards in enumerate(threads.map(tried, kinds), 1):
        found |= cards
        progress(done, len(kinds), what)
    return found


def _on_cards(plan: Plan, cards: int, node: int) -> Plan:
    """Return the plan that needs the least memory on `cards` cards; its global batch is rounded up to a multiple."""
    ranks = min(cards, node)
    plan = dataclasses.replace(plan, topology=Topology("cuda", cards // ranks, ranks))
    ladder = ladders_of(plan, False)[0]
    batch = -(-plan.recipe.train.global_batch_size // cards) * cards
    return varied(plan, {**overrides_of(plan, ladder, cards, "full", 1), "train.global_batch_size": batch})


def cannot_fit(plan: Plan, counts: Counts, memory: int) -> bool:
    """Return whether weights, optimizer state and the gathered weights that stay until backward exceed `memory` bytes.

    The rest of what a step needs is not counted, so False does not mean that the plan fits.
    """
    recipe = plan.recipe
    state = 0 if recipe.fsdp.cpu_offload else state_bytes(plan, counts) / plan.shard_size
    copies = not recipe.fsdp.strategy.reshards and not plan.has_whole_shards
    gathered = plan.gathered_bytes(counts) if copies else 0
    return state + gathered > memory


def state_bytes(plan: Plan, counts: Counts) -> float:
    """Return the least bytes of weights and optimizer state of one copy of the model."""
    each = plan.state_bytes([TYPICAL]) / TYPICAL.numel  # of a large matrix: no optimizer keeps less of anything else
    return each * counts.trained + plan.gathered_bytes(counts.of_frozen())


class _Trials:
    """Forecasts of plans, requested from several threads, and a record of them."""

    def __init__(
        self, plan: Plan, hardware: Hardware, own: Forecast, requests: Sequence[RequestForecast], job: dict[str, Any],
        so_far: Callable[[Advice], None],
    ) -> None:  # fmt: skip
        self.plan, self._hardware, self._job, self._so_far = plan, hardware, job, so_far
        self.own, self.memory = _option(plan, {}, own, exact=True), own.memory_bytes
        self.shallow: Shallow | None = None
        self.tried: list[str] = []
        self.failed: list[str] = []
        self._found = {"": self.own}  # overrides → the newest forecast of the plan
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[RequestForecast] = queue.SimpleQueue()
        for request in requests:
            self._free.put(request)

    def option(self, overrides: dict[str, Any], full: bool = False) -> Option | None:
        """Return the plan with these overrides and its forecast; None, with an entry in `failed`, if that failed."""
        if not overrides:
            return self.own
        plan = varied(self.plan, overrides)
        if not full:
            self.tried.append(command_text(overrides))
        try:
            read = None if full else self.read_off(plan)
            option = _option(plan, overrides, read or self.forecast(plan), exact=read is None)
        except FsdptrainError as error:
            self.failed.append(f"{command_text(overrides)}: {error}")
            return None
        with self._lock:
            self._found[command_text(overrides)] = option
            self._so_far(Advice(_best_first(self._found.values()), [], {}, len(self.tried), [*self.failed]))
        return option

    def read_off(self, plan: Plan) -> Forecast | None:
        """Return the forecast of a plan from shallow copies of its model; None if there are none."""
        depths = self.shallow.depths(plan) if self.shallow else None
        if self.shallow is None or depths is None:
            return None
        few, more = (self.forecast(self.shallow.cut(plan, depth)) for depth in depths)
        return extrapolate(few, more, *depths, self.shallow.layers)

    def estimate(self, plan: Plan) -> Forecast:
        """Forecast a plan from shallow copies if there are any, else in full."""
        return self.read_off(plan) or self.forecast(plan)

    def forecast(self, plan: Plan) -> Forecast:
        """Forecast a plan with a free forecaster; wait for one if all are busy."""
        request = self._free.get()
        try:
            return request(plan, self._hardware, **self._job)
        finally:
            self._free.put(request)


def _option(plan: Plan, overrides: dict[str, Any], forecast: Forecast, exact: bool) -> Option:
    fsdp = plan.recipe.fsdp
    return Option(
        overrides, fsdp.strategy, plan.shard_size, plan.recipe.train.micro_batch_size, plan.accumulation,
        fsdp.activation_checkpointing, fsdp.cpu_offload, forecast.fits, forecast.tight, forecast.peak_bytes,
        forecast.reserved_bytes, forecast.needed_bytes, forecast.memory_bytes, forecast.host_bytes, forecast.step_s,
        forecast.compute_s, forecast.tokens_per_s, forecast.mfu, exact, own=not overrides,
    )  # fmt: skip


class _PlanCount:
    """The number of plans that are done (tried, ruled out, or not worth trying), reported as progress."""

    def __init__(self, total: int, progress: SearchProgress) -> None:
        self._done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()

    def add(self, plans: int) -> None:
        """Count `plans` more as done."""
        with self._lock:
            self._done += plans
            self._progress(self._done, self._total)


def _climb_all(
    ladders: list[Ladder], trials: _Trials, counts: Counts, threads: ThreadPoolExecutor, progress: SearchProgress
) -> list[Option]:
    """Return the options of all ladders; several ladders are climbed concurrently."""
    micros = micro_batches(trials.plan)
    each = len(micros) * len(RECOMPUTATION)
    count = _PlanCount(each * sum(len(ladder.sizes) for ladder in ladders), progress)

    def climb(ladder: Ladder) -> list[Option]:
        found: list[Option] = []
        for ranks in ladder.sizes:
            comfortable = any(option.fits and not option.tight for option in found)
            tried = 0
            if not comfortable:  # a larger group is slower: it is needed only if a smaller one has too little memory
                least = varied(trials.plan, overrides_of(trials.plan, ladder, ranks, "full", 1))
                if not cannot_fit(least, counts, trials.memory):
                    for option in _climb(ladder, ranks, micros, trials):
                        tried += 1
                        count.add(1)
                        found += [option] if option and not option.own else []
            count.add(each - tried)
        return found

    return [option for options in threads.map(climb, ladders) for option in options]


def _climb(ladder: Ladder, ranks: int, micros: list[int], trials: _Trials) -> Iterator[Option | None]:
    """Try micro-batches from small to large, with more recomputation only if less does not fit: it is slower.

    Yields each plan that is tried: the recipe's own among them, None for one whose forecast fails.
    """
    best_s = math.inf
    rung = 0
    for micro in micros:
        if rung == len(RECOMPUTATION):
            if micro != micros[-1]:
                continue
            rung -= 1  # with one micro-batch per step, no gradients are held during its forward
        option = None
        while rung < len(RECOMPUTATION):
            option = trials.option(overrides_of(trials.plan, ladder, ranks, RECOMPUTATION[rung], micro))
            yield option
            if option and option.fits and not option.tight:
                break
            rung += 1
        if option and option.fits:
            best_s = min(best_s, option.step_s)
            if option.compute_s > best_s:  # a larger micro-batch saves communication, not compute
                break


def _if_accurate(shallow: Shallow | None, trials: _Trials, own: Forecast) -> Shallow | None:
    """Return `shallow` if it gives the figures of the full simulation of the recipe's plan, else None."""
    trials.shallow = shallow
    try:
        read = trials.read_off(trials.plan)
    except FsdptrainError:
        return None
    if read is None:
        return None
    drift = {name: abs(getattr(read, name) / getattr(own, name) - 1) for name in MAX_DRIFT}
    return shallow if all(drift[name] <= limit for name, limit in MAX_DRIFT.items()) else None
