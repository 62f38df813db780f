"""Several sources in one run: the shares asked are those read, in every order of work the same sequences."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import documents_of, plain_loss, stream_of
from support import GSM8K, SHAKESPEARE, events, fsdptrain, planned, write_recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fsdptrain.data import prepare as preparing
from fsdptrain.data.corpus import Interleave, Mixture
from fsdptrain.errors import DataError, RecipeError
from fsdptrain.plan.plan import Plan

MATHS: dict[str, Any] = {
    "path": "maths.jsonl", "format": "prompt_completion", "separator": "\n",
    "columns": {"prompt": "question", "completion": "answer"},
}  # fmt: skip
HELD_OUT: dict[str, Any] = {"data__eval": {"fraction": 0.1}, "eval__every": 1}


def a_recipe(tmp: Path, *sources: dict[str, Any], **changes: Any) -> Path:
    """Write a recipe with these sources beside their files: verse, words and maths."""
    tmp.mkdir(exist_ok=True)
    paragraphs = SHAKESPEARE.read_text().split("\n\n")
    for name, texts in (("verse", paragraphs[:300]), ("words", paragraphs[300:400])):
        (tmp / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp / "maths.jsonl").write_text("".join(GSM8K.read_text().splitlines(keepends=True)[:120]))
    return write_recipe(tmp, data__path=None, data__sources=[*sources], **changes)


shares_of_sources = st.lists(st.fractions(Fraction(1, 1000), 1000), min_size=1, max_size=8)


@given(shares_of_sources, st.integers(0, 10**12))
@settings(max_examples=60)
def test_the_share_of_each_source_is_met_at_every_position(shares: list[Fraction], far: int) -> None:
    order, counts, total = Interleave.of(shares), Counter[int](), sum(shares)
    limit = {1: 0, 2: Fraction(1, 2), 3: 1}.get(len(shares), Fraction(17, 10))
    for position in range(200):
        source, nth = order.at(position)
        assert nth == counts[source], "the sequences of a source come one after another"
        counts[source] += 1
        assert all(abs(counts[i] - (position + 1) * share / total) <= limit for i, share in enumerate(shares))
    before, (source, nth), after = order.counts(far), order.at(far), order.counts(far + 1)
    assert nth == before[source] and sum(before) == far
    assert [new - old for old, new in zip(before, after, strict=True)] == [i == source for i in range(len(shares))]


def test_one_source_is_the_short_form_to_the_bit(tmp_path: Path) -> None:
    mixed, held_out, held_corpus = stream_of(a_recipe(tmp_path, {"path": "verse.jsonl"}, data__eval={"fraction": 0.1}))
    path = write_recipe(tmp_path, data__path=str(tmp_path / "verse.jsonl"), data__eval={"fraction": 0.1})
    short, *same = stream_of(path)
    positions = 2 * len(short) + 3
    assert len(mixed) == len(short) and mixed.digest(range(positions)) == short.digest(range(positions))
    assert mixed.label_tokens(range(positions)) == short.label_tokens(range(positions))
    a, b = (dict[str, Any](stream.batch(range(positions))) for stream in (mixed, short))
    assert all(torch.equal(a[name], b[name]) if torch.is_tensor(a[name]) else a[name] == b[name] for name in a)
    assert (held_out, held_corpus.digest, mixed.corpus.digest) == (same[0], same[1].digest, short.corpus.digest)


def test_every_source_is_read_in_a_new_order_in_each_of_its_epochs(tmp_path: Path) -> None:
    """By weights 3 : 1, in a stream of an epoch that has as many sequences as both."""
    path = a_recipe(tmp_path, {"path": "verse.jsonl", "weight": 1.5}, {"path": "words.jsonl", "weight": 0.5})
    stream = stream_of(path)[0]
    assert isinstance(stream.corpus, Mixture)
    sizes = [len(part) for part in stream.corpus.parts]
    assert len(stream) == sum(sizes)
    first, second = (part.notes for part in stream.corpus.parts)
    assert stream.corpus.notes == {name: first[name] + second[name] for name in first} and first["dropped"] == 0
    numbers = stream.at(range(12 * len(stream)))
    of_sources = [[n for n in numbers if n < sizes[0]], [n - sizes[0] for n in numbers if n >= sizes[0]]]
    assert len(of_sources[0]) == 3 * len(of_sources[1])
    for read, size in zip(of_sources, sizes, strict=True):
        epochs = [tuple(read[i : i + size]) for i in range(0, len(read) // size * size, size)]
        assert len(epochs) > 2 and len({*epochs}) == len(epochs)
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    part, number = stream.corpus.parts[1], stream.at([2, 3, 4, 5])  # the first of the smaller one is among them
    own = [n - sizes[0] for n in number if n >= sizes[0]]
    row = next(i for i, n in enumerate(number) if n >= sizes[0])
    assert torch.equal(stream.batch([2, 3, 4, 5])["input_ids"][row], part.batch(own)["input_ids"][0])


def test_epochs_say_how_often_each_source_is_read(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, {"path": "verse.jsonl", "epochs": 0.5}, {"path": "words.jsonl", "epochs": 3})
    stream = stream_of(recipe)[0]
    sizes = [len(part) for part in stream.corpus.parts]
    assert len(stream) == round(0.5 * sizes[0] + 3 * sizes[1])
    assert stream.reads(len(stream)) == pytest.approx([0.5, 3], abs=1 / min(sizes))
    read = Counter(stream.at(range(len(stream))))
    assert {read[sizes[0] + n] for n in range(sizes[1])} <= {2, 3} and max(read[n] for n in range(sizes[0])) == 1


def test_other_weights_and_names_need_no_new_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = stream_of(a_recipe(tmp_path, {"path": "verse.jsonl", "weight": 1}, MATHS | {"weight": 1}))[0]
    monkeypatch.setattr(preparing.PartEncoder, "encode", pytest.fail)
    others = {"path": "verse.jsonl", "name": "a", "weight": 9}, MATHS | {"weight": 1, "name": "b"}
    after = stream_of(a_recipe(tmp_path, *others))[0]
    assert before.corpus.digest == after.corpus.digest and before.at(range(9)) != after.at(range(9))


@pytest.mark.parametrize(
    ("sources", "changes", "message"),
    [
        ([{"path": "verse.jsonl", "wieght": 1}], {}, "source 1: wieght: unknown key; did you mean `weight`?"),
        ([{"path": "verse.jsonl", "weight": 0}], {}, "source 1: weight: 0.0 is too small: must be above 0"),
        ([{"path": "verse.jsonl", "format": "texts"}], {}, "source 1: format: 'texts' is not one of: "),
        ([{"path": "verse.jsonl", "weight": 1, "epochs": 2}], {}, "verse: weight and epochs both say how much"),
        ([{"path": "verse.jsonl", "weight": 1}, MATHS], {}, "verse has a weight and maths has none: give all"),
        ([{"path": "verse.jsonl"}, {"path": "verse.jsonl"}], {}, "two sources are called 'verse': set a `name`"),
        ([{"name": "a"}], {}, "source 1: path is not set"),
        ([{"path": "verse.jsonl", "separator": ":"}], {}, "verse: separator: has no effect with data.format: text"),
        ([{"path": "verse.jsonl"}], {"data__separator": ":"}, "data.separator: has no effect with data.format: text"),
        ([{"path": "verse.jsonl", "revision": "main"}], {}, "verse: revision has no effect: not a Hub data set"),
        ([{"path": "verse.jsonl"}], {"data__path": "verse.jsonl"}, "data.path: has no effect beside data.sources"),
        (
            [{"path": "verse.jsonl"}, MATHS], {**HELD_OUT, "eval__best_of": "mathss"},
            "eval.best_of: 'mathss' is no source with held-out rows (data.eval): use one of verse, maths",
        ),
        (
            [{"path": "verse.jsonl"}], {**HELD_OUT, "eval__best_of": "verse"},
            "eval.best_of: has no effect: the held-out rows are of one source",
        ),
        (["verse.jsonl"], {}, "data.sources: ['verse.jsonl'] is not a list of mappings such as {path: …}"),
    ],
)  # fmt: skip
def test_a_mixture_that_cannot_be_read_is_refused(
    tmp_path: Path, sources: list[Any], changes: dict[str, Any], message: str
) -> None:
    path = a_recipe(tmp_path, *sources)
    write_recipe(tmp_path, **{"data__path": None, "data__sources": sources, **changes})
    with pytest.raises(RecipeError) as refused:
        planned(path)
    assert message in str(refused.value)


def test_a_key_of_data_is_for_the_sources_that_can_use_it(tmp_path: Path) -> None:
    maths = {key: value for key, value in MATHS.items() if key != "separator"}
    plan = planned(a_recipe(tmp_path, {"path": "verse.jsonl"}, maths, data__separator="\n", data__max_rows=9))
    assert [source.data.separator for source in plan.sources] == ["\n", "\n"]
    assert [source.data.max_rows for source in plan.sources] == [9, 9]
    assert [source.data.path for source in plan.sources] == [str(tmp_path / f"{n}.jsonl") for n in ("verse", "maths")]
    assert Plan.from_json(plan.to_json()) == plan


WEIGHTED = [{"path": "verse.jsonl", "weight": 0.7}, MATHS | {"weight": 0.3}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train four steps of a mixture on one rank; return the recipe."""
    tmp = tmp_path_factory.mktemp("mixture")
    recipe = a_recipe(
        tmp, *WEIGHTED, data__eval={"fraction": 0.1}, launch__nproc_per_node=1, log__trackers=["tensorboard"],
        data__max_rows=100,
    )  # fmt: skip
    done = fsdptrain("run", recipe)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"label tokens\)\n  verse \d\.\d{4}  maths \d\.\d{4}\n", done.stdout)
    return recipe


def test_each_source_has_a_held_out_loss_and_all_have_one(trained: Path) -> None:
    _, _, corpus = stream_of(trained)
    last = events(trained.parent / "run", "eval")[-1]
    labels = [int(part.labels.sum()) for part in corpus.parts]
    assert last["tokens"] == sum(labels) and [*last["losses"]] == ["verse", "maths"]
    assert last["loss"] == pytest.approx(np.average([*last["losses"].values()], weights=labels), rel=1e-12)
    documents = documents_of(corpus.parts[0], range(len(corpus.parts[0])))
    assert last["losses"]["verse"] == pytest.approx(plain_loss(str(trained.parent / "run/export"), documents), rel=1e-5)
    board = EventAccumulator(str(trained.parent / "run" / "tensorboard"))
    board.Reload()
    assert board.Scalars("eval/losses/maths")[-1].value == pytest.approx(last["losses"]["maths"])
    status = fsdptrain("status", trained.parent / "run").stdout
    assert f"(verse {last['losses']['verse']:.4f}, maths {last['losses']['maths']:.4f})" in status


def run_from_the_middle(trained: Path, tmp: Path, sources: list[dict[str, Any]], *overrides: str) -> tuple[Any, Path]:
    """Run the recipe with these sources in a copy of the run folder, from the checkpoint of step 2."""
    folder = Path(shutil.copytree(trained.parent / "run", tmp / "run"))
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    recipe = trained.parent / "other.yaml"
    written = yaml.safe_load(trained.read_text())
    recipe.write_text(yaml.safe_dump(written | {"data": written["data"] | {"sources": sources}}))
    return fsdptrain("run", recipe, f"output_dir={folder}", *overrides), folder


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_resume_under_other_names_trains_the_same_sequences(trained: Path, tmp_path: Path, ranks: int) -> None:
    renamed = [{**source, "name": f"source {number}"} for number, source in enumerate(WEIGHTED)]
    words = (f"launch.nproc_per_node={ranks}", "export.at_end=false")
    done, folder = run_from_the_middle(trained, tmp_path, renamed, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert events(folder, "resume")[-1]["step"] == 2
    before, after = (events(run, "step")[-2:] for run in (trained.parent / "run", folder))
    for one, other in zip(before, after, strict=True):
        assert one["samples"] == other["samples"]
        for name in ("loss", "grad_norm"):
            assert one[name] == (other[name] if ranks == 1 else pytest.approx(other[name], rel=1e-5))
    assert [*events(folder, "eval")[-1]["losses"]] == ["source 0", "source 1"]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([WEIGHTED[0], MATHS | {"weight": 0.4}], "source 2: weight was 0.3, is 0.4 now, so the run would train on"),
        ([*WEIGHTED, {"path": "words.jsonl", "weight": 1}], "there were 2 sources, and there are 3 now"),
    ],
)
def test_a_resume_with_other_weights_or_sources_is_refused(
    trained: Path, tmp_path: Path, sources: list[dict[str, Any]], message: str
) -> None:
    done, folder = run_from_the_middle(trained, tmp_path, sources)
    assert done.returncode == 2 and f"data.sources: {message}" in done.stderr, done.stderr
    assert len(events(folder, "start")) == 1


def test_validate_says_what_is_read_of_each_source(trained: Path) -> None:
    done = fsdptrain("validate", trained, "--json")
    data = json.loads(done.stdout)["data"]
    stream = stream_of(trained)[0]
    verse, maths = data["sources"]
    read = Counter(number < len(stream.corpus.parts[0]) for number in stream.at(range(4 * 8)))
    assert (verse["sequences_read"], maths["sequences_read"]) == (read[True], read[False]) == (22, 10)
    assert maths["times_read"] == pytest.approx(10 / maths["sequences"]) and maths["share"] == pytest.approx(0.3)
    assert sum(each["trained_share"] for each in (verse, maths)) == pytest.approx(1)
    assert "⟦" in verse["example"] and maths["lengths"]["longest"] > 64
    assert data["rows"] == verse["rows"] + maths["rows"] == 200
    shares = events(trained.parent / "run", "start")[0]["data"]["shares"]
    assert shares == {"verse": verse["token_share"], "maths": maths["token_share"]}
    card = (trained.parent / "run/export/README.md").read_text()
    assert f"- shares of the tokens: verse {shares['verse']:.1%}, maths {shares['maths']:.1%}\n" in card


def test_an_error_names_its_source(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, {"path": "verse.jsonl"}, {"path": "words.jsonl", "max_rows": 2, "name": "few"})
    written = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump(written | {"data": written["data"] | {"eval": {"fraction": 0.001}}}))
    with pytest.raises(DataError, match=r"data.eval: fraction 0.001 of 2 rows leaves none to hold out \(source few\)"):
        stream_of(recipe)
