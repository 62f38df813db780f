"""An export is opened in a fresh process and compared with the trained model; one that differs fails."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support import TINY
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdptrain import processes
from fsdptrain.checkpoint import export_check
from fsdptrain.checkpoint.export_check import Sample, Way, comparison, differences, fresh_process, logits_from
from fsdptrain.errors import CheckpointError, Stopped
from fsdptrain.plan.limits import available_memory

pytestmark = pytest.mark.usefixtures("forked_children")

# Of control groups: the files of the limit and of what is used, and the files' cache in memory.stat.
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = ("memory.max", "memory.current", "inactive_file")


ROWS = [[1, 2, 3, 4, 5], [9, 8, 7]]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sample]:
    """Write an adapter, the model it is merged into, and one of which a tensor is zero; and the logits of the first."""
    tmp = tmp_path_factory.mktemp("exports")
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    model.save_pretrained(tmp / "base")
    model.name_or_path = str(tmp / "base")
    adapted: Any = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp / "separate")
    with torch.no_grad():
        logits = [adapted(input_ids=torch.tensor([row])).logits[0] for row in ROWS]
    adapted.merge_and_unload().save_pretrained(tmp / "merged")
    shutil.copytree(tmp / "separate", tmp / "broken")
    path = tmp / "broken" / "adapter_model.safetensors"
    save_file({n: t.zero_() if ".layers.1." in n else t for n, t in load_file(path).items()}, path, {"format": "pt"})
    return tmp, Sample(ROWS, logits, held_out=True)


def way(folder: str, **changes: Any) -> Way:
    return Way(**{"folder": folder, "dtype": "float32", "memory": 0, "rounded_to": "float32"} | changes)


def compared(
    root: Path, sample: Sample | None = None, wait: Callable[[], None] = lambda: None, **changes: Any
) -> dict[str, Any]:
    """Return the fields of the event after the export `merged` was opened."""
    with comparison(sample, {"merged": way("merged", **changes)}, False, lambda *_: None, wait) as compare:
        return compare(root)


def test_a_fresh_process_computes_what_was_trained_or_the_export_fails(exports: tuple[Path, Sample]) -> None:
    root, sample = exports
    ways = {"merged": way("merged"), "separate": way("separate", adapter=True), "broken": way("broken", adapter=True)}
    job = {"rows": ROWS, "trust_remote_code": False, "exports": {name: way.job(root) for name, way in ways.items()}}
    answer = logits_from(fresh_process(), job, lambda: None)
    assert not isinstance(answer, str)
    broken = ways.pop("broken")
    for found in differences(sample, ways, answer):
        assert found["largest"] < 1e-5 and found["tokens"] == 8 and found["spread"] > 0.1, found
    with pytest.raises(CheckpointError, match=r"the export \(broken\) does not compute what was trained: on 8 tokens"):
        differences(sample, {"broken": broken}, answer)
    answer["merged.1"][0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"the export \(merged\) does not compute"):
        differences(sample, ways, answer)
    unlimited = {"broken": way("broken", adapter=True, rounded_to=None)}
    [found] = differences(sample, unlimited, answer)
    assert found["mean"] > 1e-3 and found["limit"] is None
    answer["broken.1"][0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"by nan on average and nan at most\. The new export was removed"):
        differences(sample, unlimited, answer)


def test_an_offset_of_all_logits_of_a_token_and_the_rounding_of_large_logits_are_no_difference() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 100) - 110  # as GPT-2's
    sample, ways = Sample([[1, 2, 3, 4, 5]], [logits], held_out=True), {"model": way(".", rounded_to="bfloat16")}
    [found] = differences(sample, ways, {"model.0": (logits - 0.3).bfloat16().float()})
    assert found["mean"] < found["limit"] < 1
    with pytest.raises(CheckpointError, match="does not compute what was trained"):
        differences(sample, ways, {"model.0": logits.roll(1, dims=1)})


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used", "cache"),
    [
        ("0::/job", "job", *VERSION_2),
        ("0::/job/step", "job", *VERSION_2),
        ("7:cpuset,memory:/slurm", "memory/slurm", *VERSION_1),
        ("7:cpuset,memory:/slurm", "memory", *VERSION_1),
    ],
)
def test_the_memory_limit_of_a_job_or_a_container_counts(
    tmp_path: Path, line: str, folder: str, limit: str, used: str, cache: str
) -> None:
    group = tmp_path / "sys/fs/cgroup" / folder
    (tmp_path / "proc/self").mkdir(parents=True)
    group.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert available_memory(tmp_path) == 8000 * 1024
    (tmp_path / "proc/self/cgroup").write_text(f"1:cpu:/other\n{line}\n")
    assert available_memory(tmp_path) == 8000 * 1024
    for name, text in ((limit, "5000"), (used, "3000"), ("memory.stat", f"anon 2\n{cache} 400")):
        (group / name).write_text(text)
    assert available_memory(tmp_path) == 2400


def test_an_export_that_cannot_be_opened_fails(
    exports: tuple[Path, Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(exports[0] / "merged", tmp_path / "merged")
    path = tmp_path / "merged" / "model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if "layers.2.mlp.up" not in n}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"not every weight was found: .*layers\.2\.mlp\.up_proj"):
        export_check.open_model(str(tmp_path / "merged"), torch.float32)
    # What the process prints last is the error of the run, unless it is one of this machine.
    script = "import sys; sys.stdin.readline(); sys.exit('warning\\n\\nValueError: not every weight was found')"
    monkeypatch.setattr(processes, "child_command", lambda module: [sys.executable, "-c", script])
    with pytest.raises(CheckpointError, match="cannot be opened in a fresh process: ValueError: not every weight was"):
        compared(tmp_path)
    script = "import sys; sys.stdin.readline(); sys.exit('RuntimeError: DefaultCPUAllocator: not enough memory')"
    assert "not enough memory" in compared(tmp_path)["not_opened"]


def test_a_stop_ends_the_other_process(exports: tuple[Path, Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise Stopped("stopped while exporting")

    started, children = export_check.fresh_process, []
    monkeypatch.setattr(export_check, "fresh_process", lambda: children.append(started()) or children[-1])
    with pytest.raises(Stopped):
        compared(exports[0], exports[1], wait=stop)
    assert children[0].code == -9


def test_what_does_not_fit_or_takes_too_long_is_not_compared(
    exports: tuple[Path, Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, sample = exports
    why = compared(root, sample, memory=10**15)["not_compared"]
    assert why.startswith("opening it needs 909.5 TiB of host memory, of which ")
    monkeypatch.setattr(export_check, "LONGEST_S", 0.0)
    assert compared(root, sample) == {"not_compared": "opening it took more than 0:00"}
