"""Compare label tokens and loss of fsdptrain and TRL's SFTTrainer, for families of tokenizers and formats.

    python benchmarks/labels.py [--rows 90]

The rows are those of GSM8K; the tokenizers of tests/data/test_encode.py are trained for the benchmark. Both sides read
the same rows without packing and run the same tiny Llama in float32, with weights large enough for the loss to depend
on every token. TRL's labels and loss come from its prepared data, its collator and `compute_loss`; fsdptrain's (`ours`)
from `Corpus.batch` and the chunked loss. Losses are sums. If both have the same tokens, "our labels" is TRL's loss on
fsdptrain's labels. The last column counts the label tokens that only one side has. For templates without
`{% generation %}` marks, TRL gets a conversation as `prompt` and `completion`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import common
import datasets
import torch
from tokenizers import AddedToken, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer, __version__

from fsdptrain.config.schema import Data
from fsdptrain.data.corpus import open_rows, pack_rows
from fsdptrain.model.loss import compute_in_chunks

sys.path += [str(common.ROOT / "tests"), str(common.ROOT / "tests" / "data")]
from chat_templates import MARKED
from test_encode import CHATML, MAKERS, SPECIAL

LONGEST = 1024  # tokens; no row is longer
FAMILIES = ["byte-level", "Metaspace, first", "Prepend", "Unigram", "WordPiece"]
FORMATS = ["text", "prompt, completion", "prompt ends in ␠", "chat, marks", "chat, marks hold ⏎", "chat, no marks"]
TIGHT = MARKED.replace("\n' }}{% endgeneration %}", "' }}{% endgeneration %}{{ '\n' }}")  # the marks end with the turn
TEMPLATES = {"chat, marks": TIGHT, "chat, marks hold ⏎": MARKED, "chat, no marks": CHATML}
LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TITLES = "family           format         labels: TRL   ours   loss: TRL  our labels        ours  ours/TRL-1  alone"
Row = list[tuple[int, bool]]  # every token, and whether it is a label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=90, help="an even number")
    count = parser.parse_args().rows
    problems = map(json.loads, (common.ROOT / "recipes/data/gsm8k-train.jsonl").read_text().splitlines()[:count])
    pairs = [(problem["question"], problem["answer"]) for problem in problems]
    datasets.disable_progress_bars()
    print(f"{common.describe_machine()}, TRL {__version__}, {count} rows\n\n{TITLES}")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FSDPTRAIN_CACHE"] = f"{scratch}/cache"
        for family in FAMILIES:
            tokenizer = tokenizer_of(family)
            for form in FORMATS:
                print(f"{family:17}{form:19}", flush=True, end="")
                tokenizer.chat_template = TEMPLATES.get(form)
                compare(tokenizer, form, rows_of(form, pairs), Path(scratch))


def compare(tokenizer: Any, form: str, rows: list[dict[str, Any]], folder: Path) -> None:
    """Print one line of the table."""
    ours, loss = labels_and_loss(form, rows, tokenizer, folder)
    trainer = sft_trainer(form, rows, tokenizer, folder)
    data, shared, ratio = trainer.train_dataset, "", ""
    theirs = [list(zip(r["input_ids"], [False, *(i >= 0 for i in r["labels"][1:])], strict=True)) for r in data]
    if [[i for i, _ in row] for row in theirs] == [[i for i, _ in row] for row in ours]:
        labels = [[i if label else -100 for i, label in row] for row in ours]
        on_our_labels = trl_loss(trainer, data.remove_columns("labels").add_column("labels", labels))
        shared, ratio = f"{on_our_labels:,.2f}", f"{loss / on_our_labels - 1:.0e}"
    trained = [
        Counter(tokenizer.convert_ids_to_tokens([i for row in side for i, label in row if label]))
        for side in (theirs, ours)
    ]
    only = {"TRL": trained[0] - trained[1], "ours": trained[1] - trained[0]}
    alone = "; ".join(f"{side} {dict(tokens.most_common(3))}" for side, tokens in only.items() if tokens)
    counts = "".join(f"{tokens.total():7,}" for tokens in trained)
    print(f"{counts}{trl_loss(trainer, data):12,.2f}{shared:>12}{loss:12,.2f}{ratio:>12}  {alone}", flush=True)


def rows_of(form: str, pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the rows of a format; for templates with marks a conversation holds two problems."""
    if form == "text":
        return [{"text": f"{question}\n{answer}"} for question, answer in pairs]
    if form.startswith("prompt"):
        return [{"prompt": q + (" " if form.endswith("␠") else "\n"), "completion": a} for q, a in pairs]
    talks = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    if form != "chat, no marks":
        talks = [a + b for a, b in zip(talks[::2], talks[1::2], strict=True)]
    return [{"messages": talk} for talk in talks]


def tokenizer_of(family: str) -> Any:
    """Return a tokenizer of a family of tests/data/test_encode.py."""
    tokenizer = MAKERS[family]()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    if family in ("Metaspace, first", "Prepend"):
        begin = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def llama(tokenizer: Any) -> Any:
    """Return the model of both sides, with the same weights at every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.2, **LLAMA)).eval()


@torch.no_grad()
def labels_and_loss(form: str, rows: list[dict[str, Any]], tokenizer: Any, folder: Path) -> tuple[list[Row], float]:
    """Return fsdptrain's tokens with their labels, and the summed loss."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = "prompt_completion" if form.startswith("prompt") else form.partition(",")[0]
    data = Data(format=kind, seq_len=LONGEST, packing="none")
    (corpus,) = pack_rows(open_rows(str(folder / "rows.jsonl"), data, tokenizer, None, lambda *_: None), data, seed=0)
    assert len(corpus) == len(rows) and not any(corpus.notes[what] for what in ("cut", "split", "dropped"))
    batch, model = corpus.batch(range(len(corpus))), llama(tokenizer)
    compute_in_chunks(model)
    flags = (batch["labels"].roll(1, 1) >= 0).tolist()  # a position's label is the next token
    tokens = [list(zip(*row, strict=True)) for row in zip(batch["input_ids"].tolist(), flags, strict=True)]
    cut = [row[:length] for row, length in zip(tokens, corpus.pieces[:, 1], strict=True)]
    return cut, float(model(**batch))


def sft_trainer(form: str, rows: list[dict[str, Any]], tokenizer: Any, folder: Path) -> Any:
    """Return TRL's trainer with its prepared data."""
    if form == "chat, no marks":
        rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in rows]
    plain = {"bf16": False, "use_cpu": True, "report_to": [], "max_length": LONGEST}
    args = SFTConfig(str(folder), assistant_only_loss="messages" in rows[0], **plain)
    data = datasets.Dataset.from_list(rows)
    return SFTTrainer(llama(tokenizer), args, train_dataset=data, processing_class=tokenizer)


@torch.no_grad()
def trl_loss(trainer: Any, data: Any) -> float:
    """Return TRL's loss, summed over the labels of a prepared data set."""
    model, batches = trainer.model.eval(), trainer.get_eval_dataloader(data)
    return sum(float(trainer.compute_loss(model, dict(batch), num_items_in_batch=1)) for batch in batches)


if __name__ == "__main__":
    main()
