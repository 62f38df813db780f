"""Compare how well models learn from rows that are packed in several ways: the held-out loss over five seeds.

Every contender trains the same small model from the same weights at the same rate:

    random   rows drawn anew for every step, as many tokens as in a step of `packed`
    again    the same with other draws, which shows what is chance
    packed   as fsdptrain packs: rows shuffled and packed once for a run, sequences shuffled again in every epoch

Takes about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fsdptrain.config.formats import Format
from fsdptrain.config.schema import Data
from fsdptrain.data.corpus import Batch, Corpus, open_rows, pack_rows
from fsdptrain.data.pack import fill_sequences
from fsdptrain.data.tokenizer import train_bpe

SHIPPED = common.ROOT / "recipes" / "data"
BATCH = 8  # sequences a step
RATE = 3e-3
LLAMA = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
Sequences = list[list[int]]  # the pieces of each sequence


@dataclass(frozen=True)
class Case:
    """Rows to train on and to hold out, and the steps after which the held-out loss is measured."""

    name: str
    train: Corpus
    held_out: Corpus
    vocab: int
    steps: tuple[int, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", choices=CASES, nargs="*", default=CASES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(common.describe_machine())
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FSDPTRAIN_CACHE"] = scratch
        for case in (CASES[name](Path(scratch)) for name in arguments.rows):
            found: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
            for seed, (name, batches) in itertools.product(range(arguments.seeds), CONTENDERS.items()):
                found[name].append(held_out_losses(case, batches(case.train, seed), seed))
                print(f"{case.name}, seed {seed}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
            report(case, found)


def words(folder: Path) -> Case:
    """Return the different words of Shakespeare's plays, a byte a token: few lengths, and many rows in a sequence."""
    different = sorted(set((SHIPPED / "tinyshakespeare.txt").read_text().split()))
    path = folder / "words.jsonl"
    path.write_text("".join(json.dumps({"text": word}) + "\n" for word in different))
    return _case("words", path, Data(seq_len=256), train_bpe(iter(different), 257), (50, 100, 200, 300))


def problems(_: Path) -> Case:
    """Return GSM8K's problems: many lengths, and three rows in a sequence."""
    path = SHIPPED / "gsm8k-train.jsonl"
    columns = {"prompt": "question", "completion": "answer"}
    data = Data(seq_len=512, format=Format.prompt_completion, columns=columns, separator="\n")
    return _case("gsm8k", path, data, train_bpe(iter(path.read_text().splitlines()), 1024), (50, 100, 150))


def _case(name: str, path: Path, data: Data, tokenizer: Any, steps: tuple[int, ...]) -> Case:
    rows = open_rows(str(path), data, tokenizer, None, lambda *_: None)
    train, held_out = pack_rows(rows, data, 0, fraction=0.1)
    return Case(name, train, held_out, len(tokenizer), steps)


CASES = {"words": words, "gsm8k": problems}


def arranged(corpus: Corpus, sequences: Sequences) -> Corpus:
    """Return a corpus of the same pieces in these sequences."""
    order = np.array([*itertools.chain.from_iterable(sequences)])
    return replace(corpus, pieces=corpus.pieces[order], offsets=np.cumsum([0, *map(len, sequences)]))


def shuffled_and_packed(corpus: Corpus, seed: int) -> Sequences:
    """Return sequences as fsdptrain makes them of the same pieces."""
    order = np.random.default_rng(seed).permutation(len(corpus.pieces))
    return [order[sequence].tolist() for sequence in fill_sequences(corpus.pieces[order, 1].tolist(), corpus.seq_len)]


def epochs_of(corpus: Corpus, seed: int) -> Iterator[Sequences]:
    """Yield the sequences of every step: packed once, and shuffled in every epoch."""
    sequences, rest = shuffled_and_packed(corpus, seed), list[list[int]]()
    for epoch in itertools.count():
        rest += [sequences[number] for number in np.random.default_rng([seed, epoch]).permutation(len(sequences))]
        while len(rest) >= BATCH:
            yield rest[:BATCH]
            rest = rest[BATCH:]


def drawn(corpus: Corpus, seed: int) -> Iterator[Sequences]:
    """Yield the sequences of every step, of rows that are shuffled in every epoch and shared by no other step."""
    lengths = corpus.pieces[:, 1]
    a_step = BATCH * lengths.sum() / len(shuffled_and_packed(corpus, seed))  # tokens
    rest, due = np.zeros(0, np.int64), 0.0
    for epoch in itertools.count():
        rest = np.append(rest, np.random.default_rng([seed, epoch]).permutation(len(lengths)))
        while lengths[rest].sum() >= due + a_step:
            due += a_step  # a step takes whole rows: what it lacks is left to the next
            rows, rest = np.split(rest, [np.searchsorted(np.cumsum(lengths[rest]), due, side="right")])
            due -= lengths[rows].sum()
            yield [rows[sequence].tolist() for sequence in fill_sequences(lengths[rows].tolist(), corpus.seq_len)]


CONTENDERS: dict[str, Callable[[Corpus, int], Iterator[Sequences]]] = {
    "random": drawn,
    "again": lambda corpus, seed: drawn(corpus, seed + 1000),
    "packed": epochs_of,
}


def held_out_losses(case: Case, steps: Iterator[Sequences], seed: int) -> list[float]:
    """Train from the weights of this seed; return the held-out loss after each of the case's steps."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=case.vocab, **LLAMA))
    optimizer = torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.95), weight_decay=0.1)
    found = []
    for step, sequences in enumerate(itertools.islice(steps, max(case.steps)), 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, step / 10)
        loss, tokens = summed_loss(model, arranged(case.train, sequences).batch(range(len(sequences))))
        (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        optimizer.zero_grad()
        if step in case.steps:
            found.append(evaluate(model, case.held_out))
    return found


@torch.no_grad()
def evaluate(model: Any, corpus: Corpus) -> float:
    """Return the mean loss over the label tokens of a corpus."""
    sums = [summed_loss(model, corpus.batch(range(len(corpus))[i : i + 16])) for i in range(0, len(corpus), 16)]
    return sum(float(loss) for loss, _ in sums) / sum(tokens for _, tokens in sums)


def summed_loss(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """Return the loss, summed over the label tokens, and their number."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    labels = batch["labels"]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, int((labels >= 0).sum())


def report(case: Case, found: dict[str, list[list[float]]]) -> None:
    """Print the means over the seeds, and the means of the differences to `random` with their standard errors."""
    epoch = len(case.train) / BATCH
    print(f"\n{case.name}: {len(case.train.pieces):,} rows, an epoch is {epoch:.0f} steps; held-out loss after a step")
    corpus = arranged(case.train, shuffled_and_packed(case.train, 0))
    print(f"packed: {corpus.fill():.2%} filled, {corpus.lengths_per_sequence():.2f} lengths in a sequence")
    print("         " + "".join(f"{step:>22}" for step in case.steps))
    base = np.array(found["random"])
    for name, losses in found.items():
        apart = np.array(losses) - base
        error = [statistics.stdev(column) / len(column) ** 0.5 for column in apart.T.tolist()]
        cells = zip(np.mean(losses, axis=0), apart.mean(axis=0), error, strict=True)
        print(f"{name:9}" + "".join(f"{mean:>8.4f} {by:+.4f}±{e:.4f}" for mean, by, e in cells))


if __name__ == "__main__":
    main()
