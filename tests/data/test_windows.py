"""Windows of files (data.window): every sequence once a pass, in the order of an independent reference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import stream_of
from support import SHAKESPEARE, planned, quiet, write_recipe

from fsdptrain.data.cache import cache_dir
from fsdptrain.data.corpus import Stream
from fsdptrain.data.prepare import open_stream
from fsdptrain.data.tokenizer import load_tokenizer, train_bpe
from fsdptrain.data.windows import WindowStream, pin_windows, windows_of
from fsdptrain.errors import RecipeError
from fsdptrain.plan.plan import Plan

FILES = 7

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bpe")
    train_bpe(iter([SHAKESPEARE.read_text()[:20000]]), 300).save_pretrained(folder)
    return str(folder)


def write_files(folder: Path, number: int = FILES) -> Path:
    """Write files of different sizes, of different rows."""
    folder.mkdir(exist_ok=True)
    paragraphs = iter(SHAKESPEARE.read_text().split("\n\n"))
    for file in range(number):
        rows = [next(paragraphs) for _ in range(20 + 7 * (file * 5 % 4))]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return folder


def a_plan(tmp: Path, bpe: str, **changes: Any) -> Plan:
    """Return the plan of a run on the files in `tmp`/files."""
    if not (tmp / "files").exists():
        write_files(tmp / "files")
    wanted = {"model__tokenizer": bpe, "data__path": str(tmp / "files"), "train__steps": 9, **changes}
    return planned(write_recipe(tmp, **wanted))


def opened(plan: Plan) -> Stream:
    return open_stream(plan, load_tokenizer(plan, quiet), quiet)[0]


def a_stream(tmp: Path, bpe: str, **changes: Any) -> WindowStream:
    stream = opened(a_plan(tmp, bpe, **changes))
    assert isinstance(stream, WindowStream)
    return stream


def rows_of(stream: Stream, positions: range) -> torch.Tensor:
    """Return ids, labels and positions of some sequences, and check the counts of labels."""
    batch = stream.batch(positions)
    assert int((batch["labels"] >= 0).sum()) == stream.label_tokens(positions) == stream.divisor(positions)
    return torch.stack([batch["input_ids"], batch["labels"], batch["position_ids"]])


def reference(tmp: Path, bpe: str, window: int, positions: int, seed: int) -> torch.Tensor:
    """Return the same by the documented order alone: a window is a folder with links to its files, prepared whole."""
    files = sorted((tmp / "files").iterdir())
    drawn = np.random.default_rng([seed, 0, 3]).permutation(len(files)).tolist()
    found, epoch = list[torch.Tensor](), 0
    while sum(len(rows[0]) for rows in found) < positions:
        for number, at in enumerate(range(0, len(files), window)):
            folder = tmp / f"{seed}-{window}-{number}"
            folder.mkdir(exist_ok=True)
            for each in drawn[at : at + window]:
                if not (folder / files[each].name).exists():
                    (folder / files[each].name).symlink_to(files[each])
            recipe = write_recipe(tmp, model__tokenizer=bpe, data__path=str(folder), seed=seed)
            corpus = stream_of(recipe)[0].corpus
            order = np.random.default_rng([seed, epoch, 0, number]).permutation(len(corpus))
            batch = corpus.batch(order.tolist())
            found.append(torch.stack([batch["input_ids"], batch["labels"], batch["position_ids"]]))
        epoch += 1
    return torch.cat(found, dim=1)[:, :positions]


@pytest.mark.parametrize("window", [FILES, FILES + 3])
def test_one_window_is_the_prepared_order_to_the_bit_in_every_epoch(tmp_path: Path, bpe: str, window: int) -> None:
    windowed, whole = opened(a_plan(tmp_path, bpe, data__window=window)), opened(a_plan(tmp_path, bpe))
    positions = range(3 * len(whole) + 5)
    assert len(windowed) == len(whole) and not isinstance(windowed, WindowStream)
    assert torch.equal(rows_of(windowed, positions), rows_of(whole, positions))
    assert windowed.digest(positions) == whole.digest(positions)
    assert windowed.corpus.fingerprint == whole.corpus.fingerprint and windowed.corpus.digest == whole.corpus.digest


@pytest.mark.parametrize("window", [1, 2, 5])
def test_windows_are_read_in_the_order_of_the_reference(tmp_path: Path, bpe: str, window: int) -> None:
    stream = a_stream(tmp_path, bpe, data__window=window, seed=5)
    assert len(stream.windows) == -(-FILES // window)
    found = torch.cat([rows_of(stream, range(at, at + 8)) for at in range(0, 800, 8)], dim=1)
    assert 2 * stream.starts[-1] < 800, "the files are too large for two passes"
    assert torch.equal(found, reference(tmp_path, bpe, window, 800, seed=5))


def test_seeds_draw_other_windows(tmp_path: Path, bpe: str) -> None:
    plans = [a_plan(tmp_path, bpe, data__window=3, seed=seed) for seed in (0, 1, 0)]
    first, other, again = map(windows_of, plans)
    assert first == again and first != other
    assert [*map(len, first)] == [3, 3, 1] and all([*window] == sorted(window) for window in first)


def test_empty_files_are_in_no_window(tmp_path: Path, bpe: str) -> None:
    write_files(tmp_path / "files")
    (tmp_path / "files" / "3a.jsonl").touch()
    windows = windows_of(a_plan(tmp_path, bpe, data__window=1))
    assert len(windows) == FILES and not any("3a" in name for window in windows for name in window)


def resumed(tmp: Path, bpe: str, monkeypatch: pytest.MonkeyPatch, step: int = 20) -> tuple[Plan, WindowStream]:
    """Return a plan with a checkpoint of `step` steps, and the stream of the run before it was stopped."""
    plan = a_plan(tmp, bpe, data__window=2)
    (plan.rundir.checkpoints / f"step-{step:08}").mkdir(parents=True)  # a checkpoint
    plan.rundir.logs.mkdir(exist_ok=True)
    monkeypatch.setattr(type(plan.rundir), "checkpoint_steps", lambda _: [step])
    stream = a_stream(tmp, bpe, data__window=2)
    stream.at(range(8 * step + 8))
    pin_windows(plan.rundir, {"files": stream.corpus.fingerprint, "read": stream.known})
    return plan, stream


def test_a_resume_prepares_no_window_before_its_own(
    tmp_path: Path, bpe: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[str]
) -> None:
    plan, before = resumed(tmp_path, bpe, monkeypatch)
    own = before.place_in_window(160)[1]
    assert 0 < own < 3
    expected, digest = rows_of(before, range(160, 166)), before.corpus.digest
    for kind in ("data", "packed", "tokens"):
        for folder in (own_cache / kind).iterdir():
            shutil.rmtree(folder, ignore_errors=True)
    encoded.clear()
    stream = opened(plan)
    assert torch.equal(rows_of(stream, range(160, 166)), expected) and stream.corpus.digest == digest
    assert len(stream) == len(before) and stream.corpus.fingerprint == before.corpus.fingerprint
    allowed = {name for window in before.windows[own : own + 2] for name in window}
    assert encoded and {*encoded} <= allowed


def test_changed_files_are_refused(tmp_path: Path, bpe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their content if the window was read, else by the fingerprint of the list of files."""
    plan, before = resumed(tmp_path, bpe, monkeypatch)
    own = before.place_in_window(160)[1]
    file = Path(next(iter(before.windows[own])))
    file.write_text(file.read_text().replace("the ", "teh "))
    with pytest.raises(RecipeError, match=rf"window {own + 1} of 4 \(with {file}\) has other rows"):
        opened(plan)
    (tmp_path / "files" / "9.jsonl").write_text('{"text": "more"}\n')
    stream = opened(plan)
    assert stream.corpus.fingerprint != before.corpus.fingerprint
    assert isinstance(stream, WindowStream) and [*stream.opened] == [0]


@pytest.mark.parametrize("changes", [{}, {"data__packing": "none", "data__long_rows": "cut"}])
def test_what_is_removed_can_be_read_on_and_leaves_nothing(
    tmp_path: Path, bpe: str, own_cache: Path, changes: dict[str, Any]
) -> None:
    stream = a_stream(tmp_path, bpe, data__window=2, data__seq_len=32, **changes)
    corpus, expected = stream.part(0), rows_of(stream, range(8))
    stream.leave([0], remove=True)
    left = [path for kind in ("data", "packed", "tokens") for path in (own_cache / kind).iterdir()]
    assert not [path for path in left if path.suffix != ".lock"]
    numbers = stream.at(range(8))
    assert torch.equal(corpus.batch(numbers)["input_ids"], expected[0])
    assert torch.equal(rows_of(stream, range(8)), expected)  # it is prepared again


def test_what_was_left_takes_no_space_on_the_disk(tmp_path: Path, bpe: str) -> None:
    stream = a_stream(tmp_path, bpe, data__window=2)
    rows_of(stream, range(8))
    stream.place_in_window(stream.starts[-1])  # opens the next window
    stream.leave([0], remove=True)
    assert "tokens.bin (deleted)" not in Path("/proc/self/maps").read_text()
    assert stream.some_rows() is stream.opened[1]


def test_a_run_without_windows_does_not_rely_on_what_they_remove(tmp_path: Path, bpe: str) -> None:
    whole = opened(a_plan(tmp_path, bpe))
    kept = {path for kind in ("data", "packed", "tokens") for path in cache_dir(kind).iterdir()}
    stream = a_stream(tmp_path, bpe, data__window=2)
    stream.leave([0], remove=True)
    assert all(path.exists() for path in kept)
    assert torch.equal(rows_of(whole, range(8)), rows_of(opened(a_plan(tmp_path, bpe)), range(8)))


def test_held_out_files_are_those_of_a_run_without_windows(tmp_path: Path, bpe: str) -> None:
    held = write_files(tmp_path / "held", 1)
    plan = a_plan(tmp_path, bpe, data__window=2, data__eval={"path": str(held)})
    stream, numbers, corpus = open_stream(plan, load_tokenizer(plan, quiet), quiet)
    _, expected, same = stream_of(write_recipe(tmp_path, model__tokenizer=bpe, data__path=str(tmp_path / "files"),
                                               data__eval={"path": str(held)}))  # fmt: skip
    assert numbers == expected and corpus.digest == same.digest and corpus.digest != stream.corpus.digest


def test_a_data_set_of_the_hub_has_no_files_to_read_in_windows(tmp_path: Path, bpe: str) -> None:
    with pytest.raises(RecipeError, match=r"data\.window: "):
        a_plan(tmp_path, bpe, data__window=2, data__path="org/name")
