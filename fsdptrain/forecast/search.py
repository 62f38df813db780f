"""Search for the fastest plan that fits: over strategies, micro-batches, recomputation and offload.

Other processes forecast the plans (`forecast.forecaster`), from shallow copies of the model where its layers are equal.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fsdptrain.config.optimizers import Weight
from fsdptrain.config.rules import may_hold_shards
from fsdptrain.config.strategy import Strategy
from fsdptrain.errors import FsdptrainError
from fsdptrain.forecast.changes import (
    RequestForecast,
    StrategyCandidates,
    changes_for_long_rows,
    command_text,
    micro_batches,
    overrides_of,
    strategies_to_try,
)
from fsdptrain.forecast.depth_extrapolation import Shallow, extrapolate
from fsdptrain.forecast.forecaster import Forecast
from fsdptrain.plan.hardware import Hardware
from fsdptrain.plan.plan import Counts, Plan, varied

RECOMPUTATION = ("none", "selective", "full")  # the fastest first
TIGHT_COST = 1.05  # factor on the time of a step when memory is released and allocated again
SAME_TIME = 1.01  # steps whose times differ by a smaller factor count as equally fast
FINALISTS = 2  # how many of the fastest plans are simulated in full
ROUNDS = 3  # how often that is repeated when the full simulation makes other plans the fastest
TYPICAL = Weight((4096, 4096))
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
class Advice:
    """The result of a search. `options` fit, the best first, and include the recipe's own plan: last if it does not.

    `tried` counts the plans without the recipe's own, `failed` names those whose forecast failed, and why.
    """

    options: list[Option]
    tried: int
    failed: list[str]

    @property
    def best(self) -> Option | None:
        """The fastest plan that fits; None if none does."""
        return next((option for option in self.options if option.fits), None)


def search(
    plan: Plan, hardware: Hardware, own: Forecast, requests: Sequence[RequestForecast], counts: Counts,
    config: Mapping[str, Any] | None = None, progress: Callable[[int], None] = lambda tried: None, **job: Any,
) -> Advice:  # fmt: skip
    """Try other plans for the same job on the same ranks; `own` is the forecast of the recipe's plan.

    `requests` are used concurrently, each in a thread. `config` is the model's configuration as a mapping. Without it,
    or if its layers are not equal, every plan is simulated in full. `progress` gets the number of plans tried. `job` is
    passed on with every request.
    """
    if hardware.is_cpu:
        requests = requests[:1]  # rates are measured during the forecast: two at a time would disturb each other
    trials = _Trials(plan, hardware, own, requests, job, progress)
    if "config_dir" not in job:  # the configuration of a folder cannot be changed
        trials.use_shallow_copies(Shallow.of(config or {}), own)
    found = [trials.own]
    with ThreadPoolExecutor(len(requests)) as threads:
        # Offload is slow: it is tried only when nothing fits without it.
        for offload in (False, True):
            if offload and (hardware.is_cpu or any(option.fits and not option.cpu_offload for option in found)):
                break
            candidates = strategies_to_try(plan, offload)
            for options in threads.map(lambda tried: _options_of(tried, trials, counts), candidates):
                found += options
            found += _with_shards_held(found, trials, threads)
            if not any(option.fits for option in found):
                smallest = overrides_of(plan, candidates[0], candidates[0].sizes[0], "full", 1)
                for change in changes_for_long_rows(plan):
                    option = trials.option(smallest | change)
                    if option and option.fits:
                        found.append(option)
                        break
            # The fastest are simulated in full, which may make others the fastest.
            for _ in range(ROUNDS):
                first = [option for option in ranked(found)[:FINALISTS] if option.fits and not option.exact]
                again = threads.map(lambda option: trials.option(option.overrides, full=True), first)
                found = [*(option for option in found if option not in first), *filter(None, again)]
    options = ranked(option for option in found if option.fits or option.own)
    return Advice(options, len(trials.tried), trials.failed)


def ranked(options: Iterable[Option]) -> list[Option]:
    """Sort plans by time, the fastest first; a tight fit comes after a comfortable one of about the same time."""
    return sorted(options, key=lambda o: (not o.fits, o.step_s * (TIGHT_COST if o.tight else 1), o.needed_bytes))


def _options_of(tried: StrategyCandidates, trials: _Trials, counts: Counts) -> list[Option]:
    """Return the options of a strategy, with groups of ranks as large as needed: a larger group is slower."""
    found: list[Option] = []
    for ranks in tried.sizes:
        least = varied(trials.plan, overrides_of(trials.plan, tried, ranks, "full", 1))
        if not cannot_fit(least, counts, trials.own.memory_bytes):
            found += _options_of_size(tried, ranks, trials)
        if any(option.fits and not option.tight for option in found):
            break
    return [option for option in found if not option.own]


def _options_of_size(tried: StrategyCandidates, ranks: int, trials: _Trials) -> list[Option]:
    """Try micro-batches from small to large, with more recomputation only if less does not fit: it is slower."""
    found: list[Option] = []
    best_s = math.inf
    less = 0  # index of the least recomputation that may fit
    micros = micro_batches(trials.plan)
    for micro in micros:
        if less == len(RECOMPUTATION):
            if micro != micros[-1]:
                continue
            less -= 1  # with one micro-batch per step, no gradients are held during its forward
        option = None
        while less < len(RECOMPUTATION):
            option = trials.option(overrides_of(trials.plan, tried, ranks, RECOMPUTATION[less], micro))
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

    This needs more memory, and it is faster the more micro-batches there are.
    """
    if trials.plan.recipe.fsdp.accumulation != "reduce":
        return []
    held = [o for o in options if o.fits and o.accumulation > 1 and may_hold_shards(o.strategy, o.cpu_offload)]
    changes = [option.overrides | {"fsdp.accumulation": "hold_shards"} for option in ranked(held)[:FINALISTS]]
    return [*filter(None, threads.map(trials.option, changes))]


def cannot_fit(plan: Plan, counts: Counts, memory: int) -> bool:
    """Return whether weights, optimizer state and the gathered weights that stay until backward exceed `memory` bytes.

    The rest of what a step needs is not counted, so False does not mean that the plan fits.
    """
    recipe = plan.recipe
    state = gathered = 0.0
    if not recipe.fsdp.cpu_offload:
        each = plan.state_bytes([TYPICAL]) / TYPICAL.numel  # of a large matrix: no optimizer keeps less of others
        state = (each * counts.trained + plan.gathered_bytes(counts.of_frozen())) / plan.shard_size
    if not recipe.fsdp.strategy.reshards and not plan.has_whole_shards:
        gathered = plan.gathered_bytes(counts)
    return state + gathered > memory


class _Trials:
    """Forecasts of plans, requested from several threads, and a record of them."""

    def __init__(
        self, plan: Plan, hardware: Hardware, own: Forecast, requests: Sequence[RequestForecast], job: dict[str, Any],
        progress: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.plan, self._hardware, self._job, self._progress = plan, hardware, job, progress
        self.own = _option(plan, {}, own, exact=True)
        self.tried: list[str] = []
        self.failed: list[str] = []
        self._shallow: Shallow | None = None
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
            self._progress(len(self.tried))
        try:
            read = None if full else self._read_off(plan)
            return _option(plan, overrides, read or self._forecast(plan), exact=read is None)
        except FsdptrainError as error:
            self.failed.append(f"{command_text(overrides)}: {error}")
            return None

    def use_shallow_copies(self, shallow: Shallow | None, own: Forecast) -> None:
        """Forecast from shallow copies if they give the figures of the full simulation of the recipe's plan."""
        self._shallow = shallow
        try:
            read = self._read_off(self.plan)
        except FsdptrainError:
            read = None
        if read is None or any(
            abs(getattr(read, name) / getattr(own, name) - 1) > limit for name, limit in MAX_DRIFT.items()
        ):
            self._shallow = None

    def _read_off(self, plan: Plan) -> Forecast | None:
        """Return the forecast of a plan from shallow copies of its model; None if there are none."""
        depths = self._shallow.depths(plan) if self._shallow else None
        if self._shallow is None or depths is None:
            return None
        few, more = (self._forecast(self._shallow.cut(plan, depth)) for depth in depths)
        return extrapolate(few, more, *depths, self._shallow.layers)

    def _forecast(self, plan: Plan) -> Forecast:
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
