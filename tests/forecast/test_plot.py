"""Pictures of memory, on hand-made traces."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fsdptrain.errors import RecipeError
from fsdptrain.forecast.memory import peak
from fsdptrain.forecast.plot import (
    GIB,
    MOST_POINTS,
    STYLES,
    Phase,
    Point,
    draw_timeline,
    memory_bar,
    phase_of,
    refuse_undrawable,
    thin,
    timeline,
)
from fsdptrain.forecast.trace import Alloc, Category, Event, Free, Moment, Storage, Trace

CARD = "card"


def made_up(blocks: int, tensors: int, device: str = CARD) -> Trace:
    """A step of two micro-batches in which every block saves `tensors`; the peak is one event of the second loss."""

    def alloc(category: Category, size: int) -> Alloc:
        return Alloc(Storage(device, category), size, 0)

    def events() -> Iterator[Event]:
        for micro_batch in range(2):
            saved = []
            for i in range(blocks):
                yield Moment(f"forward of model.layers.{i}")
                for _ in range(tensors):
                    saved.append(alloc("saved activations", GIB // (blocks * tensors)))
                    yield saved[-1]
            for moment, size in ("loss", GIB), ("backward of the loss", (2 + micro_batch) * GIB):
                yield Moment(moment)
                spike = alloc("logits and loss", size)
                yield from (spike, Free(spike.storage))
            for i in reversed(range(blocks)):
                yield Moment(f"backward of model.layers.{i}")
                yield from (Free(saved.pop().storage) for _ in range(tensors))
        yield Moment("optimizer")
        yield from (alloc("temporaries", 4), Alloc(Storage("cpu", "temporaries"), 9 * GIB, 0))

    return Trace([alloc("parameter shards", GIB), alloc("optimizer state", 2 * GIB)], [*events()])


def count(parts: list[Phase]) -> int:
    return sum(len(part.points) for part in parts)


def test_the_timeline_is_the_step_in_parts() -> None:
    parts = timeline(made_up(blocks=3, tensors=5), CARD)
    names = ["forward", "loss", "backward"]
    assert [part.name for part in parts] == [*names, *names, "optimizer"]
    assert parts[0].points[0].allocated == 3 * GIB, "what was there before is where it starts"
    assert parts[0].first == 0 and parts[-1].last == pytest.approx(1)
    assert all(a.last == b.first for a, b in pairwise(parts))
    assert all(part.last - part.first > 0.04 for part in parts), "every part can be seen"


@pytest.mark.parametrize(
    ("moment", "part"),
    [
        ("forward of embedding", "forward"), ("backward of model.layers.3", "backward"), ("loss", "loss"),
        ("backward of the loss", "loss"), ("before the step", "forward"), ("gradient norm", "gradient norm"),
        ("optimizer", "optimizer"),
    ],
)  # fmt: skip
def test_moments_belong_to_parts(moment: str, part: str) -> None:
    assert phase_of(moment) == part


def test_thinning_keeps_every_parts_peak_and_both_ends() -> None:
    granularity = 512
    trace = made_up(blocks=40, tensors=101)
    parts = timeline(trace, CARD, granularity)
    drawn = [part._replace(points=thin(part.points, part.last - part.first)) for part in parts]
    assert count(parts) > 4 * MOST_POINTS and count(drawn) <= MOST_POINTS
    for whole, thinned in zip(parts, drawn, strict=True):
        assert max(p.allocated for p in whole.points) == max(p.allocated for p in thinned.points)
        assert (whole.points[0], whole.points[-1]) == (thinned.points[0], thinned.points[-1])
        kept = iter(whole.points)
        assert all(point in kept for point in thinned.points), "in order"
    highest = max((p for part in drawn for p in part.points), key=lambda point: point.allocated)
    assert highest.allocated == peak(trace, CARD, granularity).allocated
    assert highest.moment == peak(trace, CARD, granularity).moment == "backward of the loss"


def test_a_few_points_are_all_kept() -> None:
    points = [Point("loss", (i,)) for i in range(3)]
    assert thin(points, 0.001) == points


@pytest.mark.parametrize("suffix", [".svg", ".PNG"])
def test_a_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"step{suffix}"
    draw_timeline(made_up(8, 20), CARD, 80 * GIB, path, "a & b <c>")
    start = path.read_bytes()[:8]
    assert start == b"\x89PNG\r\n\x1a\n" if suffix == ".PNG" else start.startswith(b"<?xml")


def test_the_picture_says_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "step.svg"
    draw_timeline(made_up(8, 20), CARD, 8 * GIB, path, "eight billion")
    ElementTree.parse(path)
    said = re.findall(r"<!-- (.*?) -->", path.read_text())  # matplotlib writes each text beside its glyphs
    everything = "\n".join(said)
    for words in ("eight billion", "peak 7.00 GiB", "backward of the loss", "device memory 8.00 GiB"):
        assert words in everything
    assert [said.count(part) for part in ("forward", "loss", "backward", "optimizer")] == [2, 2, 2, 1]
    assert [name for name in STYLES if name in everything] == [
        "parameter shards", "optimizer state", "saved activations", "logits and loss",
    ], "what is nowhere a thousandth of the peak has no place in the legend"  # fmt: skip


NAMED_AT_LENGTH = "a-recipe-whose-name-goes-on-and-on-" * 6


@pytest.mark.parametrize("scale", [GIB, 2000 * GIB, 30_000], ids=["GiB", "TiB", "KiB"])
def test_nothing_is_cut_off_at_the_border(tmp_path: Path, scale: int) -> None:
    import numpy as np
    from matplotlib.image import imread

    def scaled(event: Event) -> Event:
        return event._replace(size=event.size * scale // GIB) if isinstance(event, Alloc) else event

    trace = made_up(8, 20)
    first = Alloc(Storage(CARD, "recomputed activations"), scale, 0)
    last = Moment("backward of model.language_model.decoder.layers.117")
    last_of_all = Alloc(Storage(CARD, "communication buffers"), 9 * scale, 0)
    trace = Trace([first, *map(scaled, trace.before)], [*map(scaled, trace.events), last, last_of_all])
    draw_timeline(trace, CARD, 10 * scale, tmp_path / "step.png", NAMED_AT_LENGTH)
    picture = imread(tmp_path / "step.png")[..., :3]
    border = np.concatenate([picture[:5].reshape(-1, 3), picture[-5:].reshape(-1, 3)])
    border = np.concatenate([border, picture[:, :5].reshape(-1, 3), picture[:, -5:].reshape(-1, 3)])
    assert border.min() == 1, "white all round"


def test_equal_traces_are_equal_files_and_nothing_is_left_set(tmp_path: Path) -> None:
    import matplotlib

    before = matplotlib.rcParams.copy()  # a dict of it would make matplotlib choose a backend
    for name in "ab":
        draw_timeline(made_up(4, 10), CARD, 8 * GIB, tmp_path / f"{name}.svg", "t")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert matplotlib.rcParams.copy() == before
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize("trace", [Trace([Alloc(Storage(CARD, "gradients"), 5, 0)]), made_up(2, 2, device="cpu")])
def test_little_or_nothing_on_the_device_can_be_drawn(tmp_path: Path, trace: Trace) -> None:
    draw_timeline(trace, CARD, 80 * GIB, tmp_path / "step.png", "nothing")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_thousands_of_events_make_a_small_picture(tmp_path: Path) -> None:
    trace = made_up(blocks=80, tensors=150)  # 48,000 events
    draw_timeline(trace, CARD, 80 * GIB, tmp_path / "step.svg", "long")
    assert (tmp_path / "step.svg").stat().st_size < 2**20


@pytest.mark.parametrize(
    ("name", "words"), [("step.pdf", "neither .svg nor .png"), ("step", "neither"), ("no/step.svg", "no folder")]
)
def test_a_path_that_cannot_be_drawn_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(RecipeError, match=f"^--plot: .*{re.escape(words)}"):
        draw_timeline(Trace(), CARD, GIB, tmp_path / name, "t")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_no_defect_of_ours(tmp_path: Path) -> None:
    (tmp_path / "step.svg").mkdir()
    with pytest.raises(RecipeError, match=r"^--plot: cannot write .*step\.svg"):
        draw_timeline(Trace(), CARD, GIB, tmp_path / "step.svg", "t")


def test_without_matplotlib_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RecipeError, match=re.escape("--plot: needs matplotlib: pip install 'fsdptrain[plot]'")):
        refuse_undrawable(tmp_path / "step.svg")


STACK: dict[Category, int] = {
    "parameter shards": 4 * GIB, "optimizer state": 8 * GIB, "saved activations": 25 * GIB, "gradients": 4 * GIB,
    "temporaries": GIB // 100,
}  # fmt: skip


@pytest.mark.parametrize("width", [4, 33, 60, 80, 100])
@pytest.mark.parametrize("capacity", [1, 20 * GIB, 41 * GIB, 43 * GIB, 80 * GIB, 4000 * GIB])
def test_no_line_is_wider_than_asked_and_the_bar_is_as_wide(width: int, capacity: int) -> None:
    bar, *rest = memory_bar(STACK, {"outside torch": 2 * GIB}, capacity, width).plain.split("\n")
    assert len(bar) == width and bar.count("|") == 2
    assert all(len(line) <= max(width, 36) for line in rest)
    assert (bar[-1] == "|") == (sum(STACK.values()) + 2 * GIB <= capacity), "what does not fit stands behind the end"


def test_the_bar_is_in_proportion() -> None:
    bar = memory_bar(STACK, {"outside torch": 2 * GIB}, 86 * GIB, 88).plain.split("\n")[0]
    assert bar == "|" + "A" * 25 + "O" * 8 + "P" * 4 + "G" * 4 + "##" + "." * 43 + "|"


def test_the_legend_is_in_the_order_of_the_bar_and_leaves_out_the_tiny() -> None:
    _, verdict, *legend = memory_bar(STACK, {"outside torch": 2 * GIB}, 80 * GIB, 60).plain.split("\n")
    assert verdict == "43.01 of 80.00 GiB: 36.99 free"
    assert legend == [
        "A saved activations 25.00  O optimizer state 8.00", "P parameter shards 4.00  G gradients 4.00",
        "# outside torch 2.00",
    ]  # fmt: skip


def test_overflow_is_said_and_shown() -> None:
    bar, verdict, *_ = memory_bar({"gradients": 30 * GIB}, {}, 20 * GIB, 32).plain.split("\n")
    assert bar == "|" + "G" * 20 + "|" + "G" * 10
    assert verdict == "30.00 of 20.00 GiB: 10.00 TOO MUCH"


def test_letters_are_distinct() -> None:
    letters = {style.letter for style in STYLES.values()} | {"#", "|", "."}
    assert len(letters) == len(STYLES) + 3


def test_an_empty_card() -> None:
    assert memory_bar({}, {}, GIB, 10).plain == "|........|\n0 of 1.00 GiB: 1.00 free"
