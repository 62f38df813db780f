"""Choose the sizes of a first recipe in a dry run: read the rows, tokenised where the model's tokenizer is here."""

from __future__ import annotations

import dataclasses

import numpy as np
from transformers import AutoConfig

from fsdptrain.data.columns import read_all_rows
from fsdptrain.data.corpus import open_rows
from fsdptrain.data.hub import hub_arguments
from fsdptrain.data.pinned import pin_date
from fsdptrain.data.sizing import LONGEST, RowLengths, choose_sizes
from fsdptrain.data.sources import open_sources, readable_files
from fsdptrain.data.tokenizer import load_tokenizer
from fsdptrain.errors import NoModel
from fsdptrain.model.config import position_limit
from fsdptrain.plan.plan import Plan, varied
from fsdptrain.text import counted
from fsdptrain.validate.data import HEADING
from fsdptrain.validate.findings import Findings

MOST_ROWS = 200_000  # that are read; of more data, the sizes are chosen from the first of them


BYTES_PER_TOKEN = 4  # about, for English text


def choose(plan: Plan, findings: Findings) -> Plan:
    """Return the plan with sizes chosen from its data, which become the level `chosen` of the facts.

    Raises DataError for data that cannot be read, and RecipeError for a model without a tokenizer.
    """
    positions, treatment = _positions(plan), plan.recipe.data.long_rows
    rows = _rows(plan, min(positions or LONGEST[treatment], LONGEST[treatment]), findings)
    sizes = choose_sizes(rows, treatment, positions, plan.topology.world_size)
    findings.levels["chosen"] = sizes
    if len(rows.lengths) < rows.available:
        findings.add_note(
            f"the sizes were chosen from the first {len(rows.lengths):,} of {counted(rows.available, 'row')}, of which "
            "alone the dry run counts tokens and steps"
        )
        sizes = sizes | {"data.max_rows": MOST_ROWS}
    return varied(plan, sizes)


def _rows(plan: Plan, seq_len: int, findings: Findings) -> RowLengths:
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
    return RowLengths(encoded.lengths, encoded.notes["available"])


def _estimated_rows(plan: Plan, findings: Findings) -> RowLengths:
    """Return the tokens of every row, estimated from the bytes of its text."""
    data, lengths = plan.recipe.data, []
    readable_files(plan.data_path, progress=findings.send_progress)
    sources = open_sources(plan.data_path)
    available = sum(map(len, sources))
    for batch in read_all_rows(sources, data, MOST_ROWS):
        for row in batch:
            texts = [str(row[field]) for field in data.format.fields]
            lengths.append(-(-sum(len(text.encode()) for text in texts) // BYTES_PER_TOKEN))
        findings.send_progress("read", len(lengths), min(available, MOST_ROWS))
    return RowLengths(np.array(lengths), available)


def _positions(plan: Plan) -> int | None:
    """Return the longest sequence that the model supports; None if it has no limit or its configuration is not here."""
    try:
        config = AutoConfig.from_pretrained(str(plan.recipe.model.id), **hub_arguments(plan, None))
    except Exception:  # of any class; the model level of a dry run reports it
        return None
    return position_limit(config.get_text_config())
