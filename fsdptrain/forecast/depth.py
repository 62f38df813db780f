"""The trace of a deep model from those of two shallow ones: equal layers need not all be simulated.

A trace of d layers becomes that of d + 1 by insertions: one more layer in each forward and backward, a few more events
where all gradients are visited. Written as numbers (which storage, which event, how many bytes), an inserted block
differs from the one before it by constants, and all other events differ between the two depths by constants. So both
traces determine that of every depth, event for event. What is not so regular is simulated in full.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedConfig

from fsdptrain.errors import RecipeError
from fsdptrain.forecast.simulation import simulate
from fsdptrain.forecast.timing import COMPUTE_STREAM
from fsdptrain.forecast.trace import HOST_STREAM, Alloc, Event, Free, Moment, Storage, Trace
from fsdptrain.model.pipeline import layers_of_stages
from fsdptrain.model.units import decoder_layers
from fsdptrain.plan.hardware import Hardware
from fsdptrain.plan.plan import Plan, varied

LEAST = 4  # periods of layers in the shallower model: the first and the last ones differ from those between them
START = Moment("start of the step")  # stands between what is allocated before a step and its events

SIZES = ("size", "flops", "moved", "link")  # fields of events that are bytes or FLOPs
NUMBERED = ("storage", "event", "stream")  # and those that say which one
DIGITS = re.compile(r"\d+")  # of a moment: of which layer
WIDTH = 4  # the most numbers of an event

Numbers = npt.NDArray[np.int64]


def simulate_by_depth(
    plan: Plan, config: PreTrainedConfig, bare: Any, card: Hardware, masked: bool, place: int
) -> Trace:
    """Return what `simulate` returns, from two shallower models if that is possible; `bare` is the model's skeleton.

    Of a pipeline the stage at `place` is shallower, the others remain, so that layers have their numbers.
    """
    parallel, period = plan.recipe.parallel, period_of_layers(plan, bare)
    counts = [len(decoder_layers(bare))]
    if parallel.pipeline > 1:
        counts = [len(each) for each in layers_of_stages(bare, parallel)]
    layers = counts[place]
    shallow = LEAST * period + layers % period
    # A stage may begin anywhere in a period, and an optimizer that communicates may divide all matrices among ranks.
    regular = len(counts) == parallel.pipeline and not plan.recipe.optim.name.traits.needs_ranks
    regular = regular and (period == 1 or parallel.pipeline == 1)
    if regular and layers > 2 * shallow + period and sum(counts) == config.get_text_config().num_hidden_layers:

        def of_depth(depth: int) -> Trace:
            fewer = [*counts[:place], depth, *counts[place + 1 :]]
            change = {"parallel.stage_layers": fewer} if parallel.pipeline > 1 else {}
            return simulate(varied(plan, change), with_layers(config, sum(fewer)), not card.is_cpu, card, masked, place)

        with contextlib.suppress(RecipeError):  # of patterns that only deeper layers match
            if found := extended(of_depth(shallow), of_depth(shallow + period), (layers - shallow) // period):
                return found
    return simulate(plan, config, not card.is_cpu, card, masked, place)


def period_of_layers(plan: Plan, bare: Any) -> int:
    """Return after how many layers of a skeleton an equal one follows, for all of them, recomputation included."""
    kinds = [_description(layer) for _, layer in decoder_layers(bare)]
    of_kinds = next(n for n in range(1, len(kinds) + 1) if kinds[n:] == kinds[:-n])
    return math.lcm(of_kinds, plan.recipe.fsdp.recomputation.every)


def _description(layer: Any) -> list[Any]:
    """Return what tells a decoder layer from others: classes, shapes and settings of its modules, not its number."""
    plain = (bool, int, float, str, type(None), tuple)
    return [
        (
            name,
            type(module),
            [(key, param.shape, param.requires_grad) for key, param in module.named_parameters(recurse=False)],
            {key: value for key, value in vars(module).items() if isinstance(value, plain) and key != "layer_idx"},
        )
        for name, module in layer.named_modules()
    ]


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Return the configuration of a model with the first layers only."""
    shallow = copy.deepcopy(config)
    text = shallow.get_text_config()
    for key, value in vars(text).items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:  # one for each layer
            setattr(text, key, value[:layers])
    text.num_hidden_layers = layers
    return shallow


class Written(NamedTuple):
    """The events of a trace, what is allocated before included, as words and numbers.

    `numbers` [events, WIDTH] are sizes, and which storage, stream or event of the device it is, in the order of their
    first occurrence. `kinds` are the words: all other fields. `exact` are words and sizes.
    """

    events: list[Event]
    kinds: list[tuple[Any, ...]]
    exact: list[Any]
    numbers: Numbers


def extended(first: Trace, second: Trace, times: int) -> Trace | None:
    """Return `first` with what `second` has in addition inserted `times` times; None if they are not that regular."""
    few, many = written(first), written(second)
    events: list[Event] = []
    numbers: list[Numbers] = []

    def grown(at: slice, to: slice) -> Numbers:
        """Return the numbers of events that both traces have, at the depth that is wanted."""
        return few.numbers[at] + times * (many.numbers[to] - few.numbers[at])

    i = j = 0  # what comes next in the one and in the other
    while (i, j) != (len(few.kinds), len(many.kinds)):
        block = _next_block(few, many, i, j)
        if block is None:
            return None
        at, to, length = block
        events += few.events[i:at] + many.events[to : to + length] * times
        numbers.append(grown(slice(i, at), slice(j, to)))
        last, step = grown(slice(at - length, at), slice(to - length, to)), _step(many.numbers, to + length, length)
        numbers += [last + n * step for n in range(1, times + 1)]
        i, j = at, to + length
    return _read(events, np.concatenate(numbers))


def _next_block(few: Written, many: Written, i: int, j: int) -> tuple[int, int, int] | None:
    """Return where `many` has the next block in addition: (place in `few`, place in `many`, length); None if unclear.

    A block repeats the two before it, from which it differs by constants. Events before it agree with those from `i`
    and `j` on. Of several that are possible, it is the one behind which most events agree. It is empty at the end, and
    behind an event whose size depends on the depth.
    """
    start, same = i, _agreeing(few.exact, many.exact, i, j)
    i, j, ends = i + same, j + same, (len(few.exact), len(many.exact))
    if (i, j) == ends:
        return i, j, 0
    more = ends[1] - j - (ends[0] - i)
    lengths = [n for n in range(1, min(more, i, j // 2) + 1) if _repeats(many.exact, j, n)]
    if i < ends[0] and j < ends[1] and few.kinds[i] == many.kinds[j]:
        lengths.insert(0, 0)

    def behind(n: int) -> tuple[bool, int, int]:
        """Return how well what is behind a block agrees: to the end or not, and how many events."""
        same = _agreeing(few.kinds, many.kinds, i, j + n)
        return (i + same, j + n + same) == ends, same, _agreeing(few.exact, many.exact, i, j + n)

    for n in sorted(lengths, key=behind, reverse=True):
        if n == 0:
            return i + 1, j + 1, 0
        at, to = i, j
        # What follows may begin like the block: then the block is a little before the place where they differ.
        while at >= max(start, 2 * n) and to >= 3 * n and few.exact[at:i] == many.exact[to + n : j + n]:
            steps = [_step(many.numbers, end, n) for end in (to + n, to)]
            changes = [many.numbers[to - k * n :][:n] - few.numbers[at - k * n :][:n] for k in (1, 2)]
            if (
                _repeats(many.exact, to, n)
                and _repeats(many.exact, to - n, n)
                and all((a == b).all() for a, b in (steps, changes))
            ):
                return at, to, n
            at, to = at - 1, to - 1
    return None


def _agreeing(few: list[Any], many: list[Any], i: int, j: int) -> int:
    """Return how many values of two lists are equal from these places on."""
    pairs = zip(itertools.islice(few, i, None), itertools.islice(many, j, None), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(few) - i, len(many) - j))


def _repeats(exact: list[Any], to: int, length: int) -> bool:
    return exact[to : to + length] == exact[to - length : to]


def _step(numbers: Numbers, end: int, length: int) -> Numbers:
    """Return by what the block before `end` differs from the one of the same length before it."""
    step: Numbers = numbers[end - length : end] - numbers[end - 2 * length : end - length]
    return step


def written(trace: Trace) -> Written:
    """Return the events of a trace as words and numbers."""
    known: dict[str, dict[Any, int]] = {name: {} for name in NUMBERED}
    known["stream"] = {COMPUTE_STREAM: COMPUTE_STREAM, HOST_STREAM: HOST_STREAM}
    sizes: dict[Storage, int] = {}
    events: list[Event] = [*trace.before, START, *trace.events]
    exact, rows = [], []
    for event in events:
        words, own, others = list[Any]([type(event)]), list[int](), list[int]()
        for name, value in zip(type(event).__annotations__, tuple[Any, ...](event), strict=True):
            if name in SIZES:
                own.append(value)
            elif name in NUMBERED and value is not None:
                others.append(known[name].setdefault(value, len(known[name])))
            else:
                words.append(value)
        match event:
            case Alloc(storage, size):
                sizes[storage] = size
                words += [storage.device, storage.category]
            case Free(storage):
                own.append(sizes[storage])
            case Moment(name):
                words[1], others = DIGITS.sub("{}", name), [*map(int, DIGITS.findall(name))]
        exact.append((tuple(words), tuple(own)))
        rows.append((*own, *others, *[0] * (WIDTH - len(own) - len(others))))
    return Written(events, [kind for kind, _ in exact], exact, np.array(rows, dtype=np.int64))


def _read(like: list[Event], numbers: Numbers) -> Trace | None:
    """Return the trace of events like these with other numbers; None if it frees what is not allocated in this size."""
    storages: dict[int, Storage] = {}
    sizes: dict[int, int] = {}  # of what is allocated
    events: list[Event] = []
    for event, row in zip(like, numbers.tolist(), strict=True):
        match event:
            case Alloc(storage):
                size, place, stream = row[:3]
                if place in sizes:
                    return None
                sizes[place] = size
                own = storages.setdefault(place, Storage(storage.device, storage.category))
                events.append(Alloc(own, size, stream))
            case Free():
                if sizes.pop(row[1], None) != row[0]:
                    return None
                events.append(Free(storages[row[1]]))
            case Moment(name):
                events.append(Moment(DIGITS.sub("{}", name).format(*row)))
            case _:
                names = (name for name in (*SIZES, *NUMBERED) if getattr(event, name, None) is not None)
                events.append(event._replace(**dict(zip(names, row, strict=False))))
    start = events.index(START)
    return Trace([event for event in events[:start] if isinstance(event, Alloc)], events[start + 1 :])
