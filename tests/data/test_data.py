"""Rows to packed sequences: no token lost or repeated, the right labels, and documents that do not see each other."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import zlib
from concurrent.futures import wait
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from chat_templates import CHATML_TOKENS, FAMILIES
from forks import Command
from hypothesis import given, settings
from hypothesis import strategies as st
from support import GSM8K, ROOT, SHAKESPEARE, environment, planned, quiet, write_recipe
from support import fsdptrain as run_command
from test_chat import talk_of, tokenizer_of
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import fsdptrain.data.tokenizer
from fsdptrain.config.formats import Format
from fsdptrain.config.mixture import MixtureSource
from fsdptrain.config.schema import Data
from fsdptrain.data import prepare as preparing
from fsdptrain.data import readers, sources
from fsdptrain.data.cache import cache_dir, cached_folder
from fsdptrain.data.chat import PLAIN_CHAT_TEMPLATE
from fsdptrain.data.corpus import IGNORED, Corpus, Stream, cut, document_bounds, fill_sequences, pack, piece_labels
from fsdptrain.data.prepare import open_rows, pack_rows, prepare, row_notes
from fsdptrain.data.tokenizer import END_OF_TEXT as EOS
from fsdptrain.data.tokenizer import load_tokenizer
from fsdptrain.errors import CheckpointError, DataError, RecipeError, StorageError, WorkerLost
from fsdptrain.plan.plan import Plan

PACKINGS = ["bfd", "concat", "none"]
GSM8K_COLUMNS = {"prompt": "question", "completion": "answer"}
PC: dict[str, Any] = {"format": "prompt_completion", "columns": GSM8K_COLUMNS, "separator": "\n"}


def a_plan(folder: Path, world: int = 1, **changes: Any) -> Plan:
    """Return the plan of `support`'s recipe with changes, on `world` ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    return planned(write_recipe(folder, **changes), ranks=world)


@pytest.fixture(scope="session")
def bpe(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a byte-level BPE trained on GSM8K's problems."""
    changes = {f"data__{name}": value for name, value in PC.items()}
    folder = tmp_path_factory.mktemp("bpe")
    plan = a_plan(folder, data__path=str(GSM8K), model__tokenizer={"train": 2048}, **changes)
    return load_tokenizer(plan, quiet)


def with_specials(tokenizer: Any, *specials: str, bos: str | None = None, **settings: Any) -> Any:
    """Copy a tokenizer with more special tokens; with `bos`, that token begins every text, as with Llama's."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens([*specials, *([bos] if bos else [])])
    if bos:
        backend.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        ids = [(bos, backend.token_to_id(bos))]
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=ids)
    names = {"eos_token": EOS, "pad_token": EOS, "bos_token": bos, **settings}
    copy = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)
    copy.chat_template = tokenizer.chat_template
    return copy


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def corpus_of(path: Path, tokenizer: Any, **data: Any) -> Corpus:
    settings = Data(**data | {"format": Format(data.get("format", "text"))})
    return pack_rows(open_rows(str(path), settings, tokenizer, settings.max_rows, quiet), settings, seed=0)[0]


def corpus_from(folder: Path, tokenizer: Any, *rows: dict[str, Any], **data: Any) -> Corpus:
    return corpus_of(jsonl(folder / "rows.jsonl", *rows), tokenizer, **data)


def everything(corpus: Corpus) -> dict[str, np.ndarray[Any, Any]]:
    batch = corpus.batch(range(len(corpus)))
    return {name: value.numpy() for name, value in batch.items() if isinstance(value, torch.Tensor)}


def inputs(corpus: Corpus) -> list[list[int]]:
    """Return the input tokens of every piece, sequence by sequence."""
    ids = everything(corpus)["input_ids"]
    found = []
    for sequence in range(len(corpus)):
        at = 0
        for _, length, _ in corpus.pieces_of(sequence):
            found.append(ids[sequence, at : at + length].tolist())
            at += length
    return found


def trained_runs(corpus: Corpus, tokenizer: Any) -> list[str]:
    """Return what is trained, as text: one string for every run of positions with a label."""
    runs = []
    for labels in everything(corpus)["labels"]:
        edges = np.flatnonzero(np.diff(np.concatenate([[False], labels != IGNORED, [False]])))
        runs += [tokenizer.decode(labels[a:b]) for a, b in edges.reshape(-1, 2)]
    return runs


# --------------------------------------------------------------------------------------------------------- packing


items = st.integers(1, 200).flatmap(lambda size: st.tuples(st.lists(st.integers(1, size), max_size=60), st.just(size)))


@given(items)
@settings(max_examples=100)
def test_sequences_are_filled_until_no_later_piece_fits(case: tuple[list[int], int]) -> None:
    lengths, size = case
    sequences = [*fill_sequences(lengths, size)]
    assert sorted(piece for sequence in sequences for piece in sequence) == list(range(len(lengths)))
    for number, sequence in enumerate(sequences):
        space = size - sum(lengths[piece] for piece in sequence)
        later = [lengths[piece] for rest in sequences[number + 1 :] for piece in rest]
        assert 0 <= space < min(later, default=size + 1)
        assert sequence[0] == min(piece for rest in sequences[number:] for piece in rest)  # no piece waits for long


def test_filling_sequences_is_quick() -> None:
    lengths = np.random.default_rng(0).integers(1, 8193, 100_000).tolist()
    sequences = [*fill_sequences(lengths, 8192)]  # a quadratic algorithm would take hours
    assert len(sequences) <= 1.02 * sum(lengths) / 8192


@pytest.mark.parametrize("seq_len", [512, 1024])
def test_sequences_are_full_and_mixed_as_if_drawn(bpe: Any, seq_len: int) -> None:
    """Best-fit decreasing would put rows of one length into one sequence; random ones have many lengths."""
    corpus = corpus_of(GSM8K, bpe, seq_len=seq_len, **PC)
    lengths = corpus.pieces[:, 1]

    def mixed(order: Any) -> float:
        found = np.split(lengths[order], corpus.offsets[1:-1])
        return float(np.mean([len({*sequence.tolist()}) for sequence in found]))

    assert len(corpus) <= 1.01 * lengths.sum() / seq_len
    assert mixed(slice(None)) >= 0.97 * mixed(np.random.default_rng(0).permutation(len(lengths)))
    assert mixed(np.argsort(lengths)) < 0.8 * mixed(slice(None))


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_last_piece_of_one_token_predicts_nothing(bpe: Any, tmp_path: Path, packing: str) -> None:
    rows = [{"text": text} for text in SHAKESPEARE.read_text()[:4000].split("\n\n")[:20]]
    tokens = corpus_from(tmp_path, bpe, rows[-1], seq_len=4096).notes["tokens"]
    lengths = [length for length in range(8, 65) if (tokens - 1) % length == 0]
    assert lengths, "choose another text"
    for seq_len in lengths:
        corpus = corpus_from(tmp_path, bpe, rows[-1], seq_len=seq_len, packing=packing)
        assert len(corpus) == tokens // seq_len and int(corpus.pieces[:, 1].sum()) == tokens - 1


@pytest.mark.parametrize("packing", ["bfd", "concat"])
def test_neighbours_in_the_file_do_not_share_sequences(bpe: Any, tmp_path: Path, packing: str) -> None:
    rows = [{"text": f"row {number}"} for number in range(1000)]
    corpora = []
    for seed in (0, 0, 1):
        plan = a_plan(tmp_path, seed=seed, data__path=str(jsonl(tmp_path / "rows.jsonl", *rows)), data__packing=packing)
        corpora.append(prepare(plan, bpe, quiet)[0].corpus)
    corpus = corpora[0]
    places = [corpus.rows_of([number]) for number in range(len(corpus))]
    together = np.mean([np.diff(np.sort(place)).min() == 1 for place in places if len(place) > 1])
    assert together < 0.5  # of random sequences; all of them, if rows were packed as they follow in the file
    assert [c.pieces.tolist() == corpus.pieces.tolist() for c in corpora] == [True, True, False]


@st.composite
def documents(draw: st.DrawFn) -> tuple[list[int], list[bool], Data]:
    """Draw row lengths, trained flags and settings; some rows are longer than a sequence, some are one token long."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=25))
    trained = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    return lengths, trained, Data(seq_len=draw(st.integers(2, 24)), packing=draw(st.sampled_from(PACKINGS)))


def synthetic(lengths: list[int], trained: list[bool], data: Data) -> Corpus:
    """Return a corpus whose tokens are numbered, with all pieces, in sequences as `pack` makes them."""
    flags, ends = np.array(trained), np.cumsum([0, *lengths])
    pieces = cut(ends, data)
    order, offsets = pack(pieces, data)
    labels = np.add.reduceat(piece_labels(pieces, flags)[order], offsets[:-1])
    return Corpus(
        tokens=np.arange(len(flags), dtype=np.uint32), trained=flags, ends=ends, lengths=np.array(lengths), notes={},
        seq_len=data.seq_len, pad=0, fingerprint="", name="", digest="", pieces=pieces[order], offsets=offsets,
        labels=labels,
    )  # fmt: skip


@given(documents())
@settings(max_examples=100)
def test_every_token_of_every_row_is_in_one_piece(case: tuple[list[int], list[bool], Data]) -> None:
    lengths, _, data = case
    ends = np.cumsum([0, *lengths])
    pieces = cut(ends, data)
    covered = [(row, token) for row, (a, b) in enumerate(pairwise(ends)) for token in range(a, b)]
    found = []
    for start, length, end in pieces.tolist():
        row = int(np.searchsorted(ends, end)) - 1
        assert 0 < length <= data.seq_len
        assert ends[row] <= start < start + length <= end == ends[row + 1]
        found += [(row, token) for token in range(start, start + length)]
    assert found == covered

    order, offsets = pack(pieces, data)
    assert sorted(order) == list(range(len(pieces)))
    assert offsets[0] == 0 and offsets[-1] == len(pieces) and (np.diff(offsets) > 0).all()
    fill = np.add.reduceat(pieces[order, 1], offsets[:-1])
    assert (fill <= data.seq_len).all()
    if data.packing == "concat":
        assert (fill[:-1] == data.seq_len).all()
        assert order.tolist() == list(range(len(pieces)))
    elif data.packing == "none":
        assert len(fill) == len(pieces) == sum(math.ceil(length / data.seq_len) for length in lengths)
    else:
        assert len(fill) <= 1 + 2 * fill.sum() / data.seq_len


@given(documents())
@settings(max_examples=100)
def test_a_batch_has_every_trained_token_once_and_knows_its_documents(case: tuple[list[int], list[bool], Data]) -> None:
    lengths, trained, data = case
    corpus = synthetic(lengths, trained, data)
    numbers = [*range(len(corpus)), -1]  # and a sequence of padding
    batch = corpus.batch(numbers)
    ids, labels, positions = (batch[name].numpy() for name in ("input_ids", "labels", "position_ids"))  # type: ignore[literal-required]
    where = labels != IGNORED
    firsts = {*np.cumsum([0, *lengths]).tolist()}
    assert sorted(labels[where]) == [token for token, flag in enumerate(trained) if flag and token not in firsts]
    assert (labels[where] == ids[where] + 1).all()  # tokens are numbered, so a label is the next number
    assert where.sum(axis=1).tolist() == [*corpus.labels, 0]
    documents, pairs = [], 0
    for number, row in zip(numbers, positions.tolist(), strict=True):
        sizes = corpus.pieces_of(number)[:, 1].tolist()
        padding = corpus.seq_len - sum(sizes)
        documents += [length for length in (*sizes, padding) if length]
        pairs += sum(size**2 for size in sizes)  # a token and one of its document
        sizes = [*sizes[:-1], sum(sizes[-1:]) + padding]  # padding continues the last piece
        assert row == [position for size in sizes for position in range(size)]
    bounds = batch["documents"].diff().tolist()
    assert bounds == documents + [0] * (len(bounds) - len(documents))
    assert max(documents) <= batch["longest"] <= max(128, 2 * max(documents))
    assert corpus.document() == pairs / (len(corpus) * corpus.seq_len)
    assert (ids[-1] == corpus.pad).all() and batch["documents"].dtype == torch.int32
    assert {each.dtype for each in (ids, labels, positions)} == {np.dtype(np.int64)}


def test_documents_come_in_few_shapes() -> None:
    """Each number of documents, and each bound on their length, may be compiled once."""
    found = [document_bounds([[length] * count]) for length in (1, 9, 100, 300) for count in (1, 7, 16, 17, 300)]
    assert {len(bounds) - 1 for bounds, _ in found} == {16, 32, 512}
    assert {longest for _, longest in found} == {128, 512}


# ---------------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize("train_on", ["completion", "all"])
def test_the_end_is_trained_and_the_prompt_if_all_is(bpe: Any, train_on: str) -> None:
    problem = json.loads(GSM8K.read_text().splitlines()[0])
    question, answer = problem["question"] + "\n", problem["answer"] + EOS
    corpus = corpus_of(GSM8K, bpe, seq_len=512, max_rows=1, train_on=train_on, **PC)
    (ids,) = inputs(corpus)
    assert bpe.decode(ids) == question + answer
    is_all = train_on == "all"
    assert trained_runs(corpus, bpe) == [bpe.decode(ids[1:]) if is_all else answer]
    assert corpus.show(bpe) == (f"⟦{question}{answer}⟧" if is_all else f"{question}⟦{answer}⟧")


def test_one_token_may_both_begin_and_end_a_row(bpe: Any, tmp_path: Path) -> None:
    tokenizer = with_specials(bpe, bos=EOS)
    corpus = corpus_from(tmp_path, tokenizer, {"text": "Hello"}, {"text": ""}, seq_len=32)
    assert [tokenizer.decode(ids) for ids in inputs(corpus)] == [f"{EOS}Hello{EOS}"]
    assert trained_runs(corpus, tokenizer) == [f"Hello{EOS}"]
    assert corpus.notes["dropped"] == 1


def test_a_tokenizer_without_an_end_is_refused(bpe: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="end-of-sequence"):
        corpus_from(tmp_path, with_specials(bpe, eos_token=None, pad_token=None), {"text": "a"}, seq_len=16)


# Of rows of 4, 40 and 104 tokens the last 2, 20 and 101 are trained. The last token of a piece predicts the next one.
@pytest.mark.parametrize(
    ("long_rows", "kept", "labels", "counts"),
    [
        (None, [4, 32, 32], [2, 12, 29], {"cut": 2}),
        ("cut", [4, 32, 32], [2, 12, 29], {"cut": 2}),
        ("drop", [4], [2], {"too_long": 2}),
        ("split", [4, 32, 8, 32, 32, 32, 8], [2, 13, 7, 30, 32, 32, 7], {"split": 2}),
    ],
)
def test_long_rows_are_cut_dropped_or_split(
    bpe: Any, tmp_path: Path, long_rows: str | None, kept: list[int], labels: list[int], counts: dict[str, int]
) -> None:
    (word,) = bpe(" the").input_ids
    rows = [{"prompt": " the" * a, "completion": " the" * b} for a, b in ((2, 1), (20, 19), (3, 100))]
    corpus = corpus_from(
        tmp_path, bpe, *rows, seq_len=32, packing="none", format="prompt_completion", long_rows=long_rows
    )
    assert corpus.pieces[:, 1].tolist() == kept and corpus.labels.tolist() == labels
    assert {name: corpus.notes[name] for name in ("cut", "split", "too_long") if corpus.notes.get(name)} == counts
    assert corpus.notes["label_tokens"] == sum(labels) and corpus.lengths.tolist() == [4, 40, 104]
    assert (everything(corpus)["input_ids"] == word).sum() == sum(kept) - (3 if long_rows == "split" else 1)
    whole = corpus_from(tmp_path, bpe, *rows, seq_len=32, packing="concat", format="prompt_completion")
    assert (whole.notes["label_tokens"], whole.notes["cut"]) == (123, 0), "a stream continues each row"
    [note] = itertools.chain(*row_notes(a_plan(tmp_path / "plan"), corpus, corpus))
    assert note.startswith("2 of 3 rows (67%) ") and ("teaches not to stop" in note) == ("cut" in counts)


def test_the_files_of_the_model_say_which_token_of_a_role_ends_an_answer(bpe: Any, tmp_path: Path) -> None:
    tokenizer = with_specials(bpe, "<|user|>", "<|assistant|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    talk = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(["Hi", "Ho", "And?", "So"])
    ]
    jsonl(tmp_path / "talks.jsonl", {"messages": talk}, {"messages": talk[:2]})
    ends = tokenizer.convert_tokens_to_ids([EOS, "<|user|>"])
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": ends[0]}))
    found = {}
    for name, config in (("without", {}), ("with", {"eos_token_id": ends})):
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps(config))
        data = {"data": {"path": str(tmp_path / "talks.jsonl"), "format": "chat", "seq_len": 64}}
        plan = a_plan(tmp_path / name, model={"id": str(tmp_path / "model")}, **data)
        stream, _, held_out = prepare(plan, loaded := load_tokenizer(plan, quiet), quiet)
        corpus = stream.corpus.parts[0]
        shown = loaded.decode(corpus.tokens[:][np.asarray(corpus.trained[:], bool)])
        found[name] = shown, itertools.chain(*row_notes(plan, corpus, held_out))
    assert found["with"][0] == "Ho<|user|>So<|user|>Ho<|user|>" and [*found["with"][1]] == []
    [note] = found["without"][1]
    assert found["without"][0] == "HoSoHo" and note.startswith("3 turns trained without an end")


@pytest.mark.parametrize(
    ("prompt", "long_rows", "more"),
    [("Hi", "drop", "; 3 are longer than data.seq_len"), ("Hi there, " * 20, "cut", "")],
)
def test_rows_without_trained_tokens_are_an_error(
    bpe: Any, tmp_path: Path, prompt: str, long_rows: str, more: str
) -> None:
    rows = [{"prompt": prompt, "completion": "word " * 100}] * 3
    with pytest.raises(DataError, match=rf"rows\.jsonl: none of the 3 rows has a trained token{more}$"):
        corpus_from(tmp_path, bpe, *rows, seq_len=16, format="prompt_completion", long_rows=long_rows)


# ------------------------------------------------------------------------------------------------------------ chat

CHATML = FAMILIES["chatml"].template
TALK = talk_of("What is 6 × 7?", "42", system="You are brief.")


@pytest.mark.parametrize("begin", ["<s>", ""])
@pytest.mark.parametrize("template", [PLAIN_CHAT_TEMPLATE, CHATML], ids=["plain", "chatml"])
def test_a_conversation_begins_as_its_template_says(bpe: Any, tmp_path: Path, template: str, begin: str) -> None:
    """With the token that the tokenizer puts before other texts, or with none: as when it is served."""
    tokenizer = with_specials(bpe, *CHATML_TOKENS, bos="<s>")
    tokenizer.chat_template = begin + template
    corpus = corpus_from(tmp_path, tokenizer, {"messages": TALK}, format="chat", seq_len=256)
    (ids,), served = inputs(corpus), tokenizer.apply_chat_template(TALK, return_dict=False)
    assert tokenizer.decode(ids) == tokenizer.decode(served) and ids[0] == served[0]
    assert [i for i, token in enumerate(ids) if token == tokenizer.bos_token_id] == [0] * bool(begin)
    assert tokenizer.bos_token_id not in everything(corpus)["labels"]


# ---------------------------------------------------------------------------------------------------------- stream


def a_stream(sequences: int, seed: int = 0) -> Stream:
    """Return a stream over all sequences of a corpus with one row per sequence."""
    corpus = synthetic([4] * sequences, [True] * 4 * sequences, Data(seq_len=4, packing="none"))
    return Stream.of([MixtureSource("", Data())], [corpus], seed)


@given(
    st.integers(1, 40), st.integers(0, 2**31 - 1), st.lists(st.integers(1, 30), min_size=1, max_size=12), st.randoms()
)
@settings(max_examples=100)
def test_the_order_depends_on_seed_and_position_only(size: int, seed: int, chunks: list[int], random: Any) -> None:
    whole = a_stream(size, seed).at(range(sum(chunks)))
    stream, read = a_stream(size, seed), []
    for chunk in chunks:
        read += stream.at(range(len(read), len(read) + chunk))
    assert read == whole
    positions = list(range(len(whole)))
    random.shuffle(positions)
    assert stream.at(positions) == [whole[position] for position in positions]
    assert [stream.at([position])[0] for position in positions] == [whole[position] for position in positions]


def test_epochs_and_seeds_differ() -> None:
    epochs = [range(e * 50, e * 50 + 50) for e in (0, 1, 2, 3, 10**6)]
    orders = [tuple(a_stream(50, seed).at(epoch)) for seed in range(5) for epoch in epochs]
    assert len(set(orders)) == 25 and all(sorted(order) == list(range(50)) for order in orders)
    assert (0, *range(1, 50)) not in orders


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(("batch", "micro"), [(12, 1), (24, 2), (36, 3)])
def test_ranks_and_micro_batches_divide_every_step(tmp_path: Path, world: int, batch: int, micro: int) -> None:
    plan = a_plan(tmp_path, world, train__global_batch_size=batch, train__micro_batch_size=micro)
    stream, seen = a_stream(17), []
    for step in range(5):
        parts = [list(part) for rank in range(world) for part in plan.micro_batches(step, rank)]
        assert {len(part) for part in parts} == {micro}
        assert len(parts) == world * plan.accumulation
        positions = [position for part in parts for position in part]
        assert sorted(positions) == list(plan.step_positions(step))
        seen += sorted(positions)
        assert stream.label_tokens(positions) == stream.label_tokens(plan.step_positions(step))
    assert seen == list(range(5 * batch))


# ------------------------------------------------------------------------------------------------------ evaluation


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5])
def test_no_document_is_both_trained_and_held_out(bpe: Any, tmp_path: Path, fraction: float, packing: str) -> None:
    changes: dict[str, Any] = {"data__eval": {"fraction": fraction}, "data__packing": packing}
    stream, numbers, held_out = prepare(a_plan(tmp_path, **changes), bpe, quiet)
    train = stream.corpus
    rows = [{*corpus.rows_of(range(len(corpus))).tolist()} for corpus in (train, held_out)]
    assert rows[0].isdisjoint(rows[1])
    assert numbers == list(range(len(held_out)))
    tokens = [int(corpus.pieces[:, 1].sum()) for corpus in (train, held_out)]
    assert sum(tokens) >= 0.99 * train.notes["tokens"]
    assert tokens[1] / sum(tokens) == pytest.approx(fraction, abs=0.01)
    labels = [everything(corpus)["labels"] for corpus in (train, held_out)]
    assert [int((each != IGNORED).sum()) for each in labels] == [int(c.labels.sum()) for c in (train, held_out)]


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_end_of_a_long_text_may_be_held_out(bpe: Any, tmp_path: Path, packing: str) -> None:
    text = tmp_path / "one.txt"
    text.write_text(SHAKESPEARE.read_text()[:20_000])
    changes: dict[str, Any] = {"data__eval": {"fraction": 0.1}, "data__packing": packing, "data__path": str(text)}
    stream, _, held_out = prepare(a_plan(tmp_path, **changes), bpe, quiet)
    whole = [*bpe(text.read_text()).input_ids, bpe.eos_token_id]
    cut = len(whole) - round(0.1 * len(whole))
    labels = [everything(corpus)["labels"] for corpus in (stream.corpus, held_out)]
    sides = [sorted(each[each != IGNORED]) for each in labels]
    assert sides == [sorted(whole[1:cut]), sorted(whole[cut + 1 :])]  # nothing predicts a row's first token
    assert stream.corpus.notes["divided"] == 1


def test_the_same_rows_are_held_out_every_time(bpe: Any, tmp_path: Path) -> None:
    first, again, other = (
        prepare(a_plan(tmp_path, world, data__eval={"fraction": 0.2}, seed=seed), bpe, quiet)[2]
        for world, seed in ((1, 1), (4, 1), (1, 2))
    )
    assert first.pieces.tolist() == again.pieces.tolist() != other.pieces.tolist()


def test_rows_with_a_prompt_stay_whole(bpe: Any, tmp_path: Path) -> None:
    changes = {f"data__{name}": value for name, value in PC.items()} | {"data__path": str(GSM8K)}
    plan = a_plan(tmp_path, data__eval={"fraction": 0.001}, data__max_rows=20, data__seq_len=512, **changes)
    _, _, held_out = prepare(plan, bpe, quiet)
    assert len(held_out.pieces) == 1 and held_out.notes["divided"] == 0


@pytest.mark.parametrize(("fraction", "left"), [(0.99999, "to train on"), (0.00001, "to hold out")])
def test_a_fraction_that_leaves_nothing_is_refused(bpe: Any, tmp_path: Path, fraction: float, left: str) -> None:
    with pytest.raises(DataError, match=rf"data\.eval: fraction .* of \d+ rows leaves none {left}"):
        prepare(a_plan(tmp_path, data__eval={"fraction": fraction}), bpe, quiet)


def test_no_conversation_is_both_trained_and_held_out(tmp_path: Path) -> None:
    talks = [talk_of(*(f"talk {i} turn {j}" for j in range(8))) for i in range(30)]
    path = jsonl(tmp_path / "talks.jsonl", *({"messages": messages} for messages in talks))
    changes = {"data__path": str(path), "data__format": "chat", "data__seq_len": 512, "data__packing": "none"}
    plan = a_plan(tmp_path, data__turns="split", data__eval={"fraction": 0.2}, **changes)
    stream, _, held_out = prepare(plan, tokenizer := tokenizer_of("chatml"), quiet)
    sides = [{tokenizer.decode(ids).split()[2] for ids in inputs(each)} for each in (stream.corpus, held_out)]
    assert len(sides[0] | sides[1]) == 30 and sides[0].isdisjoint(sides[1]) and len(sides[1]) in (5, 6, 7)
    assert [len(each) for each in (stream.corpus, held_out)] == [4 * len(side) for side in sides]
    assert (stream.corpus.notes["rows"], stream.corpus.notes["conversations"]) == (120, 30)


def test_held_out_data_from_another_path(bpe: Any, tmp_path: Path) -> None:
    held = jsonl(tmp_path / "held-out.jsonl", *({"text": f"Held out line {i}"} for i in range(50)))
    changes: dict[str, Any] = {"data__max_rows": 40, "data__packing": "none", "data__seq_len": 256}
    plan = a_plan(tmp_path, data__eval={"path": str(held), "max_rows": 30}, **changes)
    stream, held_out, corpus = prepare(plan, bpe, quiet)
    assert stream.corpus.notes["rows"] == 40
    assert len(stream) == len(stream.corpus)
    assert held_out == list(range(len(corpus))) and corpus.notes["rows"] == 30
    assert [bpe.decode(ids) for ids in inputs(corpus)] == [f"Held out line {i}{EOS}" for i in range(30)]


# ----------------------------------------------------------------------------------------------------------- cache


def prepared(folder: Path) -> list[Path]:
    """Return the corpora in a cache and remains of failed ones, without the locks."""
    return sorted(path for path in folder.iterdir() if path.suffix != ".lock")


MARKED = "{{ messages[0].content }}{% generation %}{{ messages[1].content }}{{ eos_token }}{% endgeneration %}"


@pytest.mark.parametrize("marks", ["", MARKED])
def test_a_template_renders_the_day_of_the_run(marks: str, bpe: Any, tmp_path: Path, own_cache: Path) -> None:
    tokenizer = copy.deepcopy(bpe)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}\n" + (marks or PLAIN_CHAT_TEMPLATE)
    talk = talk_of("Hi there", "Hello you")
    path = jsonl(tmp_path / "talks.jsonl", {"messages": talk})
    data, days = Data(format=Format.chat, seq_len=256), (date(2024, 7, 26), date(2024, 7, 27), date(2024, 7, 26))
    first, second, again = (open_rows(str(path), data, tokenizer, None, quiet, day) for day in days)
    shown = [tokenizer.decode(each.tokens[: each.lengths[0]].tolist())[:11] for each in (first, second)]
    assert shown == ["26 Jul 2024", "27 Jul 2024"]
    assert first.digest == again.digest != second.digest and first.name == again.name != second.name
    rendered = tokenizer.apply_chat_template(talk, tokenize=False)
    assert f"{date.today().year}" in rendered, "the clock is back"


def test_progress_is_reported(bpe: Any, tmp_path: Path, own_cache: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    path = jsonl(tmp_path / "rows.jsonl", *({"text": "a"} for _ in range(2500)))
    open_rows(str(path), Data(seq_len=16), bpe, None, lambda *call: calls.append(call))
    assert calls == [("tokenise", done, 1) for done in (0, 0, 0, 0, 1)]  # three batches of one part


def test_rows_are_encoded_again_when_their_tokens_change_and_only_then(
    bpe: Any, tmp_path: Path, own_cache: Path
) -> None:
    row = {"text": "Hello", "other": "there", "prompt": "a", "completion": "b", "messages": talk_of("Hi", "Hello")}
    path = jsonl(tmp_path / "rows.jsonl", row, row)
    template = with_specials(bpe, eos_token=EOS)
    template.chat_template = CHATML
    base: dict[str, Any] = {"seq_len": 16}
    both = {"format": "prompt_completion"}
    changes: list[tuple[Any, dict[str, Any], bool]] = [
        (bpe, {}, True), (bpe, {"seq_len": 17}, False), (bpe, {"packing": "none"}, False),
        (bpe, {"packing": "concat"}, False), (bpe, {"max_rows": 1}, True), (bpe, {"max_rows": 2}, False),
        (bpe, {"columns": {"text": "other"}}, True), (bpe, both, True), (bpe, both | {"seq_len": 8}, False),
        (bpe, both | {"train_on": "all"}, True), (template, {}, True), (with_specials(bpe, bos="<s>"), {}, True),
        (bpe, both | {"separator": " "}, True), (bpe, {"eval": {"fraction": 0.5}}, False),
        (bpe, {"long_rows": "drop"}, False),
        *((template, {"format": "chat", "seq_len": 64, **change}, True) for change in (
            {}, {"turns": "last"}, {"turns": "split"}, {"chat_template_kwargs": {"name": 1}},
            {"chat_template_kwargs": {"name": 2}})),
    ]  # fmt: skip
    count = 0
    for tokenizer, change, is_other in changes:
        corpus_of(path, tokenizer, **base | change)
        count += is_other
        assert len(prepared(cache_dir("tokens"))) == count, change
    jsonl(path, row, row, row)
    corpus_of(path, bpe, **base)
    assert len(prepared(cache_dir("tokens"))) == count + 1


def numbered(folder: Path, *names: str, rows: int = 60) -> None:
    """Write files of GSM8K's rows, each beginning with its name."""
    lines = GSM8K.read_text().splitlines()[:rows]
    folder.mkdir(exist_ok=True)
    for name in names:
        marked = (line.replace('"question": "', f'"question": "{name} ', 1) for line in lines)
        (folder / name).write_text("\n".join(marked) + "\n")


def small_parts(monkeypatch: pytest.MonkeyPatch, **values: int) -> None:
    """Make parts of a few rows, which several processes encode."""
    monkeypatch.setattr(sources, "READ_BYTES", 4096)
    monkeypatch.setattr(sources, "PART_BYTES", 8192)
    for name, value in {"SMALL": 1, "POOLED": 1, **values}.items():
        monkeypatch.setattr(preparing, name, value)


@pytest.mark.parametrize("limit", [None, 100])
def test_several_processes_make_the_rows_of_one(
    bpe: Any, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    numbered(tmp_path / "data", "a.jsonl", "b.jsonl")
    (tmp_path / "data" / "c.jsonl").write_text("")
    settings = {"seq_len": 100, "max_rows": limit, **PC}
    special = with_specials(bpe, "the")
    special.split_special_tokens = True
    one = corpus_of(tmp_path / "data", special, **settings)
    assert one.notes["rows"] == (limit or 120), "the limit is for all files together"
    monkeypatch.setenv("FSDPTRAIN_CACHE", str(tmp_path / "again"))
    small_parts(monkeypatch)
    seen = set[int]()

    def counted(*args: Any) -> Any:
        seen.add(len(multiprocessing.active_children()))
        return wait(*args)

    monkeypatch.setattr(preparing, "wait", counted)
    many = corpus_of(tmp_path / "data", special, **settings)
    assert seen == {min(2, len(os.sched_getaffinity(0)))} and multiprocessing.active_children() == []
    assert len(prepared(cache_dir("tokens"))) > 4
    assert (many.digest, many.fingerprint, many.notes) == (one.digest, one.fingerprint, one.notes)
    assert many.notes["cut"] > 0 and many.notes["empty_files"] == 1
    for name in ("lengths", "ends", "labels"):
        assert np.array_equal(getattr(many, name), getattr(one, name)), name
    assert all((everything(many)[name] == everything(one)[name]).all() for name in everything(one))


def test_a_run_uses_what_prepare_made(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recipe(tmp_path, data__eval={"fraction": 0.1})
    made = [json.loads(run_command("prepare", tmp_path / "recipe.yaml", "--json").stdout) for _ in range(2)]
    plan = planned(tmp_path / "recipe.yaml")
    for name in ("parts_of", "cut_and_pack"):
        monkeypatch.setattr(preparing, name, None)  # neither the rows nor their tokens are read again
    stream, held_out, _ = prepare(plan, load_tokenizer(plan, quiet), quiet)
    assert made[0]["cache"] == str(own_cache)
    for each in made:
        assert (each["sequences"], each["eval_sequences"]) == (len(stream), len(held_out))
        assert (each["rows"], each["tokens"]) == (stream.corpus.notes["rows"], stream.corpus.notes["tokens"])
    words = ("prepare", tmp_path / "recipe.yaml", "name=two words", "--trust-remote-code")
    next_line = run_command(*words).stdout.splitlines()[-1]
    assert next_line == f"next: fsdptrain run {tmp_path}/recipe.yaml 'name=two words' --trust-remote-code"


def test_only_what_is_missing_is_encoded(
    bpe: Any, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[str]
) -> None:
    small_parts(monkeypatch, POOLED=2**40)
    data, folder = Data(seq_len=1024, **PC | {"format": Format.prompt_completion}), tmp_path / "data"
    numbered(folder, "a.jsonl", "c.jsonl")

    def read() -> list[str]:
        encoded.clear()
        open_rows(str(folder), data, bpe, None, quiet)
        return [Path(name).name for name in encoded]

    assert {*read()} == {"a.jsonl", "c.jsonl"}
    numbered(folder, "b.jsonl")
    assert {*read()} == {"b.jsonl"}  # between the two others
    damaged = prepared(cache_dir("tokens"))[0]
    (damaged / "tokens.bin").write_bytes(b"")
    assert len(read()) == 1


def test_what_was_finished_is_kept(bpe: Any, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that encodes is killed: the command ends, leaves no process, and the next one continues."""
    numbered(tmp_path / "data", "a.jsonl", "b.jsonl", rows=200)
    small_parts(monkeypatch)
    path, data = str(tmp_path / "data"), Data(seq_len=64, **PC | {"format": Format.prompt_completion})

    def kill(stage: str, done: int, total: int) -> None:
        if done > 1:
            for process in multiprocessing.active_children():
                process.kill()

    monkeypatch.setattr(preparing, "POLL_S", 0.001)
    with pytest.raises(WorkerLost, match=r"a process that tokenises was killed .* what was finished is kept"):
        open_rows(path, data, bpe, None, kill)
    assert multiprocessing.active_children() == []
    kept = len(prepared(cache_dir("tokens")))
    monkeypatch.setattr(preparing, "POOLED", 2**40)
    times = {folder: folder.stat().st_mtime_ns for folder in prepared(cache_dir("tokens")) if folder.suffix != ".tmp"}
    assert open_rows(path, data, bpe, None, quiet).notes["rows"] == 400
    now = {folder: folder.stat().st_mtime_ns for folder in prepared(cache_dir("tokens"))}
    assert kept and times.items() <= now.items() and len(times) < len(now)


def test_an_added_file_changes_one_group_of_small_files(tmp_path: Path) -> None:
    for number in range(400):
        (tmp_path / f"{number:03}.txt").write_text(f"text {number}")
    before = {json.dumps(part.content) for part in preparing.parts_of(str(tmp_path))}
    (tmp_path / "200a.txt").write_text("another text")
    after = {json.dumps(part.content) for part in preparing.parts_of(str(tmp_path))}
    assert len(before) > 3 and len(after - before) <= 2 and len(before - after) == 1


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_parts_of_a_file_have_all_its_rows_and_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rows = [{"text": f"row {number} " * (number % 40)} for number in range(500)]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    if kind == "parquet":
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=30)
    small_parts(monkeypatch)
    monkeypatch.setattr(readers, "PART_BYTES", 8192)
    made = preparing.parts_of(str(path))
    found = [row for part in made for source in part.sources for row in source.rows(["text"])]
    assert len(made) > 5 and len({json.dumps(part.content) for part in made}) == len(made)
    assert found == list(sources.open_sources(str(path))[0].rows(["text"]))
    assert sum(source.counted() for part in made for source in part.sources) == 500


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("tokens", name) for name in ("tokens.bin", "trained.bin", "kept.bin", "notes.json")),
        *(("data", name) for name in ("ends.bin", "lengths.bin", "parts.json", "notes.json")),
        *(("packed", name) for name in ("train-pieces.npy", "train-blocks.npy", "notes.json")),
    ],
)
@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "gone"])
def test_a_damaged_corpus_is_made_again(
    bpe: Any, tmp_path: Path, own_cache: Path, kind: str, name: str, how: str
) -> None:
    rows = [{"text": "Hello there"}, {"text": "and here"}]
    first = everything(corpus_from(tmp_path, bpe, *rows, seq_len=16))
    (folder,) = prepared(cache_dir(kind))
    raw = (folder / name).read_bytes()
    changed = {"cut": raw[:-1], "flipped": raw[:-1] + bytes([raw[-1] ^ 1]), "empty": b"", "gone": b""}
    (folder / name).write_bytes(changed[how])
    if how == "gone":
        (folder / name).unlink()
    again = everything(corpus_from(tmp_path, bpe, *rows, seq_len=16))
    assert all((first[key] == again[key]).all() for key in first)
    assert (folder / name).read_bytes() == raw
    assert prepared(cache_dir(kind)) == [folder]


def much(folder: Path) -> None:
    """Write a prepared file of 70 MB, which is mostly a hole."""
    with (folder / "tokens.bin").open("wb") as stream:
        stream.write(b"tokens")
        stream.truncate(70_000_000)


def test_much_data_is_compared_once_until_it_is_touched(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read, crc32 = cached_folder("data", "much", much), list[int](), zlib.crc32

    def checksum(piece: bytes, value: int) -> int:
        read.append(len(piece))
        return crc32(piece, value)

    monkeypatch.setattr("fsdptrain.data.cache.zlib.crc32", checksum)
    for touches in range(3):
        assert cached_folder("data", "much", much) == cached_folder("data", "much", much) == folder
        assert sum(read) == 70_000_000 * touches
        os.utime(folder / "tokens.bin")


@pytest.mark.parametrize("how", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_prepared_data_that_the_system_cannot_read_is_not_removed(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, how: int
) -> None:
    def write(folder: Path) -> None:
        (folder / "tokens.bin").write_bytes(b"tokens")

    folder = cached_folder("data", "few", write)

    def fails(piece: bytes, value: int = 0) -> int:
        raise OSError(how, os.strerror(how), str(folder / "tokens.bin"))

    monkeypatch.setattr("fsdptrain.data.cache.zlib.crc32", fails)
    os.utime(folder / "tokens.bin")  # files that were not touched are not read again
    words = rf"cannot read the cache on .*tokens\.bin cannot be read: {os.strerror(how)} .*set FSDPTRAIN_CACHE"
    with pytest.raises(StorageError, match=words):
        cached_folder("data", "few", much)
    assert (folder / "tokens.bin").read_bytes() == b"tokens"


def test_a_damaged_tokenizer_is_trained_again(tmp_path: Path, own_cache: Path) -> None:
    plan = a_plan(tmp_path, model__tokenizer={"train": 300})
    digest = fsdptrain.data.tokenizer.tokenizer_digest(load_tokenizer(plan, quiet))
    [file] = (own_cache / "tokenizers").rglob("tokenizer.json")
    file.write_text(file.read_text()[:-100])
    assert fsdptrain.data.tokenizer.tokenizer_digest(load_tokenizer(plan, quiet)) == digest


@pytest.mark.parametrize("change", ["grows", "shrinks", "vanishes"])
def test_a_file_that_is_written_to_while_it_is_read(bpe: Any, tmp_path: Path, own_cache: Path, change: str) -> None:
    path = jsonl(tmp_path / "rows.jsonl", *({"text": "a"} for _ in range(1500)))
    rows = path.read_text().splitlines(True)

    def meanwhile(stage: str, done: int, total: int) -> None:
        if change == "vanishes":
            path.unlink(missing_ok=True)
        else:
            path.write_text("".join(rows * 2 if change == "grows" else rows[:1200]))

    with pytest.raises(DataError, match=r"changed while it was read|cannot be read|nothing"):
        open_rows(str(path), Data(seq_len=16), bpe, None, meanwhile)
    assert prepared(own_cache / "data") == []


@pytest.mark.parametrize("characters", [100_000, pytest.param(10_000_000, marks=pytest.mark.soak)])
def test_a_very_long_row_without_a_space(bpe: Any, tmp_path: Path, characters: int) -> None:
    text = "naïve\0東京🙂!" * (characters // 10)
    corpus = corpus_from(tmp_path, bpe, {"text": text}, seq_len=4096)
    assert bpe.decode(corpus.tokens[:-1]) == text


def test_two_processes_prepare_at_the_same_time(tmp_path: Path, own_cache: Path) -> None:
    """One prepares, and the other waits and uses that: a second folder of the same name could not be put there."""
    words = [sys.executable, "-m", "fsdptrain", "prepare", str(write_recipe(tmp_path)), "--json"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [Command(words, cwd=ROOT, env=environment(), **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] and len(prepared(own_cache / "data")) == 1


# ------------------------------------------------------------------------------------------------------- tokenizer


def test_a_trained_tokenizer_is_lossless(bpe: Any) -> None:
    assert len(bpe) == 2048
    text = SHAKESPEARE.read_text()[:20_000] + " 東京 🙂 \u2028\x00\t\r\n  end "
    assert bpe.decode(bpe(text).input_ids) == text
    assert bpe.chat_template is None  # which a model trained on text or completions never learns
    assert (bpe.eos_token, bpe.pad_token, bpe.bos_token) == (EOS, EOS, None)


@pytest.mark.parametrize("begin", ["<s>", "[gMASK]<sop>", ""])
def test_only_conversations_get_a_chat_template(bpe: Any, tmp_path: Path, begin: str) -> None:
    """A tokenizer without one gets the plain one, which begins as the tokenizer begins a text."""
    tokens = [token for token in ("<s>", "[gMASK]", "<sop>") if token in begin]
    tokenizer = with_specials(bpe, *tokens, chat_template=None)
    tokenizer.chat_template = None
    if tokens:
        ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in tokens]
        single = " ".join([*tokens, "$A"])
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ids)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = jsonl(tmp_path / "talks.jsonl", {"messages": TALK, "text": "Hello"})
    changes: dict[str, Any] = {"data__path": str(path), "model__tokenizer": str(tmp_path / "tokenizer")}
    assert load_tokenizer(a_plan(tmp_path, **changes), quiet).chat_template is None
    plan = a_plan(tmp_path, **changes, data__format="chat", data__packing="none", data__seq_len=128)
    loaded = load_tokenizer(plan, quiet)
    loaded.save_pretrained(tmp_path / "export")
    served = PreTrainedTokenizerFast.from_pretrained(tmp_path / "export")
    text = served.apply_chat_template(TALK, tokenize=False)
    assert text.startswith(begin + "System: You are brief.")
    (ids,) = inputs(prepare(plan, loaded, quiet)[0].corpus)
    assert loaded.decode(ids) == text
    assert ids[: len(tokens)] == loaded("").input_ids


def test_the_tokenizer_is_trained_on_the_rows_of_the_model_as_they_are_read(tmp_path: Path) -> None:
    row = {"text": "romeo " * 50, "prompt": "juliet " * 50, "completion": "tybalt " * 50}
    path = jsonl(tmp_path / "rows.jsonl", row, {"text": "mercutio " * 50})
    changes: dict[str, Any] = {"data__path": str(path), "data__max_rows": 1, "model__tokenizer": {"train": 300}}
    for form, words in (("text", {"romeo"}), ("prompt_completion", {"juliet", "tybalt"})):
        vocabulary = load_tokenizer(a_plan(tmp_path, data__format=form, **changes), quiet).get_vocab()
        found = " ".join(vocabulary).replace("Ġ", "")  # the mark for a space
        assert {word for word in ("romeo", "juliet", "tybalt", "mercutio") if word in found} == words


def test_a_full_disk_of_the_cache_is_named() -> None:
    def write(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"no space: .* for the cache .*/data: free some, or set FSDPTRAIN_CACHE"):
        cached_folder("data", "a key that no other test has", write)


def test_a_template_that_the_recipe_brings_is_in_the_export(bpe: Any, tmp_path: Path) -> None:
    with_specials(bpe, *CHATML_TOKENS).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "mine.jinja").write_text(CHATML + "{# it's mine #}\n")
    path = jsonl(tmp_path / "talks.jsonl", {"messages": TALK})
    changes: dict[str, Any] = {"data__path": str(path), "model__tokenizer": str(tmp_path / "tokenizer")}
    changes |= {"data__format": "chat", "data__packing": "none", "data__seq_len": 128}
    found = []
    for template in ("mine.jinja", CHATML + "{# it's mine #}\n"):  # a file beside the recipe, and a text
        plan = Plan.from_json(a_plan(tmp_path, **changes, data__chat_template=template).to_json())
        (tmp_path / "mine.jinja").unlink(missing_ok=True)  # the plan has it
        loaded = load_tokenizer(plan, quiet)
        found.append(fsdptrain.data.tokenizer.tokenizer_digest(loaded))
        assert "data.chat_template" not in plan.identity()  # moved or written otherwise, it is the same
    assert found[0] == found[1]
    loaded.save_pretrained(tmp_path / "export")
    served = PreTrainedTokenizerFast.from_pretrained(tmp_path / "export")
    (ids,) = inputs(prepare(plan, loaded, quiet)[0].corpus)
    assert loaded.decode(ids) == served.apply_chat_template(TALK, tokenize=False)
    assert served.chat_template == CHATML + "{# it's mine #}\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("none.jinja", "'none.jinja' was not found (looked in "),
        ("empty.jinja", "'empty.jinja' is not a Jinja template"),
        ("reference.jinja", "'reference.jinja' contains ${"),
        ("bytes.jinja", "'bytes.jinja' cannot be read: "),
        (".", "'.' cannot be read: "),
        ("a\0b", "cannot be read: embedded null byte"),
        (" ", "is empty"),
        ("$HOME/a.jinja", "variables such as $HOME are not expanded"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template: str, message: str, tmp_path: Path) -> None:
    files = {"empty": b"Hello", "reference": b"{{ messages }} costs ${1}", "bytes": b"{{ \xff }}"}
    for name, content in files.items():
        (tmp_path / f"{name}.jinja").write_bytes(content)
    with pytest.raises(RecipeError, match=re.escape(message)) as caught:
        a_plan(tmp_path, data__format="chat", data__chat_template=template)
    assert [problem.field for problem in caught.value.problems] == ["data.chat_template"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("enable_thinking", "the chat template does not read enable_thinking: remove it"),
        ("add_generation_prompt", "add_generation_prompt is set by fsdptrain"),
        ("tokenize", "tokenize is set by fsdptrain"),
        ("messages", "messages is set by fsdptrain"),
    ],
)
def test_variables_without_effect_are_refused(bpe: Any, name: str, message: str, tmp_path: Path) -> None:
    bpe.save_pretrained(tmp_path / "tokenizer")
    plan = a_plan(
        tmp_path, data__format="chat", data__chat_template=CHATML, data__chat_template_kwargs={name: False},
        model__tokenizer=str(tmp_path / "tokenizer"),
    )  # fmt: skip
    with pytest.raises(RecipeError, match=rf"data\.chat_template_kwargs: {message}"):
        load_tokenizer(plan, quiet)
