"""Plots of memory, on hand-made traces."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fsdptrain.errors import RecipeError
from fsdptrain.forecast import plot
from fsdptrain.forecast.plot import COLOURS, MAX_POINTS, draw_timeline, timeline
from fsdptrain.forecast.trace import Alloc, Category, Event, Free, Moment, Storage, Trace, peak
from fsdptrain.text import GIB

CARD = "card"


def made_up(layers: int, tensors: int, device: str = CARD) -> Trace:
    """A step of two micro-batches in which every layer saves `tensors`; the peak is one event of the second loss."""

    def alloc(category: Category, size: int) -> Alloc:
        return Alloc(Storage(device, category), size, 0)

    def events() -> Iterator[Event]:
        for micro_batch in range(2):
            saved = []
            for i in range(layers):
                yield Moment(f"forward of model.layers.{i}")
                for _ in range(tensors):
                    saved.append(alloc("saved activations", GIB // (layers * tensors)))
                    yield saved[-1]
            for moment, size in ("loss", GIB), ("backward of the loss", (2 + micro_batch) * GIB):
                yield Moment(moment)
                spike = alloc("logits and loss", size)
                yield from (spike, Free(spike.storage))
            for i in reversed(range(layers)):
                yield Moment(f"backward of model.layers.{i}")
                yield from (Free(saved.pop().storage) for _ in range(tensors))
        yield Moment("gradient norm")
        yield alloc("temporaries", 4)
        yield Moment("optimizer")
        yield from (alloc("temporaries", 4), Alloc(Storage("cpu", "temporaries"), 9 * GIB, 0))

    return Trace([alloc("parameter shards", GIB), alloc("optimizer state", 2 * GIB)], [*events()])


def test_the_timeline_is_the_step_in_phases() -> None:
    phases = timeline(made_up(layers=3, tensors=5), CARD)
    names = ["forward", "loss", "backward"]
    assert [phase.name for phase in phases] == [*names, *names, "gradient norm", "optimizer"]
    assert phases[0].levels[0].allocated == 3 * GIB, "it starts with what was allocated before the step"
    assert phases[0].first == 0 and phases[-1].last == pytest.approx(1)
    assert all(a.last == b.first for a, b in pairwise(phases))
    assert all(phase.last - phase.first > 0.04 for phase in phases), "every phase is wide enough to be seen"


def test_of_many_points_the_peak_of_every_phase_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    granularity = 512
    trace = made_up(layers=40, tensors=101)
    drawn = timeline(trace, CARD, granularity)
    monkeypatch.setattr(plot, "MAX_POINTS", 10**6)
    phases = timeline(trace, CARD, granularity)
    assert sum(len(phase.levels) for phase in phases) > 8 * MAX_POINTS
    assert sum(len(phase.levels) for phase in drawn) <= MAX_POINTS
    for whole, thinned in zip(phases, drawn, strict=True):
        assert max(p.allocated for p in whole.levels) == max(p.allocated for p in thinned.levels)
        kept = iter(whole.levels)
        assert all(level in kept for level in thinned.levels), "in the original order"
    highest = max((p for phase in drawn for p in phase.levels), key=lambda level: level.allocated)
    assert (highest.allocated, highest.moment) == peak(trace, CARD, granularity)[:2]


def test_the_plot_has_its_labels(tmp_path: Path) -> None:
    path = tmp_path / "step.svg"
    draw_timeline(made_up(8, 20), CARD, 8 * GIB, path, "a & b <c>")
    ElementTree.parse(path)
    labels = re.findall(r"<!-- (.*?) -->", path.read_text())  # matplotlib writes each text as a comment
    everything = "\n".join(labels)
    for words in ("a &amp; b &lt;c&gt;", "peak 7.00 GiB", "backward of the loss", "device memory 8.00 GiB"):
        assert words in everything
    assert [labels.count(phase) for phase in ("forward", "loss", "backward", "optimizer")] == [2, 2, 2, 1]
    drawn = ["parameter shards", "optimizer state", "saved activations", "logits and loss"]
    assert [name for name in COLOURS if name in everything] == drawn, "none below a thousandth of the peak"


def test_equal_traces_give_equal_files_and_leave_matplotlibs_settings_alone(tmp_path: Path) -> None:
    import matplotlib

    before = matplotlib.rcParams.copy()  # copying it with dict() would make matplotlib choose a backend
    for name in "ab":
        draw_timeline(made_up(4, 10), CARD, 8 * GIB, tmp_path / f"{name}.svg", "t")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert matplotlib.rcParams.copy() == before
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize("trace", [Trace([Alloc(Storage(CARD, "gradients"), 5, 0)]), made_up(2, 2, device="cpu")])
def test_a_device_with_little_or_no_memory_in_use_can_be_drawn(tmp_path: Path, trace: Trace) -> None:
    draw_timeline(trace, CARD, 80 * GIB, tmp_path / "step.PNG", "nothing")
    assert (tmp_path / "step.PNG").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "words"),
    [("step.pdf", "must end in .svg or .png"), ("step", "must end in"), ("no/step.svg", "no' does not exist")],
)
def test_a_path_that_cannot_be_plotted_to_is_rejected(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(RecipeError, match=f"^--plot: .*{re.escape(words)}"):
        draw_timeline(Trace(), CARD, GIB, tmp_path / name, "t")
    assert not list(tmp_path.iterdir())
    (tmp_path / "step.svg").mkdir()
    with pytest.raises(RecipeError, match=r"^--plot: cannot write .*step\.svg"):
        draw_timeline(Trace(), CARD, GIB, tmp_path / "step.svg", "t")
