"""Sharded weights → a Hugging Face folder, one block at a time, so that no process holds the whole model.

The weights come from a live model (every rank gathers, rank 0 writes) or from a checkpoint on disk (one process); the
rest is the same. The folder is written under another name, read back, checked, and then renamed.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import str_to_torch_dtype
from transformers.pytorch_utils import Conv1D

from fsdptrain.attempts.manifest import (
    BASE_KEY,
    checkpoint_problems,
    file_sums,
    read_manifest,
    reject_external_symlinks,
    resume_problems,
)
from fsdptrain.checkpoint.adapter import collected, merged_tensors, trained_groups, write_adapter
from fsdptrain.checkpoint.compare import POLL_S, Comparison, Sample, Way, coarser, weights_memory
from fsdptrain.checkpoint.disk import report_full_disk
from fsdptrain.checkpoint.load import StoredCheckpoint
from fsdptrain.checkpoint.save import Checkpointer
from fsdptrain.checkpoint.shards import Tensors
from fsdptrain.checkpoint.verify import CONFIG, INDEX, WEIGHTS
from fsdptrain.config.adapter import ADAPTER_FOLDER
from fsdptrain.data.hub import file_checksums, files_digest, safetensors_files, stamps_of
from fsdptrain.errors import CheckpointError, FsdptrainError, RecipeError, StorageError, first_line
from fsdptrain.folder.events import Progress, Reporter, progress_record
from fsdptrain.folder.files import fsync, openable
from fsdptrain.folder.ownership import (
    Stamps,
    asset_names,
    copy_assets,
    file_stamps,
    make_scratch,
    output_lock,
    read_export_record,
    remove_scratch,
    replace_export,
    write_export_record,
)
from fsdptrain.folder.rundir import RunDir
from fsdptrain.folder.storage import MANIFEST_NAME, Location
from fsdptrain.model.adapter import freeze, layers_in_nf4
from fsdptrain.model.assets import special_token_conflicts
from fsdptrain.model.nf4 import round_trip
from fsdptrain.model.skeleton import skeleton, skeleton_in_dtype
from fsdptrain.model.units import blocks_of, saved_state, trained_state
from fsdptrain.model.weights import read_groups
from fsdptrain.plan.plan import Plan, open_plan, varied
from fsdptrain.terminal.screen import Screen

MAX_FILE_BYTES = 5 * 10**9
DTYPE_NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}  # in safetensors files: BF16, …


def names_by_block(model: PreTrainedModel) -> list[list[str]]:
    """Return the names of the model's state in groups that are exported together: each block, and each other tensor."""
    blocks = [f"{name}." for name, _ in blocks_of(model)]
    groups: dict[str, list[str]] = {}
    for name in saved_state(model):
        groups.setdefault(next((block for block in blocks if name.startswith(block)), name), []).append(name)
    return list(groups.values())


def gathered_tensors(
    model: nn.Module, groups: list[list[str]], writes: bool, between_groups: Callable[[], None]
) -> Iterator[Tensors]:
    """Yield the state of a live sharded model on the CPU, group by group; collective. Empty when `writes` is False."""
    tensors = saved_state(model)
    for group in groups:
        between_groups()
        tensors_on_cpu = {}
        for name in group:
            tensor = tensors[name].detach()
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if writes:
                tensors_on_cpu[name] = whole.cpu()
        yield tensors_on_cpu


def stored_tensors(
    checkpoint: StoredCheckpoint, unsharded: PreTrainedModel, groups: list[list[str]]
) -> Iterator[Tensors]:
    """Yield the state in a checkpoint, group by group; raises CheckpointError when it is not that of `unsharded`."""
    tensors = trained_state(unsharded)
    for group in groups:
        yield {name: checkpoint.whole(f"model.{name}", tensors[name]) for name in group}


class SafetensorsWriter:
    """Writes tensors into safetensors files of at most 5 GB, each at once to its place: it keeps none in memory."""

    def __init__(self, folder: Path, expected: Tensors) -> None:
        """Write the headers of the files. `expected` are the tensors to come, on the meta device, by name in a file."""
        self._wanted = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in expected.items()}
        self._missing = set(expected)
        self._places: dict[str, tuple[Path, int]] = {}
        files = _in_files(expected)
        numbered = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
        self._paths = [folder / name for name in (numbered if len(files) > 1 else [WEIGHTS])]
        for path, tensors in zip(self._paths, files, strict=True):
            self._places |= {name: (path, place) for name, place in _write_header(path, tensors).items()}
        self.bytes = sum(tensor.nbytes for tensor in expected.values())
        if len(files) > 1:
            weight_map = {name: self._places[name][0].name for name in sorted(expected)}
            index = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def add(self, tensors: Tensors) -> None:
        """Write tensors, under their names in the file. Raises CheckpointError if one is not as expected."""
        for name, tensor in tensors.items():
            found, wanted = (tuple(tensor.shape), tensor.dtype), self._wanted.get(name)
            if found != wanted:
                raise CheckpointError(f"{name}: expected {wanted}, found {found}")
            path, place = self._places[name]
            with path.open("r+b") as file:
                file.seek(place)
                file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            self._missing.discard(name)

    def finish(self) -> None:
        """Wait for the disk. Raises CheckpointError if a tensor was not added."""
        if self._missing:
            raise CheckpointError(f"{len(self._missing)} tensors are missing: {min(self._missing)}")
        for path in self._paths:
            fsync(path)


def _in_files(tensors: Tensors) -> list[Tensors]:
    """Return the same tensors for each file, in their order."""
    files: list[Tensors] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > MAX_FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    return files


def _write_header(path: Path, tensors: Tensors) -> dict[str, int]:
    """Write the beginning of a safetensors file; return where the bytes of each tensor belong.

    The format: https://huggingface.co/docs/safetensors. As in files of its library, wide numbers are first, so that all
    are aligned.
    """
    begins, end = {}, 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        tensor, begins[name] = tensors[name], end
        end += tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return {name: 8 + len(text) + begin for name, begin in begins.items()}


@dataclass(frozen=True)
class ExportResult:
    """What was written: bytes of weights, the files, and the folder with older files that were moved away, if any."""

    bytes: int
    files: Stamps
    kept: Path | None


def write_folder(
    unsharded: PreTrainedModel,
    groups: list[list[str]],
    tensors: Iterator[Tensors],
    assets: Path,
    out: Path,
    dtype: str,
    progress: Progress,
    written: Stamps | None = None,
    beside: Callable[[Path], int] = lambda scratch: 0,
) -> ExportResult:
    """Write a complete Hugging Face folder to `out` and check it.

    `unsharded` is a skeleton of the same architecture, `assets` the folder with config and tokenizer. `written` are the
    files of an earlier export at `out`, which are replaced; others stay. `beside` writes more into the folder, when all
    tensors are written, and returns its bytes. Raises CheckpointError for a full disk, or when the files read back are
    not what should be in them.
    """
    wanted = skeleton_in_dtype(unsharded, dtype)
    state = saved_state(wanted)

    def fill(scratch: Path) -> int:
        # Configurations and tokenizer first: a folder that transformers cannot open fails before the weights.
        copy_assets(assets, scratch, asset_names(assets))
        config = AutoConfig.from_pretrained(scratch, trust_remote_code=False)
        config.dtype = getattr(torch, dtype)
        config.save_pretrained(scratch)
        # One group at a time is cast, converted to the layout of files, and written.
        writer = SafetensorsWriter(scratch, tensors_in_files(wanted))
        for done, group in enumerate(tensors, 1):
            cast = {name: tensor.to(state[name].dtype) for name, tensor in group.items()}
            writer.add(revert_weight_conversion(unsharded, cast))
            progress("export", done, len(groups))
        writer.finish()
        # Only a folder that reads back as intended replaces an earlier export.
        check_export(scratch, wanted)
        return writer.bytes + beside(scratch)

    return publish(fill, out, sum(tensor.nbytes for tensor in state.values()), written)


def publish(fill: Callable[[Path], int], out: Path, needed: int, written: Stamps | None = None) -> ExportResult:
    """Let `fill` write a folder, return its bytes and check it; then rename it to `out`.

    `needed` are the bytes on the disk. The caller holds the `output_lock` of `out`. Raises CheckpointError as
    `write_folder` does; then, and after a signal, `out` is as it was.
    """
    scratch = make_scratch(out)
    try:
        with report_full_disk(scratch, needed):
            count = fill(scratch)
        files = file_stamps(scratch)
        kept = replace_export(scratch, out, written or {})
    except BaseException as error:  # safetensors and transformers raise classes of their own
        with contextlib.suppress(OSError):
            remove_scratch(scratch)
        if not isinstance(error, Exception) or (
            isinstance(error, FsdptrainError) and not isinstance(error, CheckpointError)
        ):
            raise
        raise CheckpointError(f"cannot write {out}: {error}") from error
    fsync(out.parent)
    return ExportResult(count, files, kept)


def tensors_in_files(model: PreTrainedModel) -> Tensors:
    """Return the state of a skeleton as the files of an export have it, on the meta device: name → tensor."""
    state = {name: tensor.to("meta") for name, tensor in saved_state(model).items()}
    expected: Tensors = revert_weight_conversion(model, state)
    return expected


def check_export(folder: Path, wanted: PreTrainedModel) -> None:
    """Raise CheckpointError unless the folder holds exactly the tensors of this skeleton, in the layout of files.

    Its configurations and its tokenizer must agree on the special tokens.
    """
    expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors_in_files(wanted).items()}
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                shape = tuple(opened.get_slice(name).get_shape())
                piece = opened.get_slice(name)[:0] if shape else opened.get_tensor(name)
                found[name] = (shape, piece.dtype)
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{folder}: {len(wrong)} tensors are missing, unexpected or different; {name}: "
            f"expected {expected.get(name)}, found {found.get(name)}"
        )
    if disagreements := special_token_conflicts(folder):  # which also opens config, generation config and tokenizer
        raise CheckpointError(f"{folder}: {'; '.join(disagreements)}")


class Exported:
    """What a run exports: the model, its adapter, or both; written from the tensors that were trained."""

    def __init__(self, unsharded: PreTrainedModel, plan: Plan, assets: Path, dtype: str | None = None) -> None:
        """`unsharded` is a skeleton without adapters, `assets` the run's folder with config and tokenizer.

        `dtype` is that of the exported model, by default `export.dtype`.
        """
        self.unsharded, self.plan, self.assets = unsharded, plan, assets
        self.adapter = plan.recipe.export.adapter if plan.recipe.adapter.kind else None
        separate = self.adapter == "separate"
        self.dtype = plan.recipe.model.dtype if separate else dtype or plan.recipe.export.dtype
        self.groups = names_by_block(unsharded)
        self.trained: Any = freeze(copy.deepcopy(unsharded), plan.recipe) if plan.freezes else unsharded
        self.trained_groups = trained_groups(self.trained, self.groups)

    def write(
        self,
        tensors: Iterator[Tensors],
        out: Path,
        progress: Progress,
        written: Stamps | None = None,
        check: Callable[[Path], None] = lambda folder: None,
        check_base: Callable[[], None] = lambda: None,
    ) -> ExportResult:
        """Write and check the folder `out` from the tensors of `trained_groups`; see `write_folder`.

        `check` is called with the complete folder, before it replaces an earlier one, and `check_base` before and after
        the frozen weights are read from their files; both may raise.
        """
        recipe = self.plan.recipe
        if self.adapter == "separate":

            def fill(scratch: Path) -> int:
                adapter = collected(tensors, self.groups, progress)
                count = write_adapter(scratch, self.trained, adapter, recipe, self.assets)
                check(scratch)
                return count

            needed = sum(param.nbytes for param in self.trained.parameters() if param.requires_grad)
            return publish(fill, out, needed, written)
        adapter: Tensors = {}

        def beside(scratch: Path) -> int:
            count = 0
            if self.adapter == "both":
                count = write_adapter(scratch / ADAPTER_FOLDER, self.trained, adapter, recipe, self.assets)
            check(scratch)
            return count

        if self.plan.freezes:
            base = checked(read_groups(self.unsharded, self.plan, self.groups), check_base)
            if recipe.export.merge_base == "dequantized":
                base = self._dequantized(base)
            tensors = merged_tensors(self.trained, base, tensors, adapter if self.adapter == "both" else None)
        return write_folder(
            self.unsharded, self.groups, tensors, self.assets, out, self.dtype, progress, written, beside
        )

    def _dequantized(self, groups: Iterator[Tensors]) -> Iterator[Tensors]:
        """Yield the same groups, with the weights that were quantised for training as the model computed with them."""
        compute = getattr(torch, self.plan.recipe.fsdp.mixed_precision.param_dtype)
        layers = self._quantised_layers()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # it quantises a hundred times as fast
        for group in groups:
            for name, weight in group.items():
                if layer := layers.get(name.removesuffix(".weight")):
                    group[name] = round_trip(weight.to(device), layer, compute).to(weight)
            yield group

    def _quantised_layers(self) -> dict[str, nn.Module]:
        """Return the layers that are quantised for training: name → layer."""
        recipe = self.plan.recipe
        # What transformers keeps in float32, and is not quantised, depends on the compute dtype.
        compute = recipe.fsdp.mixed_precision.param_dtype
        return layers_in_nf4(skeleton_in_dtype(self.unsharded, recipe.model.dtype, compute), recipe)

    @property
    def runs_own_code(self) -> bool:
        """Whether opening the export runs code of the model, which its assets then have and the user has allowed."""
        return self.plan.trust_remote_code and any(self.assets.glob("*.py"))

    def ways(self) -> dict[str, Way]:
        """Return how the folder that `write` makes is opened: `model`, `merged`, `separate` → way."""
        recipe, found = self.plan.recipe, {}
        compute, quantised = recipe.fsdp.mixed_precision.param_dtype, self._quantised_layers()
        if self.adapter != "separate":
            # Merged into the original weights, an adapter of QLoRA computes something else than what was trained.
            differs = quantised and recipe.export.merge_base == "original"
            memory = weights_memory(self.unsharded, self.dtype)
            name = "merged" if self.adapter else "model"
            found[name] = Way(".", self.dtype, memory, None if differs else coarser(compute, self.dtype))
        if self.adapter in ("separate", "both"):
            layers = [n for n, layer in self.unsharded.named_modules() if isinstance(layer, (nn.Linear, Conv1D))]
            found["separate"] = Way(
                "." if self.adapter == "separate" else ADAPTER_FOLDER,
                compute,
                weights_memory(self.unsharded, compute, quantised),
                compute,
                adapter=True,
                unquantised=[name for name in layers if name not in quantised] if quantised else None,
            )
        return found


def export_live(
    model: nn.Module,
    unsharded: PreTrainedModel,
    rundir: RunDir,
    plan: Plan,
    checkpointer: Checkpointer,
    reporter: Reporter,
    step: int,
    between_groups: Callable[[], None] = lambda: None,
    sample: Sample | None = None,
    stamps: list[tuple[str, int, int]] | None = None,
) -> None:
    """Export a live model after `step` steps; collective. Raises CheckpointError on every rank when rank 0 fails.

    `between_groups` is called on every rank before each group of tensors, and while a fresh process opens the export
    and compares it with `sample`; it may raise, if it does so on all ranks. Without `sample` nothing is compared.
    `stamps` are the `stamps_of` the frozen weights when the run began.
    """
    what = Exported(unsharded, plan, rundir.model)
    world = checkpointer.world
    writes = world.rank == 0

    def wait() -> None:
        world.gather_objects(True)
        between_groups()
        time.sleep(POLL_S)

    def check_base() -> None:
        check_unchanged(plan, stamps, checkpointer.identity)

    tensors = gathered_tensors(model, what.trained_groups, writes, between_groups)
    failure: Exception | None = None
    if writes:
        ways = what.ways() if sample else {}
        with Comparison(sample, ways, what.runs_own_code, reporter.progress, wait) as comparison:
            try:
                with output_lock(rundir.export):
                    facts = _write_and_record(
                        rundir, step, what, tensors, reporter.progress, comparison, wait, check_base
                    )
                reporter.event("export", **facts)
            except (CheckpointError, RecipeError) as error:
                failure = error
    for _ in tensors:  # gathering is collective: complete it even after a failure
        pass
    while any(world.gather_objects(False)):  # rank 0 waits for the other process
        between_groups()
    checkpointer.raise_on_every_rank(failure)


def export_checkpoint(
    rundir: RunDir,
    step: int | None,
    out: Path,
    dtype: str | None,
    screen: Screen,
    adapter: str | None = None,
    merge_base: str | None = None,
    compare: bool = True,
) -> None:
    """Export from a checkpoint of a run folder in one process; from the newest valid one when `step` is None.

    `adapter` and `merge_base` replace those keys of the recipe's section `export`. With `compare` a fresh process opens
    the folder, unless the recipe says otherwise. Raises RecipeError if an option has
    no effect, or the checkpoint's adapter would be merged into other frozen weights than it was trained with.
    """
    reject_external_symlinks(rundir)
    plan = with_options(open_plan(rundir.plan), adapter, merge_base)
    folder = _choose_checkpoint(rundir, plan, step, screen.say)
    with _removal_reported(folder, plan):
        facts = _write_checkpoint(rundir, plan, folder, out, dtype, screen, compare and plan.recipe.export.compare)
    screen.show({"event": "export", **facts})
    screen.summary(0.0)


def _write_checkpoint(
    rundir: RunDir, plan: Plan, folder: Path, out: Path, dtype: str | None, screen: Screen, compare: bool
) -> dict[str, Any]:
    """Write a verified checkpoint to `out`; return the fields of the `export` event."""
    manifest = read_manifest(folder)
    what = Exported(_build_skeleton(rundir, plan), plan, rundir.model, dtype)
    if dtype is not None and what.adapter == "separate":
        raise RecipeError(
            "--dtype has no effect: export.adapter: separate saves the adapter in model.dtype; add --adapter merged"
        )
    if plan.freezes and what.adapter != "separate":  # which reads nothing of the frozen weights
        check_frozen_files(plan, manifest.identity)

    def progress(stage: str, done: int, total: int) -> None:
        screen.show(progress_record(stage, done, total))

    # There is no trained model to compare with: the folder is only opened. The base of a separate adapter may be on
    # another machine.
    ways = {name: way for name, way in what.ways().items() if compare and not way.adapter}
    wait = partial(time.sleep, POLL_S)
    with (
        StoredCheckpoint(folder) as checkpoint,
        Comparison(None, ways, what.runs_own_code, progress, wait) as comparison,
    ):
        tensors = stored_tensors(checkpoint, what.trained, what.trained_groups)
        if out == rundir.export:
            return _write_and_record(rundir, manifest.step, what, tensors, progress, comparison, wait)
        done = what.write(tensors, out, progress, check=comparison.check)
        return _facts(what, out, done) | comparison.facts


@contextlib.contextmanager
def _removal_reported(folder: Location, plan: Plan) -> Iterator[None]:
    """Raise what `_reject_removed` raises instead of an error that the removal of a checkpoint causes in the block."""
    try:
        yield
    except (CheckpointError, OSError):
        _reject_removed(folder, plan)
        raise


def _reject_removed(folder: Location, plan: Plan) -> None:
    """Raise CheckpointError if a checkpoint that was there is gone."""
    try:
        (folder / MANIFEST_NAME).lstat()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} was removed while it was read (a run keeps checkpoint.keep: {plan.recipe.checkpoint.keep}): "
            "run the command again for a newer one"
        ) from None


def with_options(plan: Plan, adapter: str | None, merge_base: str | None) -> Plan:
    """Return the plan with `export.adapter` and `export.merge_base` from the command line; None keeps the recipe's.

    Raises RecipeError if one of them has no effect on this run.
    """
    kind = plan.recipe.adapter.kind
    if adapter and not kind:
        raise RecipeError("--adapter has no effect: the run has no adapter (adapter.kind)")
    plan = varied(plan, {"export.adapter": adapter}) if adapter else plan
    if merge_base and kind != "qlora":
        raise RecipeError("--merge-base has no effect: only a run with adapter.kind: qlora has quantised weights")
    if merge_base and plan.recipe.export.adapter == "separate":
        raise RecipeError("--merge-base has no effect on a separate adapter: add --adapter merged, or both")
    return varied(plan, {"export.merge_base": merge_base}) if merge_base else plan


def check_frozen_files(plan: Plan, identity: dict[str, Any]) -> None:
    """Raise RecipeError unless the files of the pretrained model are those that a checkpoint was trained on."""
    found = files_digest(file_checksums(safetensors_files(plan)))
    if problems := resume_problems(identity, identity | {BASE_KEY: found}):
        raise RecipeError(problems)


def check_unchanged(plan: Plan, stamps: list[tuple[str, int, int]] | None, identity: dict[str, Any]) -> None:
    """Raise RecipeError if the files of the frozen weights were replaced by other ones since their `stamps`."""
    if stamps is None or stamps_of([path for path, *_ in stamps]) == stamps:
        return
    try:
        check_frozen_files(plan, identity)
    except RecipeError:
        alone = f", or save the adapter alone: fsdptrain export {shlex.quote(plan.run_dir)} --adapter separate"
        alone = alone if plan.recipe.adapter.kind else ""
        raise RecipeError(
            f"model.id: the files of {plan.recipe.model.id} changed during the run, and what was trained belongs "
            f"to the former ones: put these back and run it again{alone}"
        ) from None


def checked(groups: Iterator[Tensors], check: Callable[[], None]) -> Iterator[Tensors]:
    """Yield the same groups, with a `check` before the first and after the last one."""
    check()
    yield from groups
    check()


def _write_and_record(
    rundir: RunDir,
    step: int,
    what: Exported,
    tensors: Iterator[Tensors],
    progress: Progress,
    comparison: Comparison,
    wait: Callable[[], None],
    check_base: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write the export of a run folder, replacing an earlier one; return the fields of the `export` event.

    `wait` is called while checksums are computed.
    """
    before = read_export_record(rundir).files
    sums: dict[str, str] = {}

    def check(folder: Path) -> None:
        progress("computing the checksums of the export", 0, 0)
        sums.update(file_sums(folder, file_stamps(folder), wait))
        comparison.check(folder)

    done = what.write(tensors, rundir.export, progress, before, check, check_base)
    write_export_record(rundir, step, done.files, sums)
    return {"step": step, **_facts(what, rundir.export, done), **comparison.facts}


def _facts(what: Exported, out: Path, done: ExportResult) -> dict[str, Any]:
    """Return what was written, and where, for the event `export`."""
    facts = {"path": str(out), "bytes": done.bytes, "dtype": what.dtype}
    facts |= {"adapter": what.adapter} if what.adapter else {}
    return facts | ({"kept": str(done.kept)} if done.kept else {})


def _build_skeleton(rundir: RunDir, plan: Plan) -> PreTrainedModel:
    """Build the unsharded model that a run folder describes; raises CheckpointError when that fails."""
    try:
        model = replace(plan.recipe.model, attn_implementation="eager")  # nothing is computed, and there may be no GPU
        openable(rundir.model / CONFIG)  # transformers calls a configuration missing that it cannot open
        return skeleton(AutoConfig.from_pretrained(rundir.model, trust_remote_code=False), model)
    except (RecipeError, StorageError):
        raise
    except Exception as error:  # a model's constructor may raise anything over its config
        raise CheckpointError(f"{rundir.model} does not describe a model: {first_line(error)}") from None


def _choose_checkpoint(rundir: RunDir, plan: Plan, step: int | None, say: Callable[[str], None]) -> Path:
    """Return the verified checkpoint of `step`, or the newest valid one; raises CheckpointError without one."""
    steps = rundir.checkpoint_steps()
    if step is not None and step not in steps:
        raise CheckpointError(f"{rundir.storage} has no checkpoint of step {step}; steps: {steps}")
    for candidate in [step] if step is not None else reversed(steps):
        folder: Path = rundir.checkpoint(candidate)
        problems = checkpoint_problems(folder)
        if not problems:
            return folder
        _reject_removed(folder, plan)
        say(f"{folder.name} is not valid: {problems[0]}")
    raise CheckpointError(f"no valid checkpoint in {rundir.storage}")
