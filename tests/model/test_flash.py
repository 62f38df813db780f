"""FlashAttention 3 and 4 are used if they compute a model's attention: with registrations that stand in for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_attention import SIZES
from test_varlen import MODELS
from torch.nn import attention as of_torch
from transformers import AutoConfig

from fsdptrain.config.schema import Model
from fsdptrain.model import attention, varlen
from fsdptrain.model.attention import activate_best_flash, heads_of, installed_flash
from fsdptrain.model.skeleton import skeleton
from fsdptrain.train import setup

CPU = torch.device("cpu")
MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}  # what torch 2.13 imports


def in_varlen(kind: str) -> Any:
    config = AutoConfig.for_model(kind, **SIZES | MODELS[kind])
    return skeleton(config, Model(attn_implementation=varlen.NAME))


def test_the_heads_are_those_of_the_model_s_own_forward() -> None:
    assert heads_of(in_varlen("llama")) == {(4, 2, 16, 16, False)}
    assert heads_of(in_varlen("gemma3_text")) == {(4, 2, 16, 16, False), (4, 2, 16, 16, True)}
    assert heads_of(in_varlen("deepseek_v3")) == {(4, 4, 48, 32, False)}


class Registered:
    """A stand-in that computes in bf16 what `computes` makes of the result, until it is removed."""

    def __init__(self, computes: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.original = varlen.varlen_attn

        def varlen_attn(q: torch.Tensor, *args: Any, **options: Any) -> Any:
            out: Any = self.original(q, *args, **options)
            return computes(out) if q.dtype == torch.bfloat16 else out

        varlen.varlen_attn = varlen_attn

    def remove(self) -> None:
        varlen.varlen_attn = self.original


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for packages, and registrations that are as they were afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = sys.modules["torch.nn.attention._registry"]
    monkeypatch.setattr(registry, "_FLASH_ATTENTION_IMPLS", dict(registry._FLASH_ATTENTION_IMPLS))  # type: ignore[attr-defined]
    yield tmp_path
    if of_torch.current_flash_attention_impl():
        of_torch.restore_flash_attention_impl()
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]


def install(folder: Path, *names: str) -> None:
    """Write modules that have no kernels. What contains FlashAttention 4 cannot be imported."""
    for name in names:
        module = folder / Path(*MODULES[name].split(".")).with_suffix(".py")
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text("")
        info = folder / f"{attention.PACKAGES[name].replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {attention.PACKAGES[name]}\nVersion: 1.0\n")
    if "FA4" in names:
        (folder / "flash_attn" / "__init__.py").write_text("raise OSError('another CUDA')")


def test_only_what_is_installed_for_the_card_is_tried(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed_flash(9) == installed_flash(10) == []
    assert activate_best_flash(None, CPU, 8) is None
    for major, package in ((9, "flash-attn-3"), (10, "flash-attn-4")):
        assert f"pip install {package}" in str(activate_best_flash(None, CPU, major))
    install(packages, "FA3", "FA4")
    assert [installed_flash(major) for major in (8, 9, 10, 12)] == [[], ["FA3", "FA4"], ["FA4"], []]
    assert "flash_attn" not in sys.modules
    monkeypatch.delattr(of_torch, "activate_flash_attention_impl")  # an older torch
    assert installed_flash(9) == []


def test_without_kernels_flash_attention_2_is_used(packages: Path) -> None:
    """The registrations are torch's own."""
    install(packages, "FA3", "FA4")
    note = str(activate_best_flash(in_varlen("llama"), CPU, 9))
    assert "FlashAttention 3 is installed but not used: " in note and "does not expose FA3" in note
    assert "FlashAttention 4 is installed but not used: " in note and "another CUDA" in note
    assert note.endswith("attention is computed by FlashAttention 2")
    assert of_torch.current_flash_attention_impl() is None


def wrong_gradient(out: torch.Tensor) -> torch.Tensor:
    return 1.1 * out - 0.1 * out.detach()


def test_the_first_that_is_right_is_used(packages: Path) -> None:
    install(packages, "FA3", "FA4")
    bare, original = in_varlen("deepseek_v3"), varlen.varlen_attn
    of_torch.register_flash_attention_impl("FA3", register_fn=lambda: Registered(wrong_gradient))
    of_torch.register_flash_attention_impl("FA4", register_fn=lambda: Registered(lambda out: out * 1))
    note = str(activate_best_flash(bare, CPU, 9))
    assert "FlashAttention 3 is installed but not used: " in note and "its dq has an error of 10" in note
    assert note.endswith("attention is computed by FlashAttention 4")
    assert of_torch.current_flash_attention_impl() == "FA4"
    of_torch.register_flash_attention_impl("FA3", register_fn=lambda: Registered(lambda out: out * 1))
    assert activate_best_flash(bare, CPU, 9) == "attention is computed by FlashAttention 3"
    of_torch.restore_flash_attention_impl()
    assert varlen.varlen_attn is original


def test_all_ranks_use_the_same(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(packages, "FA3")
    of_torch.register_flash_attention_impl("FA3", register_fn=lambda: Registered(lambda out: out * 1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "check_heads", lambda heads, device: None)
    session: Any = SimpleNamespace(
        reporter=SimpleNamespace(progress=lambda *_: None), watchdog=SimpleNamespace(reset=lambda: None)
    )
    inputs: Any = SimpleNamespace(prepared=SimpleNamespace(bare=in_varlen("llama")))
    world: Any = SimpleNamespace(device=torch.device("cuda"), gather_objects=lambda mine: [mine, "FA3"])
    assert setup.use_best_flash(session, inputs, world) == "attention is computed by FlashAttention 3"
    assert attention.active_flash() == "FA3"
    world.gather_objects = lambda mine: [mine, None]
    note = str(setup.use_best_flash(session, inputs, world))
    assert "not every rank" in note and "rank 1: FlashAttention 2" in note
    assert attention.active_flash() is None
