"""The levels of a dry run below the recipe: plan, machine, data, model, memory, communication, time, verdict.

A level is shown as it passes; one that does not pass does not stop the next, so that all problems come at once.
`docs/validate.md` names what `--json` holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from fsdptrain import closed_form
from fsdptrain.advise import HEADER as ADVICE_HEADER
from fsdptrain.advise import lines as advice_lines
from fsdptrain.advise import rows as advice_rows
from fsdptrain.advise import search
from fsdptrain.anatomy import HEADER, model_facts, model_lines, unit_rows
from fsdptrain.data import PLAIN_CHAT_TEMPLATE, Stream, prepare
from fsdptrain.errors import CheckpointError, DoesNotFit, FsdptrainError, NoData, RecipeError, listed
from fsdptrain.findings import Findings
from fsdptrain.forecast import Forecast, Forecaster
from fsdptrain.hardware import CPU, CUSTOM, Hardware, card, parse
from fsdptrain.histogram import bars, length_facts
from fsdptrain.hub import checkpoint_files, hub_errors, spare_retries
from fsdptrain.machine import (
    attention_available,
    disk_facts,
    disk_line,
    disk_problems,
    machine_facts,
    machine_line,
    machine_problems,
)
from fsdptrain.model import load_config, skeleton, units_of
from fsdptrain.outlook import (
    TRAFFIC_HEADER,
    memory_lines,
    refusal,
    time_lines,
    traffic_lines,
    traffic_rows,
    verdict,
)
from fsdptrain.plan import Plan
from fsdptrain.plot import memory_bar
from fsdptrain.processes import exit_printed
from fsdptrain.report import Screen, size
from fsdptrain.rows import data_files, peek
from fsdptrain.schema import FORMAT_FIELDS
from fsdptrain.tokenizer import load_tokenizer, vocabulary

BAR_WIDTH = 80  # characters


def dry_run(
    plan: Plan, found: Findings, problems: list[str] | None = None, build: bool = True, look_ahead: Look | None = None
) -> None:
    """Every level, as far as each can go. `problems` are those of the plan itself, which then is only a draft.

    The step is forecast where a forecaster is given with `look_ahead`, and the plan is one that could run.
    """
    for problem in problems or ():
        found.fail(RecipeError(problem))
    if not problems:
        found.passed("plan", *describe_plan(plan))
    with found.trying():
        check_machine(plan, found)
    vocab_size, steps = check_data(plan, found)
    if build:
        with found.trying():
            check_model(plan, vocab_size, steps, found)
            if look_ahead and not problems:
                check_step(plan, vocab_size, steps, found, look_ahead)


def describe_plan(plan: Plan) -> tuple[dict[str, Any], str]:
    """The arithmetic of the run."""
    train, topology = plan.recipe.train, plan.topology
    facts = {
        "strategy": plan.recipe.fsdp.strategy, "world_size": topology.world_size, "replicas": plan.replicas,
        "shard_size": plan.shard_size, "accumulation": plan.accumulation,
        "tokens_per_step": train.global_batch_size * plan.recipe.data.seq_len,
    }  # fmt: skip
    line = (
        f"{facts['strategy']} over {topology.world_size} ranks ({topology.nnodes} × {topology.nproc_per_node} "
        f"{topology.device}): {plan.replicas} × {plan.shard_size}; a step is {train.global_batch_size} sequences = "
        f"{topology.world_size} ranks × {plan.accumulation} micro-batches × {train.micro_batch_size}"
    )
    return facts, line


def check_machine(plan: Plan, found: Findings) -> None:
    """What this machine has of what the run needs."""
    facts = machine_facts(plan)
    found.passed("machine", facts, machine_line(facts))
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
    rows_are_here, tokenizer = False, None
    with found.trying():
        rows_are_here = check_rows(plan, found)
    if rows_are_here or not trained:
        with found.trying():
            tokenizer = load_tokenizer(plan, found.progress)
            vocab_size = vocabulary(tokenizer)
    if rows_are_here and tokenizer is not None:
        with found.trying():
            steps = check_sequences(plan, tokenizer, found)
    return vocab_size, steps


def _without_absent_eval(plan: Plan, found: Findings) -> Plan:
    """The plan, without the evaluation when its data is not here: the training data can be looked at all the same."""
    path = plan.eval_path
    if path is None or data_files(path) or not Path(path).is_absolute():
        return plan
    found.fail(NoData(f"data.eval.path: nothing at {path}"))
    data = dataclasses.replace(plan.recipe.data, eval=None)
    return dataclasses.replace(plan, eval_path=None, recipe=dataclasses.replace(plan.recipe, data=data))


def check_rows(plan: Plan, found: Findings) -> bool:
    """Read the first rows: the columns there are, and those that the format wants."""
    data = plan.recipe.data
    there, _ = peek(plan.data_path, data)
    needed = {field: data.columns.get(field, field) for field in FORMAT_FIELDS[data.format]}
    facts = {"path": plan.data_path, "files": len(data_files(plan.data_path)), "columns": there, "needed": needed}
    pairs = ", ".join(field if field == column else f"{field} from {column}" for field, column in needed.items())
    found.passed("data", facts, f"{data.format} rows: {pairs}; the columns there are: {listed(there)}")
    return True


def check_sequences(plan: Plan, tokenizer: Any, found: Findings) -> int:
    """Tokenise and pack as the run will, into the cache it will read; returns the number of steps."""
    try:
        stream, held_out, _ = prepare(plan, tokenizer, found.progress)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise CheckpointError(f"no space left on the disk for the prepared data: {error.filename}") from None
    own = tokenizer.chat_template != PLAIN_CHAT_TEMPLATE
    facts = sequence_facts(plan, stream, len(held_out)) | {
        "vocab_size": vocabulary(tokenizer),
        "template": ("the tokenizer's" if own else "plain") if plan.recipe.data.format == "chat" else None,
        "example": stream.corpus.show(tokenizer),
    }
    found.passed("data", facts, *sequence_lines(plan, facts))
    if plan.recipe.data.format == "chat" and not own:
        found.note("the tokenizer has no chat template: a plain one is used, as in the first sequence above")
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


def sequence_lines(plan: Plan, facts: dict[str, Any]) -> list[str]:
    """Those facts for the person: counts, the histogram, an example."""
    data, lengths = plan.recipe.data, facts["lengths"]
    fates = {"concat": "cut wherever a sequence ends"}
    beyond = fates.get(data.packing, "split" if data.format == "text" else f"cut at {data.seq_len:,}")
    longer = f"{lengths['over_seq_len']:,} are longer than seq_len {data.seq_len:,}" + f" ({beyond})"
    return [
        f"{facts['rows']:,} rows, {facts['tokens']:,} tokens, {facts['label_tokens']:,} of them trained; "
        f"{facts['dropped']:,} rows dropped, without a trained token",
        f"rows by tokens: median {lengths['median']:,}, longest {lengths['longest']:,}; "
        + (longer if lengths["over_seq_len"] else f"none is longer than seq_len {data.seq_len:,}"),
        "\n".join(bars(lengths, data.seq_len, beyond)),
        f"{facts['sequences']:,} sequences of {data.seq_len:,}, {facts['fill']:.1%} real tokens; "
        f"{facts['eval_sequences']:,} held out; {facts['steps_per_epoch']:,.1f} steps an epoch, {facts['steps']:,} in "
        f"all; {size(facts['prepared_bytes'])} in the cache",
        f"the first sequence, trained parts in ⟦ ⟧:\n{facts['example']}",
    ]


def check_model(plan: Plan, vocab_size: int | None, steps: int | None, found: Findings) -> None:
    """Build the model without its weights and take it apart as the strategy will."""
    model = plan.recipe.model
    config = load_config(plan, vocab_size)
    if not attention_available(model.attn_implementation):  # the machine's problem; eager is in every model
        model = dataclasses.replace(model, attn_implementation="eager")
    built = skeleton(config, model)
    facts = model_facts(plan, built, units_of(built, plan.recipe.fsdp.wrap))
    found.passed("model", facts, *model_lines(facts))
    found.table(HEADER, unit_rows(facts))
    if plan.pretrained:
        with found.trying(), hub_errors("model.id", str(model.id)):
            if Path(str(model.id)).is_dir():  # nothing is downloaded for a dry run
                checkpoint_files(plan)
    disk = disk_facts(plan, facts["parameters"], steps)
    found.passed("model", {"disk": disk}, f"disk: {disk_line(disk)}")
    for error in disk_problems(plan, disk):
        found.fail(error, only_here=True)


@dataclasses.dataclass(frozen=True)
class Look:
    """What is asked of the step: by which process, on which hardware (None: the one here), and drawn where."""

    forecaster: Forecaster
    hardware: Hardware | None = None
    plot: Path | None = None
    advise: bool = False


def check_step(plan: Plan, vocab_size: int | None, steps: int | None, found: Findings, look: Look) -> None:
    """Memory, communication and time of a step of the engine, and whether it fits."""
    hardware = look.hardware or hardware_here(plan)
    if hardware is None:
        found.note(f"no figures are known of this card: give --hardware {','.join(f'{key}=…' for key in CUSTOM)}")
        return
    if not hardware.bf16 and plan.recipe.fsdp.mixed_precision.param_dtype == "bfloat16":
        found.fail(RecipeError(
            f"fsdp.mixed_precision.param_dtype: {hardware.name} has no units for bfloat16: set float32"
        ))  # fmt: skip
        return
    drawing = str(look.plot.absolute()) if look.plot else None
    with found.screen.busy("simulate"):
        try:
            forecast = look.forecaster.ask(plan, hardware, vocab_size=vocab_size, plot=drawing)
        except RecipeError:
            raise
        except FsdptrainError as error:
            found.note(f"{error}; what follows is arithmetic, without fragments, communication and time")
            by_arithmetic(plan, vocab_size, hardware, found)
            return
    found.step = dataclasses.asdict(forecast) | {"needed_bytes": forecast.needed_bytes}
    if steps is not None:
        run_s = steps * forecast.step_s
        found.step |= {"run_s": run_s, "gpu_hours": run_s / 3600 * plan.topology.world_size}
    found.shown("memory", *memory_lines(forecast))
    fragments = forecast.reserved_bytes - forecast.peak_bytes
    beside = {"fragments": fragments, "outside torch": forecast.overhead_bytes}
    found.draw(memory_bar(forecast.breakdown, beside, forecast.memory_bytes, BAR_WIDTH))
    found.table(TRAFFIC_HEADER, traffic_rows(forecast))
    found.shown("traffic", *traffic_lines(forecast))
    found.shown("time", *time_lines(forecast, plan, steps))
    for note in forecast.notes:
        found.note(note)
    if forecast.fits:
        found.shown("verdict", verdict(forecast))
    else:
        found.fail(refusal(forecast))
    if look.advise:
        check_others(plan, hardware, forecast, vocab_size, found, look)


def by_arithmetic(plan: Plan, vocab_size: int | None, hardware: Hardware, found: Findings) -> None:
    """Memory by the closed form, for want of a simulation. Raises FsdptrainError where it does not hold either."""
    top = closed_form.peak(plan, load_config(plan, vocab_size))
    needed = top.allocated + hardware.context + hardware.communicator
    capacity = hardware.memory or machine_facts(plan)["cpu"]["memory_bytes"] // plan.topology.nproc_per_node
    found.step = {
        "fits": needed <= capacity, "peak_bytes": top.allocated, "needed_bytes": needed, "memory_bytes": capacity,
        "moment": top.moment, "breakdown": top.by_category, "hardware": hardware.name, "method": "closed form",
    }  # fmt: skip
    found.shown("memory", f"the peak of the worst rank: {size(top.allocated)} allocated, in the {top.moment}")
    found.draw(memory_bar(top.by_category, {"outside torch": needed - top.allocated}, capacity, BAR_WIDTH))
    if needed > capacity:
        found.fail(DoesNotFit(f"does not fit: {size(needed)} of {size(capacity)}"))


def check_others(
    plan: Plan, hardware: Hardware, own: Forecast, vocab_size: int | None, found: Findings, look: Look
) -> None:
    """Other plans for the same job on the same ranks, the fastest first."""
    config, parameters = load_config(plan, vocab_size).to_dict(), found.levels["model"]["parameters"]

    def progress(settled: int, there_are: int) -> None:
        found.progress("advise", settled, there_are)

    with Forecaster() as second:
        asks = [look.forecaster.ask, second.ask]
        advice = search(plan, hardware, own, asks, parameters, config, progress, vocab_size=vocab_size)
    found.levels["advice"] = dataclasses.asdict(advice)
    found.table(ADVICE_HEADER, advice_rows(advice.options))
    found.shown("advice", *advice_lines(advice))


def hardware_here(plan: Plan) -> Hardware | None:
    """The hardware of this machine; None for a card we have no figures of."""
    if plan.topology.device == "cpu":
        return CPU
    properties = torch.cuda.get_device_properties(0)
    return card(properties.name, properties.total_memory)


def main() -> None:
    """Look at the plan on standard input; the options are those of the command line."""
    parser = argparse.ArgumentParser()
    for flag in ("--json", "--advise", "--no-build"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--hardware", type=lambda text: parse(text).hardware)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--problem", action="append", default=[])
    words = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()  # what matters of its warnings is said here
    plan = Plan.from_json(sys.stdin.read())
    with Screen(Console(stderr=True) if words.json else None) as screen, Forecaster() as forecaster:
        found = Findings(screen, words.json, elsewhere=words.hardware is not None)
        spare_retries(plan, found.progress)
        look = Look(forecaster, words.hardware, words.plot, words.advise)
        dry_run(plan, found, words.problem, not words.no_build, look)
    if words.json:
        print(found.to_json())
    found.tell_problems()
    exit_printed(found.exit_code)
