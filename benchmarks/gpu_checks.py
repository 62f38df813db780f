"""The checks of `gpu.py`. Each takes the setting and returns rows of the table; an exception becomes a row there.

What a user would run is run as a command; the rest runs in ranks (`gpu_ranks.py`). This process never uses a GPU.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from common import RANKS, ROOT, last_line, run_ranks

from fsdptrain.errors import listed
from fsdptrain.launch.launcher import ALLOCATOR
from fsdptrain.plan.hardware import Hardware, card
from fsdptrain.text import GIB

OK, WRONG, MEASURED = "ok", "WRONG", "measured"
SAME = 2e-3  # the numerical contract in the bf16 policy, relative
LLAMA = {"model_type": "llama", "tie_word_embeddings": True, "max_position_embeddings": 8192}
SMALL = LLAMA | {  # for comparisons of values, not of speed
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
TINY = LLAMA | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
SHAPES = {  # those of Llama 3.2
    "1B": LLAMA | {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    },
    "3B": LLAMA | {
        "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
SHARE_OF = {  # the key of `Hardware.attention_share` for a kernel that was measured
    "cudnn": "cudnn", "efficient": "efficient", "varlen": "flash", "varlen FA3": "FA3", "varlen FA4": "FA4",
}  # fmt: skip
TENSORS_OF_300M = LLAMA | {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A line of the table: what was checked, what was found, the verdict on it, and a remark."""

    what: str
    figure: str
    verdict: str
    note: str = ""


@dataclass(frozen=True)
class Setting:
    """The machine, the sizes, and a folder for recipes, runs and logs. `check` and `deadline` are of the current check.

    `machine` is what the job `versions` found. On a CPU, and with `tiny`, models and sequences are small. All checks
    share `runs`, `figures` (the measured fields of `Hardware`, as Python), `seconds` (how long each check took),
    `forecasts` and `rates` (by the name of a recipe, what `validate` says, and tokens a second), and `exports`.
    """

    folder: Path
    machine: dict[str, Any]
    tiny: bool
    deadline: float = float("inf")
    check: str = "check"
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    forecasts: dict[str, dict[str, Any]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    exports: list[Path] = field(default_factory=list)

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return str(self.machine["device"])

    @property
    def on_gpu(self) -> bool:
        """Whether the checks run on a GPU."""
        return self.device == "cuda"

    @property
    def card(self) -> Hardware | None:
        """The figures of the GPU that `fsdptrain` plans with, if it knows this one."""
        return card(self.machine["name"], self.machine["memory"]) if self.on_gpu else None

    @property
    def many(self) -> int:
        """The ranks of a check that needs several: all GPUs, or two processes on a CPU."""
        return int(self.machine["gpus"]) if self.on_gpu else 2

    @property
    def log(self) -> Path:
        """The file for the output of everything that the current check starts."""
        return self.folder / f"{self.check}.log"

    def left(self) -> float:
        """Return the seconds that the current check has left."""
        return max(1.0, self.deadline - time.monotonic())

    def environment(self) -> dict[str, str]:
        """Return the environment variables that select the device and a cache of this script's own."""
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.machine["gpus"]))))
        chosen = devices if self.on_gpu else ""
        found = {"CUDA_VISIBLE_DEVICES": chosen, "FSDPTRAIN_CACHE": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1"}
        if self.on_gpu:
            (self.folder / "nccl").mkdir(exist_ok=True)
            found |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(self.folder / "nccl/%h.%p.log")}
        return found

    def job(self, name: str, world: int = 1, **arguments: Any) -> Any:
        """Run a job of gpu_ranks.py on `world` ranks; return the result of rank 0."""
        words = name, json.dumps({"device": self.device, **arguments})
        threads = min(max(1, len(os.sched_getaffinity(0)) // world), 32)
        environment = self.environment()
        if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:  # else each rank starts a process for each core
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
        if self.on_gpu and name != "peer" and not os.environ.keys() & ALLOCATOR:  # as fsdptrain's own workers
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        return run_ranks(RANKS, world, *words, log=self.log, timeout=self.left(), **environment)[0]

    def start(self, *words: object, **extra: str) -> subprocess.Popen[bytes]:
        """Start an fsdptrain command, with its errors in the log; `extra` is added to its environment."""
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "fsdptrain", *map(str, words)]
            environment = os.environ | self.environment() | extra
            if not self.on_gpu:
                environment |= {"OMP_NUM_THREADS": "1"}
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)

    def command(self, *words: object, **extra: str) -> tuple[int, str]:
        """Run an fsdptrain command; return its exit code and all of its output."""
        before = self.log.stat().st_size if self.log.exists() else 0
        process = self.start(*words, **extra)
        try:
            output = process.communicate(timeout=self.left())[0]
        finally:
            process.kill()
        errors = self.log.read_bytes()[before:]
        with self.log.open("ab") as log:
            log.write(output)
        return process.returncode, output.decode(errors="replace") + errors.decode(errors="replace")

    def run(self, recipe: Path, *overrides: str) -> list[dict[str, Any]]:
        """Run a recipe to its end; return its events. Raises RuntimeError if the command fails."""
        code, _ = self.command("run", recipe, *overrides)
        if code:
            raise RuntimeError(f"fsdptrain run {' '.join(overrides)} exited with {code}: {last_line(self.log)}")
        own = (word.removeprefix("output_dir=") for word in overrides if word.startswith("output_dir="))
        return events_of(Path(next(own, output_of(recipe))))

    def recipe(self, name: str, config: dict[str, Any], changes: dict[str, Any] | None = None) -> Path:
        """Write a recipe for one rank that trains a model from scratch; `changes` are dotted keys (None: removed)."""
        config = TINY if self.tiny else config
        values: dict[str, Any] = {
            "output_dir": str(self.folder / "runs" / name),
            "model": {"config": config, "tokenizer": {"train": min(4096, config["vocab_size"])}, "init": "random"},
            "data": {"path": str(self.text()), "seq_len": 128 if self.tiny else 2048},
            "optim": {"lr": 3e-4},
            "train": {"steps": 1000, "global_batch_size": 4, "micro_batch_size": 2},
            "checkpoint": {"every": None},
            "export": {"at_end": False},
            "log": {"trackers": [], "forecast": False},
            "launch": {"nproc_per_node": 1},
        }
        for path, value in (changes or {}).items():
            *parents, last = path.split(".")
            section = values
            for parent in parents:
                section = section.setdefault(parent, {})
            section[last] = value
            if value is None:
                del section[last]
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(values, indent=1))  # JSON is YAML
        return path

    def rows(self) -> dict[str, str]:
        """Return the keys of data whose sequences are rows of one document without a mask, as peers train on.

        The document is cut every `seq_len` tokens: only the last row is shorter, and computed like the others.
        """
        return {"data.path": str(self.text(whole=True)), "data.packing": "none"}

    def text(self, whole: bool = False) -> Path:
        """Return a file of short documents, of which several fit into a sequence, or of one long document."""
        path = self.folder / ("whole.jsonl" if whole else "text.jsonl")
        if not path.exists():
            text = (ROOT / "recipes/data/tinyshakespeare.txt").read_text()
            paragraphs = [text] if whole else text.split("\n\n")
            new = path.with_name(f"{path.name}-{self.check}")  # another check may write it at the same time
            new.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
            new.replace(path)
        return path


def output_of(recipe: Path) -> Path:
    """Return the run folder of a recipe that `Setting.recipe` wrote."""
    return Path(json.loads(recipe.read_text())["output_dir"])


def events_of(run: Path) -> list[dict[str, Any]]:
    """Return the events of a run so far."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest `step` event of each step."""
    return list({event["step"]: event for event in events if event["event"] == "step"}.values())


def usual(events: list[dict[str, Any]], figure: str) -> float:
    """Return the median of a figure of the steps of a run, without the first third of them."""
    made = steps_of(events)
    return statistics.median(event[figure] for event in made[len(made) // 3 :])


def verdict(good: bool) -> str:
    """Return the verdict on a check that can fail."""
    return OK if good else WRONG


# ------------------------------------------------------------------------------------------------- device and kernels


def check_versions(setting: Setting) -> list[Row]:
    """Versions, and whether fsdptrain knows the card."""
    if fault := setting.machine.get("fault"):
        return [Row("versions", "", f"failed: {fault}", str(setting.log))]
    shown = {name: value for name, value in setting.machine.items() if name not in ("device", "memory", "name", "gpus")}
    rows = [Row("versions", ", ".join(f"{name} {value}" for name, value in shown.items()), MEASURED)]
    if not setting.on_gpu:
        return [*rows, Row("device", "CPU", MEASURED)]
    known, machine = setting.card, setting.machine
    what = f"{machine['gpus']} × {machine['name']}, {machine['memory'] / GIB:.1f} GiB"
    return [
        *rows,
        Row("device", what, verdict(known is not None), f"hardware figures of {known.name}" if known else ""),
    ]


def check_rates(setting: Setting) -> list[Row]:
    """The rate of matrix products and of memory, in the form of plan/hardware.py."""
    found, known = setting.job("rates", tiny=setting.tiny), setting.card
    product, memory = f"{found['flops'] / 1e12:.3g} TFLOP/s", f"{found['bytes'] / 1e12:.3g} TB/s"
    if known is None:
        return [Row("matrix product, bf16", product, MEASURED), Row("memory, copy", memory, MEASURED)]
    setting.figures["memory_share"] = f"{found['bytes'] / known.memory_bw:.2f}"
    return [
        Row(
            "matrix product, bf16", product, MEASURED,
            f"{found['flops'] / known.flops:.2f} of the peak; product_share is {known.product_share}, in whole steps",
        ),
        Row("memory, copy", memory, MEASURED, f"memory_share={setting.figures['memory_share']}"),
    ]  # fmt: skip


def check_attention(setting: Setting) -> list[Row]:
    """The rate of each attention kernel, and the shares of the peak in the form of plan/hardware.py."""
    rows, measured = [], {}
    for found in setting.job("attention_rates", tiny=setting.tiny):
        what = f"attention, {found['kernel']}, {found['kind']}"
        if "why" in found:
            rows.append(Row(what, "not available", MEASURED, found["why"]))
            continue
        both = found["forward"], found["backward"]
        rows.append(
            Row(what, "{:.4g} TFLOP/s forward, {:.4g} backward".format(*(rate / 1e12 for rate in both)), MEASURED)
        )
        if setting.card:
            share = tuple(round(rate / setting.card.flops, 2) for rate in both)
            # The kernels' shares are of causal attention, but the efficient kernel is used with masks only.
            usual = found["kind"] == ("masked" if found["kernel"] == "efficient" else "causal")
            key = SHARE_OF.get(found["kernel"])
            if usual and key in setting.card.attention_share:  # others are not used on this card
                measured[key] = share
            else:
                rows[-1] = Row(what, rows[-1].figure, MEASURED, f"{share} of the peak")
    if measured:  # the card keeps the figures of what was not
        setting.figures["attention_share"] = str({**setting.card.attention_share, **measured})
        rows.append(Row("attention, shares of the peak", f"measured: {measured}", MEASURED))
    return rows


def check_kernels(setting: Setting) -> list[Row]:
    """Which attention operator a micro-batch uses, packed (`bfd`) and not (`none`), by head size."""
    variants = {}
    for size in (64, 128, 256, 96):
        config = [f"model.config.head_dim={size}", "train.compile=false"]
        variants[f"packed, heads of {size}"] = ["data.packing=bfd", *config]
        variants[f"not packed, heads of {size}"] = ["data.packing=none", *config]
    if setting.tiny:
        variants = dict([*variants.items()][:2])
    found = setting.job("kernels", recipe=str(setting.recipe("kernels", SMALL)), variants=variants)
    return [Row(f"kernel, {name}", operators, MEASURED) for name, operators in found.items()]


# -------------------------------------------------------------------------------------------------------------- values


def check_gradients(setting: Setting) -> list[Row]:
    """Packed gradients against each document alone, and the chunked loss against the plain one.

    The reference is float32 with eager attention. bf16 differs from it anyway: the differences of eager attention, each
    document alone, and of the plain loss, are what bf16 costs.
    """
    eager = ["data.packing=none", "model.attn_implementation=eager", "train.compile=false"]
    variants = {
        "reference": [*eager, "fsdp.mixed_precision.param_dtype=float32", "train.loss=plain"],
        "alone": [*eager, "train.loss=plain"],
        "packed": ["data.packing=bfd", "train.loss=plain", "train.compile=false"],
        "chunked": ["data.packing=bfd", "train.compile=false"],
    }
    changes = {"data.max_rows": 12 if setting.tiny else 100}
    recipe = setting.recipe("gradients", SMALL, changes)
    found = setting.job("gradients", recipe=str(recipe), variants=variants, reference="reference")
    return [
        against("packed gradients, to each document alone", found["packed"], found["alone"], "eager, each alone"),
        against("gradients of the chunked loss, to the plain", found["chunked"], found["packed"], "the plain loss"),
    ]


def against(what: str, found: float, usual: float, name: str) -> Row:
    """Return a row on a difference that may be up to three times that of another bf16 computation."""
    figure = f"worst difference to float32 {found:.2e}; {name}: {usual:.2e}"
    return Row(what, figure, verdict(found <= 3 * usual + 1e-6), "of the largest element of a gradient; at most 3×")


def check_curves(setting: Setting) -> list[Row]:
    """The curves of eager, compiled, recomputed and offloaded runs, and of rows of one document by two kernels."""
    rows = [f"{key}={value}" for key, value in setting.rows().items()]
    of_rows = {"rows of one document, not packed": rows, "the same rows by varlen": [*rows, "data.packing=concat"]}
    variants = {
        "eager": [],
        "eager again": [],
        "compiled": ["train.compile=true"],
        "recomputed, full": ["fsdp.activation_checkpointing=full"],
        "recomputed, selective": ["fsdp.activation_checkpointing=selective"],
        "compiled, recomputed, selective": ["train.compile=true", "fsdp.activation_checkpointing=selective"],
        "eager attention": ["model.attn_implementation=eager"],
        "accumulated": ["train.micro_batch_size=1"],
        "gradients held": ["train.micro_batch_size=1", "fsdp.accumulation=hold"],
        "offloaded": ["fsdp.cpu_offload=true"],
    }
    steps = 4 if setting.tiny else 20
    recipe = setting.recipe("curves", SMALL, {"train.steps": steps, "train.compile": False})
    found = setting.job("curves", recipe=str(recipe), variants=variants | of_rows, tiny=setting.tiny)
    return [
        row for group in (variants, of_rows) for row in compared_curves({name: found[name] for name in group}, steps)
    ]


def compared_curves(found: dict[str, list[list[float]]], steps: int) -> list[Row]:
    """Return a row for each curve on its largest difference to the first one."""
    first, *others = found
    rows = []
    for name in others:
        loss, norm = (largest_difference(found[name], found[first], column) for column in (0, 1))
        note = "equal to the last bit" if found[name] == found[first] else ""
        figure = f"largest difference of loss {loss:.1e}, of gradient norm {norm:.1e}, in {steps} steps"
        complete = len(found[name]) == len(found[first]) == steps
        rows.append(Row(f"curve, {name}, to {first}", figure, verdict(complete and loss <= SAME), note))
    return rows


def largest_difference(a: list[list[float]], b: list[list[float]], column: int) -> float:
    """Return the largest relative difference of a column of two curves."""
    return max((abs(x[column] - y[column]) / abs(y[column]) for x, y in zip(a, b, strict=False)), default=float("inf"))


def check_compile(setting: Setting) -> list[Row]:
    """Graphs compiled in the first steps and after them, packed (`bfd`) and not (`none`)."""
    rows = []
    for packing in ("bfd",) if setting.tiny else ("bfd", "none"):
        overrides = [f"data.packing={packing}", "train.compile=true"]
        recipe, steps = str(setting.recipe("compile", SMALL)), 2 if setting.tiny else 20
        found = setting.job("graphs", recipe=recipe, overrides=overrides, tiny=setting.tiny, steps=steps)
        figure = f"{found['first']} graphs in 4 steps, {found['later']} in {steps} more, {found['breaks']} breaks"
        good = found["first"] > 0 and not found["later"] and not found["breaks"]
        rows.append(Row(f"recompilations, packing {packing}", figure, verdict(good)))
    return rows


# ----------------------------------------------------------------------------------------------------------- the speed


def check_syncs(setting: Setting) -> list[Row]:
    """Waits of the host for the device, per step; at most one is allowed."""
    variants = {
        "packed": [],
        "not packed": ["data.packing=none"],
        "accumulated": ["train.micro_batch_size=1"],
        "recomputed": ["fsdp.activation_checkpointing=selective"],
        "compiled": ["train.compile=true"],
        "offloaded": ["fsdp.cpu_offload=true"],
        "offloaded, accumulated": [
            "fsdp.cpu_offload=true", "fsdp.accumulation=hold_shards", "train.micro_batch_size=1"
        ],
    }  # fmt: skip
    steps = 2 if setting.tiny else 8
    if setting.tiny:
        variants = {"packed": []}
    changes = {"train.compile": False, "log.every": 100}
    found = setting.job("syncs", recipe=str(setting.recipe("syncs", SMALL, changes)), variants=variants, steps=steps)
    return [synced(name, places, steps) for name, places in found.items()]


def synced(name: str, places: dict[str, int] | None, steps: int) -> Row:
    """Return a row on the waits in some steps, by place."""
    what = f"waits of the host a step, {name}"
    if places is None:
        return Row(what, "not recorded", MEASURED)
    each = sum(places.values()) / steps
    often = sorted(places.items(), key=lambda item: -item[1])
    note = ", ".join(f"{place} {count / steps:.3g}" for place, count in often[:4])
    return Row(what, f"{each:.3g}", verdict(each <= 1), f"{note}; waits for events are not counted" if note else "")


def check_speed(shape: str, setting: Setting) -> list[Row]:
    """Tokens a second of fsdptrain, and of a plain `fully_shard` loop and the Trainer, compiled (by layers) and not."""
    steps, seq_len, config, recompute = 12 if setting.tiny else 40, *sizes(shape, setting)
    events = setting.run(speed_recipe(shape, setting, steps))
    setting.runs[shape] = events
    rate, mfu = seq_len / usual(events, "step_s"), usual(events, "mfu")
    note = "train.compile: auto" + (f"; MFU {mfu:.1%}" if setting.on_gpu else "")
    rows = [Row(f"{shape}, fsdptrain", f"{rate:,.0f} tokens/s", MEASURED, note)]
    peers = itertools.product({"plain": "plain fully_shard", "trainer": "the Trainer"}.items(), (True, False))
    for (name, shown), compiled in peers:
        what = f"{shape}, {shown}, {'compiled' if compiled else 'not compiled'}"
        try:
            found = setting.job(
                "peer", loop=name, config=config, seq_len=seq_len, recompute=recompute, compiled=compiled,
                steps=steps // 2, place=str(setting.folder),
            )  # fmt: skip
        except SystemExit as error:  # also a peer that runs out of memory
            rows.append(Row(what, "failed", MEASURED, str(error)[-200:]))
            continue
        other = found["tokens"][-1] / statistics.median(found["step_s"])
        figure = f"{other:,.0f} tokens/s: fsdptrain is {rate / other:.2f}×"
        good, note = (verdict(rate >= other), f"MFU {mfu * other / rate:.1%}") if setting.on_gpu else (MEASURED, "")
        rows.append(Row(what, figure, good, note))
    return rows


def sizes(shape: str, setting: Setting) -> tuple[int, dict[str, Any], bool]:
    """Return the sequence length, the model, and whether layers are recomputed, for a shape."""
    return (128, TINY, False) if setting.tiny else (4096, SHAPES[shape], shape != "1B")


def speed_recipe(shape: str, setting: Setting, steps: int) -> Path:
    """Write the recipe of a shape: one row of one document a step, as the peers attend over all of it."""
    seq_len, _, recompute = sizes(shape, setting)
    changes = {
        "data.seq_len": seq_len, "train.steps": steps, "train.global_batch_size": 1, "train.micro_batch_size": 1,
        "fsdp.activation_checkpointing": "full" if recompute else "none", **setting.rows(),
    }  # fmt: skip
    return setting.recipe(f"speed-{shape}", SHAPES[shape], changes)


def check_forecast(shape: str, setting: Setting) -> list[Row]:
    """Forecast and measurement: memory allocated, reserved and outside torch, seconds of a step; and the idle share."""
    recipe = speed_recipe(shape, setting, 1000)
    found = setting.job("step", recipe=str(recipe), steps=2 if setting.tiny else 8)
    code, output = setting.command("validate", recipe, "--json")
    if code:
        raise RuntimeError(f"fsdptrain validate exited with {code}: {output[-300:]}")
    forecast = json.loads(output[output.index("{") : output.rindex("}") + 1])
    idle = verdict(found["idle"] <= 0.05) if setting.on_gpu else MEASURED
    rows = [Row(f"{shape}, idle share of the GPU", f"{found['idle']:.1%}", idle, "at most 5%")]
    if memory := found["memory"]:
        if setting.card:
            others = forecast["overhead_bytes"] - setting.card.context  # communicators
            setting.figures["context"] = f"int({(memory['outside'] - others) / GIB:.2f} * GIB)"
        rows += [
            forecasted(f"{shape}, memory allocated", forecast["peak_bytes"], memory["allocated"], 0.02),
            forecasted(f"{shape}, memory reserved", forecast["reserved_bytes"], memory["reserved"], 0.05),
            forecasted(
                f"{shape}, memory outside torch", forecast["overhead_bytes"], memory["outside"], 0.2,
                f"context={setting.figures['context']}" if setting.card else "",
            ),
        ]  # fmt: skip
    else:
        rows.append(Row(f"{shape}, memory allocated", f"forecast {forecast['peak_bytes'] / GIB:.3g} GiB", MEASURED))
    if events := setting.runs.get(shape):
        rows.append(timed(shape, forecast, usual(events, "step_s"), setting.on_gpu))
    else:
        rows.append(Row(f"{shape}, step time", "not compared", MEASURED, f"run speed-{shape} in the same call"))
    return rows


def timed(what: str, forecast: dict[str, Any], measured: float, on_gpu: bool) -> Row:
    """Return a row on the seconds of a step, which on a GPU are to be in the forecast's own range."""
    expected, (low, high) = forecast["step_s"], forecast["step_s_range"]
    figure = f"forecast {expected:.4g} s, measured {measured:.4g} s ({measured / expected:.2f}×)"
    good = verdict(low <= measured <= high) if on_gpu else MEASURED
    return Row(f"{what}, step time", figure, good, f"the forecast's range: {low:.4g} to {high:.4g} s")


def forecasted(what: str, expected: float, measured: float, tolerance: float, note: str = "") -> Row:
    """Return a row that compares a forecast of memory, in bytes, with its measurement."""
    ratio = measured / expected
    figure = f"forecast {expected / GIB:.2f} GiB, measured {measured / GIB:.2f} GiB ({ratio:.3f}×)"
    return Row(what, figure, verdict(abs(ratio - 1) <= tolerance), note or f"within {tolerance:.0%}")


def check_checkpoint(setting: Setting) -> list[Row]:
    """How long an asynchronous save blocks the training; the second one finds its host memory already allocated."""
    changes = {"train.steps": 12, "checkpoint.every": 5, "checkpoint.keep": 1}
    saves = [
        event for event in setting.run(setting.recipe("saves", TENSORS_OF_300M, changes)) if event["event"] == "save"
    ]
    first, second, *_ = saves
    rate = second["bytes"] / second["blocked_s"]
    figure = f"{first['blocked_s']:.3g} s, then {second['blocked_s']:.3g} s, for {second['bytes'] / 1e9:.3g} GB"
    note = f"{rate / 1e9:.3g} GB/s; written and read back in {second['seconds']:.3g} s; at least 10 GB/s"
    return [
        Row("asynchronous checkpoint blocks for", figure, verdict(rate >= 10e9) if setting.on_gpu else MEASURED, note)
    ]


# ------------------------------------------------------------------------------------------------------------ failures


def check_repeated(setting: Setting) -> list[Row]:
    """Two runs, and one that was killed and resumed, are equal to the last bit."""
    steps, kill_at = (24, 7) if setting.tiny else (300, 60)
    changes = {"train.steps": steps, "train.deterministic": True, "checkpoint.every": steps // 8}
    recipe = setting.recipe("repeated", SMALL, changes)
    folders = {name: setting.folder / "runs" / f"repeated-{name}" for name in ("first", "second", "killed")}
    first, second = (setting.run(recipe, f"output_dir={folders[name]}") for name in ("first", "second"))
    process = setting.start("run", recipe, f"output_dir={folders['killed']}")
    try:
        wait_for(lambda: len(steps_of(events_of(folders["killed"]))) >= kill_at, setting.left())
    finally:
        process.kill()  # the command; its workers end with it
        process.communicate()
    wait_for(lambda: not processes_of(folders["killed"]), 30)
    resumed = setting.run(recipe, f"output_dir={folders['killed']}")
    from_step = max((event.get("step", 0) for event in resumed if event["event"] == "resume"), default=0)
    return [
        equal_events("two runs", first, second, f"{steps} steps"),
        equal_events(
            "a run after SIGKILL", first, resumed, f"killed after step {kill_at}, resumed from step {from_step}"
        ),
    ]


def equal_events(what: str, expected: list[dict[str, Any]], found: list[dict[str, Any]], note: str) -> Row:
    """Return a row on whether loss, gradient norm and samples of all steps of two runs are equal."""
    keys = ("step", "loss", "grad_norm", "samples")
    left, right = ([[event[key] for key in keys] for event in steps_of(events)] for events in (expected, found))
    different = [a[0] for a, b in zip(left, right, strict=False) if a != b]
    equal = not different and len(left) == len(right) > 0
    figure = "equal to the last bit" if equal else f"{len(different)} of {len(left)} steps differ"
    return Row(
        what, figure, verdict(equal), note if equal or not different else f"{note}; first at step {different[0]}"
    )


def check_out_of_memory(setting: Setting) -> list[Row]:
    """The error of a run that does not fit: it should name the forecast, and overrides that would fit."""
    if not setting.on_gpu:
        return [
            Row("out-of-memory message", "not run", MEASURED, "a CPU would swap, or the kernel would kill processes")
        ]
    rows = 8 * int(setting.machine["memory"] / 12 / 128256 / 4096 + 1)
    changes = {"data.seq_len": 4096, "train.loss": "plain"}
    changes |= {"train.global_batch_size": rows, "train.micro_batch_size": rows}
    code, output = setting.command("run", setting.recipe("too-large", SHAPES["1B"], changes))
    return [judged("out-of-memory message", code, output, OUT_OF_MEMORY, codes=(3, 5))]


OUT_OF_MEMORY = {  # what the error of such a run names
    "out of memory": r"(?i)out of memory|does not fit", "the forecast": r"forecast: \d",
    "an override that fits": r"would fit:\s+(train|fsdp|model)\.\w+=",
}  # fmt: skip


def judged(
    what: str, code: int, output: str, wanted: dict[str, str], codes: Collection[int] = (5,), after: str = ""
) -> Row:
    """Return a row on the error of a command; `wanted` has a pattern for everything that the message should name."""
    missing = [name for name, pattern in wanted.items() if not re.search(pattern, output)]
    figure = f"exit code {code}{after}; {f'does not name {listed(missing)}' if missing else 'names all'}"
    return Row(what, figure, verdict(code in codes and not missing), message_of(output))


def check_hang(setting: Setting) -> list[Row]:
    """The errors of runs that hang: a rank whose data never comes, and with several ranks one that was stopped."""
    rows = [hang_in_data(setting)]
    if setting.many < 2:
        return [*rows, Row("message of a stopped rank", "not run", "needs 2 GPUs")]
    return [*rows, hang_of_stopped(setting)]


def hang_recipe(setting: Setting, name: str, world: int) -> Path:
    """Write a recipe that does not end by itself, with a short `launch.timeout_s`."""
    changes = {
        "launch.nproc_per_node": world, "launch.timeout_s": 6 if setting.tiny else 15, "train.steps": 10**6,
        "train.global_batch_size": 2 * world, "train.compile": False,  # which may take longer than the timeout
    }  # fmt: skip
    return setting.recipe(name, SMALL, changes)


def hang_in_data(setting: Setting) -> Row:
    """Make the data of a rank never come, by a fault as the tests inject it; return a row on the message."""
    fault = {"where": "fsdptrain.data.corpus:batch_of", "do": "sleep", "call": 8, "how": {"seconds": 3600}}
    faults = {
        "FSDPTRAIN_FAULTS": json.dumps([fault]),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/faults"), os.environ.get("PYTHONPATH", "")]),
    }
    started = time.monotonic()
    code, output = setting.command("run", hang_recipe(setting, "hang-in-data", 1), **faults)
    wanted = {"where rank 0 is": r"rank 0 is in corpus\.batch"}
    after = f" after {time.monotonic() - started:.0f} s"
    return judged("message of a rank without data", code, output, wanted, after=after)


def hang_of_stopped(setting: Setting) -> Row:
    """Stop rank 1 by SIGSTOP in a run on all GPUs; return a row on the message."""
    recipe = hang_recipe(setting, "hang", setting.many)
    run = output_of(recipe)
    before = setting.log.stat().st_size
    process = setting.start("run", recipe)
    try:
        wait_for(lambda: len(steps_of(events_of(run))) >= 3, setting.left())
        next(each for each in processes_of(run) if each.name() == "rank 1").suspend()
        started = time.monotonic()
        output = process.communicate(timeout=setting.left())[0].decode(errors="replace")
        after = f" after {time.monotonic() - started:.0f} s"
    finally:
        process.kill()
    output += setting.log.read_bytes()[before:].decode(errors="replace")
    wanted = {
        "rank 1": r"rank 1 (does not respond|is |waits )",
        # On a GPU the other ranks are found at a wait for the device: only the recorder names the unit.
        "the collective with its unit": r"(wait for rank 1 in|rank 1 never entered) [\w-]+ #\d+ of \w+",
    }
    return judged("message of a stopped rank", process.returncode, output, wanted, after=after)


def message_of(output: str) -> str:
    """Return the beginning of fsdptrain's error message in the output of a command, in one line."""
    found = re.search(r"^fsdptrain: (?!.*^fsdptrain: ).*", output, re.MULTILINE | re.DOTALL)
    return " ".join((found[0] if found else output.strip()[-200:]).replace("|", "/").split())[:500]


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing happened within {seconds:.0f} s")
        time.sleep(0.05)


def processes_of(run: Path) -> list[psutil.Process]:
    """Return the processes whose command line contains a run folder."""
    return [each for each in psutil.process_iter(["cmdline"]) if str(run) in " ".join(each.info["cmdline"] or ())]


# -------------------------------------------------------------------------------------------------------- several GPUs


def check_strategies(setting: Setting) -> list[Row]:
    """The curve of every strategy on all GPUs is that of FULL_SHARD."""
    world, steps = setting.many, 3 if setting.tiny else 20
    names = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    variants = {name: [f"fsdp.strategy={name}"] for name in names}
    if world >= 4 and world % 2 == 0:
        for name in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2"):
            variants[name] = [f"fsdp.strategy={name}", f"fsdp.shard_size={world // 2}"]
    changes = {
        "train.steps": steps, "train.compile": False, "train.global_batch_size": 2 * world,
        "train.micro_batch_size": 1, "launch.nproc_per_node": world,
    }  # fmt: skip
    recipe = setting.recipe("strategies", SMALL, changes)
    found = setting.job("curves", world, recipe=str(recipe), variants=variants, tiny=setting.tiny)
    return compared_curves(found, steps)


def check_bandwidths(setting: Setting) -> list[Row]:
    """Bus bandwidths of the collectives against the forecast's figure for links within a node."""
    rows, rates = [], setting.job("bandwidths", setting.many, tiny=setting.tiny)
    if setting.on_gpu:
        setting.figures["intra_bw"] = f"{statistics.median(rates.values()):.3g}"
    for name, rate in rates.items():
        figure, known = f"{rate / 1e9:.3g} GB/s on {setting.many} ranks", setting.card
        if known is None:
            rows.append(Row(f"{name}, bus bandwidth", figure, MEASURED))
            continue
        ratio = rate / known.intra_bw
        note = f"{ratio:.2f}× intra_bw of {known.name}; within 20%"
        rows.append(Row(f"{name}, bus bandwidth", figure, verdict(abs(ratio - 1) <= 0.2), note))
    return rows


def check_tests(setting: Setting) -> list[Row]:
    """The tests marked `gpu`."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests"]
    environment = os.environ | {name: value for name, value in setting.environment().items() if name.startswith("CUDA")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=setting.left(), env=environment)
    setting.log.write_text(done.stdout + done.stderr)
    summary = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)\b", done.stdout)) or last_line(setting.log)
    passed = done.returncode == 0 and " passed" in summary
    return [Row("tests marked gpu", summary, verdict(passed) if setting.on_gpu else MEASURED)]
