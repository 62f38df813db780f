"""The data level of a dry run: rows, tokenizer and packed sequences, read and cached as the run will read them.

For a first recipe its sizes are chosen before, from the rows: tokenised where the model's tokenizer is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, PreTrainedTokenizerBase

from fsdptrain.config.mixture import MixtureSource
from fsdptrain.config.paths import is_hub_data
from fsdptrain.config.schema import Data
from fsdptrain.data.chat import PLAIN_CHAT_TEMPLATE, earlier_turns_differ
from fsdptrain.data.columns import describe_columns, peek, read_rows, seam_without_space
from fsdptrain.data.corpus import Corpus, Stream
from fsdptrain.data.encode import evaluated_prompts
from fsdptrain.data.hub import hub_arguments
from fsdptrain.data.prepare import errors_of, open_rows, prepare, reading_notes, row_notes
from fsdptrain.data.sources import data_objects, file_sizes, open_sources, readable_files
from fsdptrain.data.tokenizer import load_tokenizer, own_code_note, size_to_train, vocabulary_size
from fsdptrain.data.windows import date_note, of_first_window, pin_commits, pin_date, windows_note
from fsdptrain.errors import CheckpointError, NoData, NoModel, RecipeError, is_disk_full, listed
from fsdptrain.model.config import check_special_tokens, position_limit
from fsdptrain.plan.plan import Plan, varied
from fsdptrain.run_folder.files import nearest_hint
from fsdptrain.text import counted, share, size
from fsdptrain.train.preflight import check_vocabulary
from fsdptrain.validation.findings import Findings
from fsdptrain.validation.init_recipe import LONGEST, MOST_ROWS, RowLengths, choose_sizes

HEADING = "Data"
LARGEST_DOWNLOAD = 2**30  # bytes of objects that a dry run downloads; of more, it reads the first object alone
BYTES_PER_TOKEN = 4  # about, for English text


def check_data(plan: Plan, findings: Findings) -> tuple[int | None, int | None]:
    """Check rows, tokenizer and sequences. Return the vocabulary size and the number of steps, None if unknown."""
    vocab_size, steps = size_to_train(plan.recipe.model), plan.recipe.train.steps
    plan = _without_missing_eval(plan, findings)
    with findings.continue_on_error():
        plan = pin_commits(plan, plan.rundir, keep=False)
    findings.send_busy("reading the data")
    readable, tokenizer, files, first, windows = False, None, None, plan, list[dict[str, int]]()
    with findings.continue_on_error():
        first, windows = of_first_window(plan)
        files = _files_to_read(first, findings)
        if files != 0:
            # The first rows of each source: the columns they have, and those that the format reads.
            found, named = [], bool(plan.recipe.data.sources)
            for source in plan.sources:
                with errors_of(source.name if named else None):
                    found.append(_check_rows_of(source, named, findings))
            findings.add_values("data", {"sources": found} if named else found[0], HEADING)
            readable = files is None
    # A tokenizer that is trained needs the rows; any other can be checked without them.
    if readable or vocab_size is None:
        with findings.continue_on_error():
            tokenizer = load_tokenizer(plan, findings.send_progress)
            if note := own_code_note(tokenizer):
                findings.add_note(note)
            vocab_size = vocabulary_size(tokenizer)
            check_special_tokens(plan, tokenizer)
            check_vocabulary(plan, tokenizer)
    if readable and tokenizer is not None:
        with findings.continue_on_error():
            steps = _check_sequences(first, tokenizer, findings)
            if len(windows) > 1:
                found = findings.levels["data"]["sequences"]
                findings.add_note(f"{windows_note(windows, found)}: all counts are of the first window")
    return vocab_size, steps


def _files_to_read(plan: Plan, findings: Findings) -> int | None:
    """Return how many files of data.path to read: all (None), 1 or 0 if they would be a large download."""
    paths = [path for path in (*plan.data_paths, plan.eval_path) if path]
    left = sum(each.size for path in paths for each in data_objects(path) if not each.is_here)
    if left <= LARGEST_DOWNLOAD:
        return None
    first = (each for path in plan.data_paths for each in data_objects(path)[:1])
    files = int(sum(each.size for each in first if not each.is_here) <= LARGEST_DOWNLOAD)
    findings.add_note(
        f"{size(left)} of data are not in the cache of this machine, and validate downloads at most "
        f"{size(LARGEST_DOWNLOAD)}: {'only the first file was read' if files else 'none was read'}, and the number of "
        "steps is not known"
    )
    return files


def _without_missing_eval(plan: Plan, findings: Findings) -> Plan:
    """Return the plan without evaluation, and add a problem, if the evaluation data is missing.

    The training data can then still be checked.
    """
    path = plan.eval_path
    if path is None or is_hub_data(path):
        return plan
    with findings.continue_on_error():
        if file_sizes(path):
            return plan
        raise NoData(f"data.eval.path: {path!r} was not found{nearest_hint(Path(path))}")
    data = dataclasses.replace(plan.recipe.data, eval=None)
    return dataclasses.replace(plan, eval_path=None, recipe=dataclasses.replace(plan.recipe, data=data))


def _check_rows_of(source: MixtureSource, named: bool, findings: Findings) -> dict[str, Any]:
    """Read the first rows of a source, show what is read, and return it; `named`: there may be others."""
    data, name = source.data, f"{source.name}: " if named else ""
    readable_files(data.path, limit=1, progress=findings.send_progress)
    columns, first_rows = peek(data.path, data)
    fields = {field: data.columns.get(field, field) for field in (*data.format.fields, *data.format.optional)}
    needed = {field: column for field, column in fields.items() if field in data.format.fields or column in columns}
    reads = describe_columns(data.path, data)
    findings.add_lines(HEADING, f"{name}format {data.format}, which reads {reads}; columns: {listed(columns)}")
    if seam := seam_without_space(first_rows, data):
        findings.add_note(
            f"{name}no white space between prompt and completion, for example in {seam}; set data.separator to add some"
        )
    reading = {"path": data.path, "files": len(file_sizes(data.path)), "columns": columns, "needed": needed}
    return {**({"name": source.name} if named else {}), **reading}


def _check_sequences(plan: Plan, tokenizer: PreTrainedTokenizerBase, findings: Findings) -> int:
    """Tokenise and pack as the run will, into the cache that it will read. Return the number of steps."""
    try:
        day = pin_date(plan, tokenizer, plan.rundir, keep=False)
        evaluated_prompts(plan.recipe, tokenizer, day)
        stream, held_out, eval_corpus = prepare(plan, tokenizer, findings.send_progress, day=day)
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise CheckpointError(f"no space left on the disk for the prepared data: {error.filename}") from None
    if day:
        findings.add_note(date_note(day))
    is_chat, has_template = plan.trains_chat, not str(tokenizer.chat_template).endswith(PLAIN_CHAT_TEMPLATE)
    template = "the recipe's" if plan.recipe.data.chat_template else "the tokenizer's" if has_template else "plain"
    packed: dict[str, Any] = {
        **stream.corpus.notes,
        "sequences": len(stream),
        "eval_sequences": len(held_out),
        "fill": stream.corpus.fill(),
        "document": stream.corpus.document(),
        "steps_per_epoch": len(stream) / plan.recipe.train.global_batch_size,
        "steps": plan.total_steps(len(stream)),
        "prepared_bytes": sum(
            array.nbytes
            for part in stream.corpus.parts
            for array in (part.tokens, part.trained, part.pieces, part.lengths)
        ),
        "vocab_size": vocabulary_size(tokenizer),
        "template": template if is_chat else None,
    }
    if plan.recipe.data.sources:
        before, found = findings.levels["data"]["sources"], _describe_sources(plan, stream, tokenizer)
        packed["sources"] = [read | each for read, each in zip(before, found, strict=True)]
    else:
        packed |= _describe_rows(stream.corpus.parts[0], tokenizer)
    findings.add_values("data", packed, HEADING)
    _show_sequences(plan, packed, findings)
    if is_chat and not has_template:
        findings.add_note("the tokenizer has no chat template: a plain one is used (see the first row above)")
    chats = [source.data for source in plan.sources if source.data.format.is_chat]
    first_rows = [(data, peek(data.path, data, tokenizer.chat_template)[1]) for data in chats]
    if any(earlier_turns_differ(tokenizer, data, rows, day) for data, rows in first_rows):
        findings.add_note(
            "the chat template renders earlier turns of the assistant otherwise than its last one (without reasoning, "
            "perhaps), and data.turns: all trains them like that: use split, or last"
        )
    lost, divided = row_notes(plan, stream.corpus, eval_corpus)
    for text in lost:
        findings.add_warning(text)
    for text in [*divided, *reading_notes(plan, stream), *plan.length_notes(len(stream))]:
        findings.add_note(text)
    if problem := plan.length_problem(len(stream)):
        findings.add_problem(RecipeError([problem]))
    return int(packed["steps"])


def _describe_rows(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "lengths": describe_lengths(corpus.lengths, corpus.seq_len),
        "rows_per_sequence": len(corpus.pieces) / len(corpus),
        "example": corpus.show(tokenizer),
    }


def _describe_sources(plan: Plan, stream: Stream, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return what the rows of each source became, its shares of what is read, and how often the run reads it.

    The shares are of the sequences, of their tokens without padding, and of those of them that are trained.
    """
    positions = plan.total_steps(len(stream)) * plan.recipe.train.global_batch_size
    parts, shares = stream.corpus.parts, stream.order.shares
    token_shares, read, times = stream.token_shares(), stream.order.counts(positions), stream.reads(positions)
    trained = [share * float(part.labels.mean()) for share, part in zip(shares, parts, strict=True)]
    return [
        {
            "name": source.name,
            **part.notes,
            "sequences": len(part),
            "fill": part.fill(),
            "share": shares[i] / sum(shares),
            "token_share": token_shares[i],
            "trained_share": trained[i] / sum(trained),
            "sequences_read": read[i],
            "times_read": times[i],
            **_describe_rows(part, tokenizer),
        }
        for i, (source, part) in enumerate(zip(plan.sources, parts, strict=True))
    ]


def describe_lengths(lengths: np.ndarray[Any, Any], seq_len: int) -> dict[str, Any]:
    """Return a histogram of row lengths in tokens. A bin is {from, to, rows}, ends included.

    The bins double in size, and one of them ends at `seq_len`.
    """
    longest = int(lengths.max())
    edges = {2**power for power in range(int(lengths.min()).bit_length(), longest.bit_length())} | {seq_len}
    tops = [*sorted(edge for edge in edges if edge < longest), longest]
    counts = np.bincount(np.searchsorted(tops, lengths), minlength=len(tops))
    bins = [
        {"from": low, "to": top, "rows": int(count)}
        for low, top, count in zip([0, *(top + 1 for top in tops)], tops, counts, strict=False)
    ]
    return {
        "bins": bins,
        "longest": longest,
        "median": int(np.median(lengths)),
        "mean": float(lengths.mean()),
        "over_seq_len": int((lengths > seq_len).sum()),
    }


def _show_rows(data: Data, packed: dict[str, Any], findings: Findings, name: str = "") -> None:
    """Add the lines of the rows of a source: counts, a histogram of their lengths, and the first row."""
    lengths = packed["lengths"]
    beyond = {
        "continued": "cut wherever a sequence ends", "cut": f"cut at {data.seq_len:,}", "split": "split",
        "drop": "dropped",
    }[data.treatment]  # fmt: skip
    longer = f"longer than seq_len {data.seq_len:,}: {share(lengths['over_seq_len'], packed['rows'], 'row')}, {beyond}"
    rows, dropped = counted(packed["rows"], "row"), "no rows dropped"
    if "conversations" in packed:
        rows += f" of {counted(packed['conversations'], 'conversation')}"
    if packed["dropped"]:
        dropped = f"{share(packed['dropped'], packed['rows'], 'row')} dropped: no trained token"
    findings.add_lines(
        HEADING,
        f"{name}{rows}, {packed['tokens']:,} tokens, {packed['label_tokens']:,} of them trained; {dropped}",
        f"tokens per row: median {lengths['median']:,}, longest {lengths['longest']:,}; "
        + (longer if lengths["over_seq_len"] else f"none longer than seq_len {data.seq_len:,}"),
    )
    findings.add_item(HEADING, "lengths", bins=lengths["bins"], seq_len=data.seq_len, beyond=beyond)
    findings.add_lines(HEADING, f"{name}the first row, trained parts in ⟦ ⟧:\n{packed['example']}")


def _show_sequences(plan: Plan, packed: dict[str, Any], findings: Findings) -> None:
    """Add what is known of the packed rows: those of each source, and the sequences in all."""
    data, sources = plan.recipe.data, packed.get("sources", [])
    for source, each in zip(plan.sources, sources or [packed], strict=True):
        _show_rows(source.data, each, findings, f"{source.name}: " if sources else "")
    if sources:
        header = ["source", "sequences", "filled", "share", "of tokens", "of trained tokens", "read"]
        table = [
            [
                each["name"], f"{each['sequences']:,}", f"{each['fill']:.1%}",
                *(f"{each[kind]:.2%}" for kind in ("share", "token_share", "trained_share")),
                f"{each['times_read']:.2f} times",
            ]
            for each in sources
        ]  # fmt: skip
        findings.add_item(HEADING, "table", header=header, rows=table)
    mixed, of_epoch = "", " in an epoch" if sources else ""
    if data.packing != "none" and not sources:
        mixed = f", {packed['rows_per_sequence']:.1f} rows per sequence"
    findings.add_lines(
        HEADING,
        f"{counted(packed['sequences'], 'sequence')} of {data.seq_len:,} tokens{of_epoch}, "
        f"{packed['fill']:.1%} filled{mixed}; {packed['eval_sequences']:,} held out; "
        f"{packed['steps_per_epoch']:,.1f} steps per epoch, {packed['steps']:,} in total; "
        f"{size(packed['prepared_bytes'])} in the cache",
    )


def choose(plan: Plan, findings: Findings) -> Plan:
    """Return the plan with sizes chosen from its data, which become the level `chosen` of the report.

    Raises DataError for data that cannot be read, and RecipeError for a model without a tokenizer.
    """
    positions, treatment = None, plan.recipe.data.treatment
    with contextlib.suppress(Exception):  # of any class; the model level of a dry run reports it
        config = AutoConfig.from_pretrained(str(plan.recipe.model.id), **hub_arguments(plan, None))
        positions = position_limit(config.get_text_config())
    rows = _rows_to_choose_from(plan, min(positions or LONGEST[treatment], LONGEST[treatment]), findings)
    sizes = choose_sizes(rows, treatment, positions, plan.topology.world_size, plan.recipe.data.eval)
    findings.levels["chosen"] = sizes
    if len(rows.lengths) < rows.available:
        findings.add_note(
            f"the sizes were chosen from the first {len(rows.lengths):,} of {counted(rows.available, 'row')}, of which "
            "alone the dry run counts tokens and steps"
        )
        sizes = sizes | {"data.max_rows": MOST_ROWS}
    return varied(plan, sizes)


def _rows_to_choose_from(plan: Plan, seq_len: int, findings: Findings) -> RowLengths:
    """Return the tokens of every row; estimated from bytes if the tokenizer is not here and cannot be downloaded."""
    findings.send_busy("reading the data")
    data = dataclasses.replace(plan.recipe.data, seq_len=seq_len)
    try:
        tokenizer = load_tokenizer(plan, findings.send_progress)
    except NoModel as error:
        rows = _estimated_rows(plan, findings)
        lengths = rows.lengths
        findings.add_note(f"tokens are estimated as {BYTES_PER_TOKEN} bytes each: {error}")
        findings.add_lines(
            HEADING,
            f"{counted(rows.available, 'row')}, about {rows.tokens(seq_len, 'continued'):,} tokens; tokens per row: "
            f"median {int(np.median(lengths)):,}, longest {int(lengths.max()):,} (estimated from bytes)",
        )
        return rows
    day = pin_date(plan, tokenizer, plan.rundir, keep=False)
    encoded = open_rows(plan.data_path, data, tokenizer, MOST_ROWS, findings.send_progress, day)
    available = len(encoded.lengths)
    if encoded.notes["rows"] >= MOST_ROWS:
        available = sum(source.counted() for source in open_sources(plan.data_path))
    return RowLengths(encoded.lengths, available)


def _estimated_rows(plan: Plan, findings: Findings) -> RowLengths:
    """Return the tokens of every row, estimated from the bytes of its text."""
    data, lengths = plan.recipe.data, []
    readable_files(plan.data_path, progress=findings.send_progress)
    sources = open_sources(plan.data_path)
    available = sum(source.counted() for source in sources)
    for batch in read_rows(sources, data, MOST_ROWS):
        for row in batch:
            texts = [str(row[field]) for field in data.format.text_fields]
            lengths.append(-(-sum(len(text.encode()) for text in texts) // BYTES_PER_TOKEN))
        findings.send_progress("read", len(lengths), min(available, MOST_ROWS))
    return RowLengths(np.array(lengths), available)
