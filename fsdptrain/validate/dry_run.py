"""The levels of a dry run below the recipe: plan, machine, data, model, memory, communication, time.

A level that does not pass does not stop the next, so that all problems come at once. `docs/validate.md` names what
`--json` holds; `dryrun` is the side that asks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from fsdptrain.checkpoint.disk import disk_facts, disk_problems, disk_summary
from fsdptrain.config.hardware import CPU, CUSTOM, Hardware, card
from fsdptrain.config.plan import Plan, varied
from fsdptrain.config.schema import FORMAT_FIELDS, OPTIONAL_FIELDS, long_row_treatment
from fsdptrain.data.chat import PLAIN_CHAT_TEMPLATE
from fsdptrain.data.columns import describe_columns, peek
from fsdptrain.data.commits import pin_commits
from fsdptrain.data.corpus import Stream, prepare
from fsdptrain.data.hub import go_offline_if_unreachable
from fsdptrain.data.sources import data_files
from fsdptrain.data.tokenizer import load_tokenizer, vocabulary_size
from fsdptrain.errors import CheckpointError, FsdptrainError, NoData, RecipeError, is_disk_full, listed
from fsdptrain.forecast import advice as advice_table
from fsdptrain.forecast import closed_form
from fsdptrain.forecast.client import Forecast, Forecaster
from fsdptrain.forecast.render import (
    TRAFFIC_HEADER,
    does_not_fit_error,
    memory_lines,
    time_lines,
    traffic_lines,
    traffic_rows,
    verdict,
)
from fsdptrain.forecast.search import search
from fsdptrain.model.assets import refuse_other_tokens
from fsdptrain.model.config import load_config
from fsdptrain.model.skeleton import flash_fits, has_flash
from fsdptrain.rundir import RunDir
from fsdptrain.text import counted, size
from fsdptrain.train import preflight
from fsdptrain.validate.anatomy import HEADER, length_facts, model_facts, model_lines, unit_rows
from fsdptrain.validate.client import Request
from fsdptrain.validate.findings import Findings
from fsdptrain.validate.machine import attention_available, machine_facts, machine_line, machine_problems

MEMORY = "Memory of the worst rank"


ADVICE = "Other plans for the same job"


def dry_run(
    plan: Plan,
    found: Findings,
    problems: list[str] | None = None,
    build: bool = True,
    options: StepOptions | None = None,
) -> None:
    """Go through every level, as far as each can go. `problems` are those of the plan, which then is only a draft.

    The step is forecast where a forecaster is given with `options`, and the plan is one that could run.
    """
    for problem in problems or ():
        found.fail(RecipeError(problem))
    if not problems:
        facts, lines = describe_plan(plan)
        found.passed("plan", facts, "Plan", *lines)
    with found.trying():
        check_machine(plan, found)
    vocab_size, steps = check_data(plan, found)
    if build:
        with found.trying():
            check_model(plan, vocab_size, steps, found)
            if options and not problems:
                check_step(plan, vocab_size, steps, found, options)


def describe_plan(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """The arithmetic of the run."""
    train, topology, seq_len = plan.recipe.train, plan.topology, plan.recipe.data.seq_len
    facts = {
        "strategy": plan.recipe.fsdp.strategy, "world_size": topology.world_size, "replicas": plan.replicas,
        "shard_size": plan.shard_size, "accumulation": plan.accumulation,
        "tokens_per_step": train.global_batch_size * seq_len,
    }  # fmt: skip
    device = "GPUs" if topology.device == "cuda" else "CPU ranks"
    copies = "one copy of the model" if plan.replicas == 1 else f"{plan.replicas} copies of the model, each"
    spread = f"sharded over {plan.shard_size} ranks" if plan.shard_size > 1 else "on one rank"
    micro, size = counted(plan.accumulation, "micro-batch", "es"), counted(train.micro_batch_size, "sequence")
    return facts, [
        f"{facts['strategy']} on {topology.nnodes} × {topology.nproc_per_node} {device}: {copies} {spread}",
        f"a step: {train.global_batch_size} sequences of {seq_len:,} tokens, {facts['tokens_per_step']:,} in all = "
        f"{topology.world_size} ranks × {micro} × {size}",
    ]


def check_machine(plan: Plan, found: Findings) -> None:
    """What this machine has of what the run needs."""
    facts = machine_facts(plan)
    found.passed("machine", facts, "This machine", machine_line(facts))
    for error in machine_problems(plan, facts):
        found.fail(error, only_here=True)
    workers, cores = plan.topology.nproc_per_node, facts["cpu"]["cores"]
    if plan.topology.device == "cpu" and workers > cores:
        found.note(f"{workers} workers share {cores} cores")


def check_data(plan: Plan, found: Findings) -> tuple[int | None, int | None]:
    """Rows, tokenizer and packed sequences; returns the vocabulary's size and the number of steps where known."""
    wanted = plan.recipe.model.tokenizer
    trained = isinstance(wanted, dict)
    vocab_size, steps = wanted["train"] if trained else None, plan.recipe.train.steps
    plan = _without_absent_eval(plan, found)
    with found.trying():
        plan = pin_commits(plan, RunDir(Path(plan.run_dir)), keep=False)
    rows_are_here, tokenizer = False, None
    found.busy("reading the data")
    with found.trying():
        rows_are_here = check_rows(plan, found)
    if rows_are_here or not trained:
        with found.trying():
            tokenizer = load_tokenizer(plan, found.progress)
            vocab_size = vocabulary_size(tokenizer)
            refuse_other_tokens(plan, tokenizer)
    if rows_are_here and tokenizer is not None:
        with found.trying():
            steps = check_sequences(plan, tokenizer, found)
    return vocab_size, steps


def _without_absent_eval(plan: Plan, found: Findings) -> Plan:
    """The plan, without the evaluation when its data is not here: the training data can be looked at all the same."""
    path = plan.eval_path
    if path is None or data_files(path) or not Path(path).is_absolute():
        return plan
    found.fail(NoData(f"data.eval.path: {path!r} was not found"))
    data = dataclasses.replace(plan.recipe.data, eval=None)
    return dataclasses.replace(plan, eval_path=None, recipe=dataclasses.replace(plan.recipe, data=data))


def check_rows(plan: Plan, found: Findings) -> bool:
    """Read the first rows: the columns there are, and those that the format wants."""
    data = plan.recipe.data
    there, first = peek(plan.data_path, data)
    needed = {field: data.columns.get(field, field) for field in FORMAT_FIELDS[data.format]}
    optional = {field: data.columns.get(field, field) for field in OPTIONAL_FIELDS.get(data.format, ())}
    needed |= {field: column for field, column in optional.items() if column in there}
    facts = {"path": plan.data_path, "files": len(data_files(plan.data_path)), "columns": there, "needed": needed}
    reads = describe_columns(plan.data_path, data)
    line = f"format {data.format}, which reads {reads}; columns of the first row: {listed(there)}"
    found.passed("data", facts, "Data", line)
    if data.format == "prompt_completion" and (tight := _without_space(first, data.separator)):
        found.note(f"no white space between prompt and completion, as in {tight}; data.separator puts a text there")
    return True


def _without_space(rows: list[dict[str, Any]], separator: str) -> str | None:
    """The first place where a prompt meets its completion without white space between them."""
    for row in rows:
        prompt, completion = row["prompt"] + separator, row["completion"]
        if prompt and completion and not prompt[-1].isspace() and not completion[0].isspace():
            return json.dumps(f"{prompt[-20:]}⟦{completion[:20]}⟧", ensure_ascii=False)
    return None


def check_sequences(plan: Plan, tokenizer: Any, found: Findings) -> int:
    """Tokenise and pack as the run will, into the cache it will read; returns the number of steps."""
    try:
        stream, held_out, _ = prepare(plan, tokenizer, found.progress)
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise CheckpointError(f"no space left on the disk for the prepared data: {error.filename}") from None
    own = not str(tokenizer.chat_template).endswith(PLAIN_CHAT_TEMPLATE)
    facts = sequence_facts(plan, stream, len(held_out)) | {
        "vocab_size": vocabulary_size(tokenizer),
        "template": ("the tokenizer's" if own else "plain") if plan.recipe.data.format == "chat" else None,
        "example": stream.corpus.show(tokenizer),
    }
    found.passed("data", facts, "Data")
    show_sequences(plan, facts, found)
    if plan.recipe.data.format == "chat" and not own:
        found.note("the tokenizer has no chat template: a plain one is used, as in the first sequence above")
    if facts["divided"]:
        found.note(
            "one text is longer than the whole held-out share: its last part is used for evaluation, the rest for "
            "training"
        )
    return int(facts["steps"])


def sequence_facts(plan: Plan, stream: Stream, held_out: int) -> dict[str, Any]:
    """What the rows became."""
    corpus, train = stream.corpus, plan.recipe.train
    return {
        **corpus.notes,
        "lengths": length_facts(corpus.lengths, corpus.seq_len),
        "sequences": len(stream),
        "eval_sequences": held_out,
        "fill": corpus.fill(),
        "steps_per_epoch": len(stream) / train.global_batch_size,
        "steps": plan.total_steps(len(stream)),
        "prepared_bytes": sum(array.nbytes for array in (corpus.tokens, corpus.trained, corpus.pieces, corpus.lengths)),
    }


def show_sequences(plan: Plan, facts: dict[str, Any], found: Findings) -> None:
    """Those facts for the person: counts, the histogram, an example."""
    data, lengths = plan.recipe.data, facts["lengths"]
    fate = long_row_treatment(data)
    beyond = {"continued": "cut wherever a sequence ends", "cut": f"cut at {data.seq_len:,}"}.get(fate, fate)
    longer = f"longer than seq_len {data.seq_len:,}: {counted(lengths['over_seq_len'], 'row')} ({beyond})"
    found.shown(
        "Data",
        f"{counted(facts['rows'], 'row')}, {facts['tokens']:,} tokens, {facts['label_tokens']:,} of them trained; "
        f"{facts['dropped']:,} rows dropped, without a trained token",
        f"rows by tokens: median {lengths['median']:,}, longest {lengths['longest']:,}; "
        + (longer if lengths["over_seq_len"] else f"none is longer than seq_len {data.seq_len:,}"),
    )
    found.draw("Data", "lengths", bins=lengths["bins"], seq_len=data.seq_len, beyond=beyond)
    found.shown(
        "Data",
        f"{facts['sequences']:,} sequences of {data.seq_len:,}, {facts['fill']:.1%} real tokens; "
        f"{facts['eval_sequences']:,} held out; {facts['steps_per_epoch']:,.1f} steps an epoch, {facts['steps']:,} in "
        f"all; {size(facts['prepared_bytes'])} in the cache",
        f"the first sequence, trained parts in ⟦ ⟧:\n{facts['example']}",
    )


def check_model(plan: Plan, vocab_size: int | None, steps: int | None, found: Findings) -> None:
    """Build the model without its weights and take it apart as the strategy will."""
    found.busy("building the model")
    if not attention_available(plan.recipe.model.attn_implementation):  # the machine's problem, found there
        plan = varied(plan, {"model.attn_implementation": "auto"})
    ready = preflight.prepare_model(plan, vocab_size)
    if found.elsewhere and (note := kernel_note(plan, ready)):
        found.note(note)
    facts = model_facts(ready.plan, ready.bare, ready.units)
    found.passed("model", facts, "Model", *model_lines(facts))
    found.draw("Model", "table", header=HEADER, rows=unit_rows(facts))
    disk = disk_facts(plan, facts["parameters"], steps)
    found.passed("model", {"disk": disk}, "Disk", disk_summary(disk))
    for error in disk_problems(plan, disk):
        found.fail(error, only_here=True)


def kernel_note(plan: Plan, ready: preflight.Ready) -> str | None:
    """Return a note where `auto` is another attention kernel on a machine that has, or lacks, flash-attn."""
    kernel = ready.plan.recipe.model.attn_implementation
    if plan.recipe.model.attn_implementation != "auto" or not (flash_fits(plan) and has_flash(ready.bare)):
        return None
    other = "sdpa without" if kernel == "flash_attention_2" else "flash_attention_2 with"
    return (
        f"model.attn_implementation: auto is {kernel} with what is installed here, and {other} flash-attn there; set "
        "the kernel that the run will use"
    )


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What is asked of the step: by which process, on which hardware (None: the one here), drawn where, at what price.

    `price` is in dollars for one GPU and hour.
    """

    forecaster: Forecaster
    hardware: Hardware | None = None
    plot: str | None = None
    advise: bool = False
    price: float | None = None


def check_step(plan: Plan, vocab_size: int | None, steps: int | None, found: Findings, options: StepOptions) -> None:
    """Memory, communication and time of a step of the engine, and whether it fits."""
    hardware = options.hardware or hardware_here(plan)
    if hardware is None:
        found.note(f"no figures are known of this card: give --hardware {','.join(f'{key}=…' for key in CUSTOM)}")
        return
    if not hardware.bf16 and plan.recipe.fsdp.mixed_precision.param_dtype == "bfloat16":
        found.fail(
            RecipeError(f"fsdp.mixed_precision.param_dtype: {hardware.name} has no units for bfloat16: set float32")
        )
        return
    found.busy("simulating a step")
    try:
        forecast = options.forecaster.forecast(plan, hardware, vocab_size=vocab_size, plot=options.plot)
    except RecipeError:
        raise
    except FsdptrainError as error:
        found.note(f"{error}; memory is by arithmetic, without fragments; communication and time are not known")
        by_arithmetic(plan, vocab_size, hardware, found)
        return
    cost = cost_of(forecast, plan, steps, options.price)
    found.step = dataclasses.asdict(forecast) | {"needed_bytes": forecast.needed_bytes} | cost
    show_step(forecast, plan, cost, found)
    if not forecast.fits:
        found.fail(does_not_fit_error(verdict(found.step, plan), searched=options.advise))
    if options.plot:
        found.step["plot"] = options.plot
        found.shown(MEMORY, f"drawn over the whole step in {options.plot}")
    for note in forecast.notes:
        found.note(note)
    if options.advise:
        check_others(plan, hardware, forecast, vocab_size, found, options)


def cost_of(forecast: Forecast, plan: Plan, steps: int | None, price: float | None) -> dict[str, Any]:
    """Seconds, GPU-hours and dollars of the whole run; empty where the number of steps is not known."""
    if steps is None:
        return {}
    run_s = steps * forecast.step_s
    hours = run_s / 3600 * plan.topology.world_size
    cost = {"run_s": run_s, "gpu_hours": hours}
    return cost if price is None else cost | {"price_per_gpu_hour": price, "dollars": hours * price}


def show_step(forecast: Forecast, plan: Plan, cost: dict[str, Any], found: Findings) -> None:
    """The forecast for the person."""
    found.shown(MEMORY, *memory_lines(forecast))
    fragments = forecast.reserved_bytes - forecast.peak_bytes
    beside = {"fragments": fragments, "outside torch": forecast.overhead_bytes}
    found.draw(MEMORY, "memory", by_category=forecast.breakdown, beside=beside, capacity=forecast.memory_bytes)
    rows = traffic_rows(forecast)
    if rows:
        found.draw("Communication a step", "table", header=TRAFFIC_HEADER, rows=rows)
    found.shown("Communication a step", *traffic_lines(forecast))
    found.shown("Time", *time_lines(forecast, plan, cost))
    found.forecast = verdict(found.step, plan)


def by_arithmetic(plan: Plan, vocab_size: int | None, hardware: Hardware, found: Findings) -> None:
    """Memory by the closed form, for want of a simulation. Raises FsdptrainError where it does not hold either."""
    top = closed_form.peak_by_arithmetic(plan, load_config(plan, vocab_size))
    needed = top.allocated + hardware.context + hardware.communicator
    capacity = hardware.memory or machine_facts(plan)["cpu"]["memory_bytes"] // plan.topology.nproc_per_node
    found.step = {
        "fits": needed <= capacity, "peak_bytes": top.allocated, "needed_bytes": needed, "memory_bytes": capacity,
        "moment": top.moment, "breakdown": top.by_category, "hardware": hardware.name, "method": "closed form",
    }  # fmt: skip
    found.shown(MEMORY, f"{size(top.allocated)} allocated at the peak, in the {top.moment}")
    beside = {"outside torch": needed - top.allocated}
    found.draw(MEMORY, "memory", by_category=top.by_category, beside=beside, capacity=capacity)
    found.forecast = verdict(found.step, plan)
    if needed > capacity:
        found.fail(does_not_fit_error(found.forecast, searched=False))


def check_others(
    plan: Plan, hardware: Hardware, own: Forecast, vocab_size: int | None, found: Findings, options: StepOptions
) -> None:
    """Other plans for the same job on the same ranks, the fastest first."""
    config, parameters = load_config(plan, vocab_size).to_dict(), found.levels["model"]["parameters"]

    def progress(settled: int, there_are: int) -> None:
        found.progress("comparing plans", settled, there_are)

    with Forecaster() as second:
        asks = [options.forecaster.forecast, second.forecast]
        advice = search(plan, hardware, own, asks, parameters, config, progress, vocab_size=vocab_size)
    found.levels["advice"] = dataclasses.asdict(advice)
    found.shown(ADVICE, *advice_table.lines(advice))
    rows = advice_table.rows(advice.options)
    found.draw(ADVICE, "table", header=advice_table.HEADER, rows=rows, titles=advice_table.TITLES)
    pasteable = advice_table.commands(advice)
    if pasteable:
        found.shown(ADVICE, "append the overrides of a plan to the command:")
    for name, words in pasteable:
        found.shown(ADVICE, name)
        found.draw(ADVICE, "command", words=words)


def hardware_here(plan: Plan) -> Hardware | None:
    """The hardware of this machine; None for a card we have no figures of."""
    if plan.topology.device == "cpu":
        return CPU
    properties = torch.cuda.get_device_properties(0)
    return card(properties.name, properties.total_memory)


def main() -> None:
    """Answer the request on standard input; nothing but records goes to standard output."""
    records = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print

    def send(record: dict[str, Any]) -> None:
        records.write(json.dumps(record) + "\n")
        records.flush()

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what matters of its warnings is said here
    request = Request.from_json(sys.stdin.buffer.read().decode())
    found = Findings(send, elsewhere=request.hardware is not None)
    for note in request.notes:
        found.note(note)
    go_offline_if_unreachable(request.plan, found.progress)
    with Forecaster() as forecaster:
        options = StepOptions(forecaster, request.hardware, request.plot, request.advise, request.price)
        dry_run(request.plan, found, request.problems, request.build, options)
    for option, wanted, key in (("--plot", request.plot, "plot"), ("--advise", request.advise, "advice")):
        if wanted and key not in found.step | found.levels:
            found.note(f"{option} was skipped: the step could not be simulated")
    send({"event": "outcome", **dataclasses.asdict(found.outcome())})
