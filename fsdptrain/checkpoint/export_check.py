"""Compare an export with the model that was trained, before it replaces an earlier one.

A fresh process opens the folder as its user does, with transformers and peft, and computes logits for a few rows on the
CPU (`main`): safetensors behind a record with their size. They are compared with those of the trained model. It starts
before the export is written, because importing transformers takes seconds.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from transformers import AutoConfig, BitsAndBytesConfig

from fsdptrain.checkpoint.shards import Tensors
from fsdptrain.config.optimizers import NF4_BYTES
from fsdptrain.errors import CheckpointError
from fsdptrain.model.config import own_classes
from fsdptrain.model.patches import import_quietly, torch_operators
from fsdptrain.model.skeleton import auto_class
from fsdptrain.model.weights import stored_names
from fsdptrain.plan.limits import available_memory
from fsdptrain.processes import Child, answer_parent, child_environment, records_of_parent, threads_for
from fsdptrain.run_folder.events import Progress
from fsdptrain.text import duration, size

ROWS, TOKENS = 2, 128  # at most: of the first sequences that are held out, the beginnings

# The largest mean difference of logits, as a part of their spread, by the coarser dtype of training and export.
# Rounding gives less: in models of three layers 1e-6 in float32 and 1e-2 in bfloat16, whose numbers have 8 bits. If it
# grows with the square root of the depth, 80 layers give 5e-2. A wrong export gives about 1; one whose adapter has no
# effect gives what the adapter changes. The rounding of the logits themselves is allowed as well: where they are far
# from zero (GPT-2's are near -100), it is the larger part.
LIMITS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 0.15}

LONGEST_S = 1800.0  # to open an export; then it is not compared

# In the last error of the other process: it failed because of this machine, not because of the export.
OF_THE_MACHINE = ("MemoryError", "can't allocate memory", "not enough memory", "ImportError", "ModuleNotFoundError")

WAY_OUT = (
    "The new export was removed; the checkpoint is not affected. To export without this check, run the same command "
    "with export.compare=false, or fsdptrain export with --no-compare"
)

POLL_S = 0.2  # between checks whether the process is done
QUANTISING_BYTES = 15  # a number of a weight that bitsandbytes quantises on a CPU: copies in float32, codes in int32
RESERVE = 2 * 2**30  # bytes of host memory besides the weights: libraries, logits, and what others need


@dataclass(frozen=True)
class Sample:
    """Rows of tokens, and the logits of the trained model for each: float32 [tokens, vocabulary], on rank 0."""

    rows: list[list[int]]
    logits: list[torch.Tensor]
    held_out: bool


@dataclass(frozen=True)
class Way:
    """One way to open an export: its folder inside the whole, the dtype, and the host memory that its weights take.

    `unquantised`, for an adapter: the layers that bitsandbytes leaves as they are; None: the base is not quantised.
    `rounded_to` is the coarser dtype of training and export, whose rounding may be the difference; None: any may be.
    """

    folder: str
    dtype: str
    memory: int
    rounded_to: str | None
    adapter: bool = False
    unquantised: list[str] | None = None

    def job(self, root: Path) -> dict[str, Any]:
        """Return the arguments of `open_model` or `open_adapter`, as JSON."""
        extra = {"unquantised": self.unquantised} if self.adapter else {}
        return {"folder": str(root / self.folder), "dtype": self.dtype, **extra}


def fresh_process() -> Child:
    """Start the process that opens an export, on the CPU: the GPUs are full. It has all cores, because ranks wait."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    own = {k: v for k, v in child_environment().items() if k not in ranks and not k.startswith("TORCHELASTIC_")}
    threads = str(threads_for(len(os.sched_getaffinity(0))))
    own |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads}
    return Child("fsdptrain.checkpoint.export_check", own, keep_errors=True)


def logits_from(child: Child, job: dict[str, Any], wait: Callable[[], None]) -> Tensors | str:
    """Return the logits of a job, or why there are none; `wait` is called until they are there, and may raise.

    Raises CheckpointError if transformers or peft cannot open the export.
    """
    with child:
        try:
            answer = child.ask(job, wait, LONGEST_S)
        except TimeoutError:
            return f"opening it took more than {duration(LONGEST_S)}"
        if answer is not None:
            return load(child.content(answer["bytes"]))
        if child.killed:
            return f"the process that opened it was {child.killed}"
        print(child.errors(), end="", file=sys.stderr, flush=True)
        cause = child.last_error() or f"exit code {child.code}"
    if any(word in cause for word in OF_THE_MACHINE):
        return f"a fresh process could not open it: {cause}"
    raise CheckpointError(f"it cannot be opened in a fresh process: {cause}. {WAY_OUT}")


@contextlib.contextmanager
def comparison(
    sample: Sample | None, ways: dict[str, Way], trust: bool, progress: Progress, wait: Callable[[], None]
) -> Iterator[Callable[[Path], dict[str, Any]]]:
    """Yield a function that compares a complete folder, and returns its part of the event `export`.

    It raises CheckpointError if the folder cannot be opened, or computes something else. Without `sample` the export is
    only opened, and without `ways` to do this not even that. `trust`: the model's own code may run. `wait` is called
    while the other process works; it may raise.
    """
    child, obstacle = None, ""
    needed, available = max((way.memory + RESERVE for way in ways.values()), default=0), available_memory()
    if needed > available:
        obstacle = f"opening it needs {size(needed)} of host memory, of which {size(available)} are available"
    elif ways:
        try:
            child = fresh_process()
        except OSError as error:
            obstacle = f"no process could be started: {error.strerror}"

    def check(root: Path) -> dict[str, Any]:
        answer: Tensors | str = obstacle
        if child:
            progress("comparing the export with the trained model" if sample else "opening the export", 0, 0)
            exports = {name: way.job(root) for name, way in ways.items()}
            job = {"rows": sample.rows if sample else [[0]], "trust_remote_code": trust, "exports": exports}
            answer = logits_from(child, job, wait)
        if isinstance(answer, str):
            return {"not_compared" if sample else "not_opened": answer} if answer else {}
        return {"compared": differences(sample, ways, answer)} if sample else {"opened": True}

    with child or contextlib.nullcontext():
        yield check


def differences(sample: Sample, ways: dict[str, Way], answer: Tensors) -> list[dict[str, Any]]:
    """Return, for each way to open an export, how far its logits are from those of the trained model.

    Raises CheckpointError if they are not finite, or farther than rounding explains.
    """
    found = []
    for name, way in ways.items():
        opened = torch.cat([answer[f"{name}.{number}"] for number in range(len(sample.rows))])
        trained = torch.cat(sample.logits)
        # What is common to all logits of a token changes no probability.
        centred = [logits - logits.mean(-1, keepdim=True) for logits in (opened, trained)]
        far, spread = (centred[0] - centred[1]).abs(), centred[1].abs()
        distance = {"largest": far.max().item(), "mean": far.mean().item(), "spread": spread.mean().item()}
        tokens, limit = sum(map(len, sample.rows)), None
        if way.rounded_to:
            rounding = torch.finfo(getattr(torch, way.rounded_to)).eps * trained.abs().mean().item()
            limit = LIMITS[way.rounded_to] * distance["spread"] + rounding
        if not math.isfinite(distance["mean"]) or (limit is not None and distance["mean"] > limit):
            raise CheckpointError(
                f"the export ({name}) does not compute what was trained: on {tokens} tokens its logits differ by "
                f"{distance['mean']:.3g} on average and {distance['largest']:.3g} at most"
                + (f", and rounding explains {limit:.3g} on average" if limit is not None else "")
                + f". {WAY_OUT}"
            )
        judged = {"limit": limit, "rounded_to": way.rounded_to}
        found.append({"what": name, "tokens": tokens, "held_out": sample.held_out, **distance, **judged})
    return found


def weights_memory(model: Any, dtype: str, quantised: Collection[str] = ()) -> int:
    """Return the bytes of a skeleton's weights in a dtype, with the layers `quantised` in NF4.

    Those need more while bitsandbytes quantises the largest of them, on a CPU all of it at once.
    """
    in_nf4, width = {f"{name}.weight" for name in quantised}, getattr(torch, dtype).itemsize
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    kept = sum(size * (NF4_BYTES if name in in_nf4 else width) for name, size in sizes.items())
    return round(kept + QUANTISING_BYTES * max((sizes[name] for name in in_nf4), default=0))


# --- in the fresh process --------------------------------------------------------------------------------------------


def open_model(folder: str, dtype: torch.dtype, **options: Any) -> Any:
    """Return a whole model. Raises ValueError if its files lack weights, or have some that nothing reads."""
    model, loading = _from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    loading["unexpected_keys"] = stored_names(model, loading["unexpected_keys"]).unknown
    if wrong := {kind: sorted(map(str, names)) for kind, names in loading.items() if names}:
        raise ValueError(f"not every weight was found: {wrong}")
    return model


def open_adapter(folder: str, dtype: torch.dtype, unquantised: list[str] | None, **options: Any) -> Any:
    """Return an adapter with the base that its configuration names.

    bitsandbytes quantises the base to NF4, except the layers `unquantised`; None: it is not quantised.
    """
    peft = import_quietly("peft")
    if unquantised is not None:
        import_quietly("bitsandbytes")
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=unquantised,
        )  # fmt: skip
        options["device_map"] = "cpu"
    config = peft.PeftConfig.from_pretrained(folder)
    base = _from_pretrained(config.base_model_name_or_path, revision=config.revision, dtype=dtype, **options)
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # bitsandbytes would compute in bfloat16 whatever the dtype
    return peft.PeftModel.from_pretrained(base, folder)


def _from_pretrained(name: str, revision: str | None = None, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return what transformers opens: a causal language model, or a whole vision-language model."""
    own = own_classes(name, revision, trust_remote_code, "model")
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": bool(own)}
    return auto_class(AutoConfig.from_pretrained(name, **where)).from_pretrained(name, **where, **options)


def main() -> None:
    """Send the logits of every export of the job, as NAME.ROW."""
    send = answer_parent()
    warnings.filterwarnings("error", message="Found missing adapter keys")  # peft would set them to first values
    torch_operators().start()
    job = next(records_of_parent())
    found: dict[str, torch.Tensor] = {}
    for name, export in job["exports"].items():
        opened = open_adapter if "unquantised" in export else open_model
        export["dtype"] = getattr(torch, export["dtype"])
        model = opened(**export, trust_remote_code=job["trust_remote_code"]).eval()
        for number, row in enumerate(job["rows"]):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0]
            found[f"{name}.{number}"] = logits.float()
    content = save(found)
    send({"bytes": len(content)}, content)
