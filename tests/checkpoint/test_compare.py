"""An export is opened in a fresh process and compared with the trained model; one that differs fails."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support import TINY
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdptrain.checkpoint import compare, reopen
from fsdptrain.checkpoint.compare import Comparison, FreshProcess, Sample, Way, differences
from fsdptrain.errors import CheckpointError, Stopped

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
    return Way(**{"folder": folder, "dtype": "float32", "memory": 0, "limit": compare.LIMITS["float32"]} | changes)


def test_a_fresh_process_computes_what_was_trained_or_the_export_fails(exports: tuple[Path, Sample]) -> None:
    root, sample = exports
    ways = {"merged": way("merged"), "separate": way("separate", adapter=True), "broken": way("broken", adapter=True)}
    job = {"rows": ROWS, "trust_remote_code": False, "exports": {name: way.job(root) for name, way in ways.items()}}
    answer = FreshProcess().run(job, lambda: None)
    assert not isinstance(answer, str)
    broken = ways.pop("broken")
    for found in differences(sample, ways, answer):
        assert found["largest"] < 1e-5 and found["tokens"] == 8 and found["spread"] > 0.1, found
    with pytest.raises(CheckpointError, match=r"the export \(broken\) does not compute what was trained: on 8 tokens"):
        differences(sample, {"broken": broken}, answer)
    answer["merged.1"][0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"the export \(merged\) does not compute"):
        differences(sample, ways, answer)
    [found] = differences(sample, {"broken": way("broken", adapter=True, limit=None)}, answer)
    assert found["mean"] > 1e-3


def test_an_export_that_cannot_be_opened_fails(
    exports: tuple[Path, Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(exports[0] / "merged", tmp_path / "merged")
    path = tmp_path / "merged" / "model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if "layers.2.mlp.up" not in n}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"not every weight was found: .*layers\.2\.mlp\.up_proj"):
        reopen.open_export(way("merged").job(tmp_path))
    # What the process prints last is the error of the run.
    script = "import sys; sys.stdin.read(); sys.exit('warning\\n\\nValueError: not every weight was found')"
    monkeypatch.setattr(compare, "child_command", lambda module: [sys.executable, "-c", script])
    with (
        Comparison(None, {"merged": way("merged")}, False, lambda *_: None, lambda: None) as comparison,
        pytest.raises(CheckpointError, match="cannot be opened in a fresh process: ValueError: not every weight was f"),
    ):
        comparison.check(tmp_path)


def test_a_stop_ends_the_other_process(exports: tuple[Path, Sample]) -> None:
    def stop() -> None:
        raise Stopped("stopped while exporting")

    with Comparison(exports[1], {"merged": way("merged")}, False, lambda *_: None, stop) as comparison:
        with pytest.raises(Stopped):
            comparison.check(exports[0])
        assert comparison._process and comparison._process._process.returncode == -9


def test_what_does_not_fit_or_takes_too_long_is_not_compared(
    exports: tuple[Path, Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = {"merged": way("merged", memory=10**15)}
    with Comparison(exports[1], huge, False, lambda *_: None, lambda: None) as comparison:
        comparison.check(exports[0])
        assert comparison.facts["not_compared"].startswith("opening it needs 909.5 TiB of host memory, of which ")
    monkeypatch.setattr(compare, "LONGEST_S", 0.0)
    with Comparison(exports[1], {"merged": way("merged")}, False, lambda *_: None, lambda: None) as comparison:
        comparison.check(exports[0])
    assert comparison.facts == {"not_compared": "opening it took more than 0:00"}
