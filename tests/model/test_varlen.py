"""Attention in the varlen kernel is that of each document alone: the same code as on a GPU, with the CPU's kernel."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_attention
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import config_of, plan_of
from test_attention import SIZES, check_operator, compared, documents, inputs, model_of, trained, worst
from torch._inductor.compile_fx import compile_fx
from torch.nn import attention as of_torch
from transformers import AutoConfig, masking_utils
from transformers.masking_utils import find_packed_sequence_indices

from fsdptrain.config.schema import Model, Recomputation
from fsdptrain.data.corpus import document_bounds
from fsdptrain.errors import RecipeError
from fsdptrain.model import attention, probe, varlen
from fsdptrain.model.attention import activate_best_flash, choose_attention, heads_of, installed_flash
from fsdptrain.model.patches import VARLEN_BACKWARD, VARLEN_FORWARD, documents_of
from fsdptrain.model.skeleton import skeleton
from fsdptrain.parallel.recompute import recompute
from fsdptrain.parallel.shard import compile_layers
from fsdptrain.plan.plan import Plan
from fsdptrain.train import setup

# --- the operator ---------------------------------------------------------------------------------------------------


def in_varlen(rows: list[list[int]], window: int | None, scale: float | None = 0.3) -> Callable[..., torch.Tensor]:
    documents, longest = document_bounds(rows)
    passed = {"documents": documents, "longest_document": longest, "sliding_window": window, "scaling": scale}
    return lambda q, k, v: varlen.attend_within_documents(torch.nn.Module(), q, k, v, None, **passed)[0]


def seen(rows: list[list[int]], window: int | None) -> torch.Tensor:
    mask = documents(*rows)
    return mask if window is None else mask.triu(1 - window)


ROWS = {
    "one token": [[1], [1]],
    "a row each": [[300], [300]],
    "packed": [[100, 7, 193], [150, 150]],
    "tokens alone": [[1] * 40, [1, 38, 1]],
    "padding": [[30, 34], [63, 1]],
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 16), (4, 2, 64), (6, 1, 80)])
@pytest.mark.parametrize("window", [None, 1, 9])
def test_a_document_is_computed_by_itself(name: str, heads: int, groups: int, size: int, window: int | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        *qkv, grad = inputs(sum(ROWS[name][0]), heads, groups, size, dtype)
        found, others = compared(in_varlen(ROWS[name], window), seen(ROWS[name], window), qkv, grad)
        exact = dtype == torch.float32
        limits = [1e-5 if exact else max(2 * other, 4e-3) for other in others]
        assert all(a <= b for a, b in zip(found, limits, strict=True)), (found, others)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.randoms(), st.one_of(st.none(), st.integers(1, 50)))
@settings(max_examples=40)
def test_whatever_the_lengths(lengths: list[int], random: Any, window: int | None) -> None:
    rows = [lengths, random.sample(lengths, len(lengths))]
    *qkv, grad = inputs(sum(lengths), 4, 2, 16, torch.float32)
    assert max(compared(in_varlen(rows, window), seen(rows, window), qkv, grad)[0]) < 1e-5


@pytest.mark.parametrize(("size", "of_values"), [(24, 16), (16, 24), (12, 12), (20, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_heads_of_any_size_are_padded(size: int, of_values: int, dtype: torch.dtype) -> None:
    """The sizes of MLA's heads differ. The scale is that of the size before."""
    rows = ROWS["packed"]
    query, key, value, grad = inputs(300, 4, 2, max(size, of_values), dtype)
    qkv, grad = [query[..., :size], key[..., :size], value[..., :of_values]], grad[..., :of_values]
    worst, _ = compared(in_varlen(rows, None, None), seen(rows, None), qkv, grad, size**-0.5)
    assert max(worst) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_torch_finds_the_kernels_for_the_cpu_well_made() -> None:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in inputs(13, 4, 2, 16, torch.float32)[:3])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    bounds, longest = document_bounds([[9, 4], [13]])
    args = (*leaves, bounds, bounds, longest, longest, True, 0.3, [-1, 0], True)
    check_operator(VARLEN_FORWARD, args[: len(VARLEN_FORWARD._schema.arguments)])  # the last came after torch 2.11


REFUSED = {
    "does not pass|do not get": {"documents": None},
    "builds a mask": {"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)},
    "not causal": {"is_causal": False},
    "dropout": {"dropout": 0.1},
    "capped": {"softcap": 30.0},
    "sinks": {"s_aux": torch.zeros(4)},
    "position bias": {"position_bias": torch.zeros(1, 4, 8, 8)},
    "264 elements, more than 256": {"value": torch.zeros(1, 4, 8, 260)},
    "differ in length": dict.fromkeys(("key", "value"), torch.zeros(1, 4, 9, 16)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_kernel_does_not_compute_is_refused(reason: str) -> None:
    bounds, longest = document_bounds([[8]])
    called = dict.fromkeys(("query", "key", "value"), torch.zeros(1, 4, 8, 16)) | {"attention_mask": None}
    called |= {"documents": bounds, "longest_document": longest}
    varlen.attend_within_documents(torch.nn.Module(), **called)
    with pytest.raises(RecipeError, match=reason):
        varlen.attend_within_documents(torch.nn.Module(), **called | REFUSED[reason])


# --- in a model -----------------------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = test_attention.MODELS | {
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "deepseek_v3": {
        "num_key_value_heads": 4, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "n_routed_experts": 8, "n_group": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "moe_intermediate_size": 32,
    },
}  # fmt: skip
PACKED = [[90, 1, 109], [150, 50]]


def called(lengths: list[list[int]], masked: bool = False) -> dict[str, Any]:
    """Return the arguments of `trained` for rows of documents."""
    documents, longest = document_bounds(lengths)
    rows = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    return {"rows": rows} | ({} if masked else {"documents": documents, "longest_document": longest})


@pytest.fixture
def no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers fail where it builds a mask or looks for documents in position ids."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a mask")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", fail)
    for name in ("sdpa", "eager"):
        monkeypatch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, fail)


def test_documents_are_found_without_reading_the_position_ids() -> None:
    """With masks, on an accelerator: the recipe says whether rows are packed, so the host need not look."""
    for position_ids in (torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 0], [0, 1, 0]])):
        found = documents_of(position_ids, packed=True)
        assert found is not None and torch.equal(found, find_packed_sequence_indices(position_ids))
        assert documents_of(position_ids.to("meta"), packed=True).shape == position_ids.shape
    rows = torch.arange(6).expand(2, 6)
    assert documents_of(rows, packed=False) is find_packed_sequence_indices(rows) is None
    assert not documents_of(rows, packed=True).any(), "as transformers does with one document, apart from the mask"


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_a_model_computes_what_it_does_with_a_mask(kind: str, dtype: torch.dtype, request: Any) -> None:
    expected = trained(model_of(kind, "sdpa", dtype, **MODELS[kind]), **called(PACKED, masked=True))
    request.getfixturevalue("no_masks")
    difference = worst(trained(model_of(kind, varlen.NAME, dtype, **MODELS[kind]), **called(PACKED)), expected)
    assert difference < (2e-5 if dtype == torch.float32 else 4e-2)


@pytest.mark.parametrize(
    "kind", ["none", "selective", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("full", "inductor"))]
)
def test_all_compiled_layers_are_one_graph_for_any_documents(
    kind: str, no_masks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("__init__", "__setstate__"):  # compilation replaces them for good
        monkeypatch.setattr(torch.nn.Module, name, getattr(torch.nn.Module, name))
    expected = [trained(model_of("llama", varlen.NAME), **called(lengths)) for lengths in DOCUMENTS]
    model = model_of("llama", varlen.NAME)
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return compile_fx(graph, example_inputs) if kind == "inductor" else graph.forward

    monkeypatch.setattr(torch.nn.Module, "__init__", torch.nn.Module.__init__)  # dynamo replaces it for good
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend, fullgraph=True))
    how = Recomputation("none" if kind == "inductor" else kind)
    recompute([*model.model.layers], how, torch.device("cpu"))
    counts = []
    with torch.compiler.config.patch(dynamic_sources=""):
        compile_layers([*model.model.layers])
        for lengths, wanted in zip(DOCUMENTS, expected, strict=True):
            assert worst(trained(model, **called(lengths)), wanted) < (1e-5 if kind == "inductor" else 1e-6)
            counts.append(len(graphs))
    assert counts == [1] * len(DOCUMENTS)
    symbols = [node for node in graphs[0].graph.nodes if node.op == "placeholder" and node.type is torch.SymInt]
    assert len(symbols) == 2, symbols  # all else is static


DOCUMENTS = [PACKED, [[1] * 20 + [180], [2] * 20 + [160]], [[200], [3, 197]], [[20] * 10] * 2, [[140, 60], [5] * 40]]


def gpu_plan(tmp: Path, **changes: Any) -> Plan:
    return plan_of(tmp, device="cuda", **{"fsdp__mixed_precision": {"param_dtype": "bfloat16"}, **changes})


# --- where it applies -----------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[dict[str, Any], str | None]] = {
    "llama": ({}, None),
    "mistral": ({"sliding_window": 40}, None),
    "gemma3_text": ({"sliding_window": 16}, None),
    "gemma2": ({}, "scores are capped"),
    "gpt_oss": ({"num_local_experts": 4}, "sinks"),
    "gpt2": ({}, "dropout"),
    "stablelm": ({}, "do not get `documents`"),
    "falcon": ({"head_dim": None}, "does not take its attention from transformers' interface"),
    "llama4_text": ({"attention_chunk_size": 64, "num_local_experts": 4}, "declares no flash attention"),
    "deepseek_v3": (MODELS["deepseek_v3"], None),
    "gemma3_text large": ({"head_dim": 512}, "512 elements, more than 256"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_chosen_where_the_model_computes_the_same(tmp_path: Path, kind: str) -> None:
    own, reason = KINDS[kind]
    plan = gpu_plan(tmp_path)
    sizes = {name: value for name, value in (SIZES | own).items() if value is not None}
    config = AutoConfig.for_model(kind.split()[0], **sizes)
    found, bare = choose_attention(plan, config)
    kernel = found.recipe.model.attn_implementation
    if reason is None:
        assert kernel == bare.config._attn_implementation == varlen.NAME
        assert attention.mask_note(found, bare) is None
        assert skeleton(config, found.recipe.model).config._attn_implementation == varlen.NAME
    else:
        assert kernel in ("sdpa", "eager")
        note = attention.mask_note(found, bare)
        assert note is not None
        assert reason in note


@pytest.mark.parametrize(("cards", "kernel"), [([(7, 5)], "sdpa"), ([(9, 0), (7, 0)], "sdpa"), ([(8, 0)], varlen.NAME)])
def test_it_is_not_chosen_for_a_card_that_flash_attention_refuses(
    cards: list[tuple[int, int]], kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_capability", cards.__getitem__)
    found, bare = choose_attention(gpu_plan(tmp_path), AutoConfig.for_model("llama", **SIZES))
    assert found.recipe.model.attn_implementation == kernel
    note = attention.mask_note(found, bare) or ""
    assert (f"compute capability 8.0, and this one has {cards[-1][0]}.{cards[-1][1]}" in note) == (kernel == "sdpa")


def test_a_model_with_chunks_would_be_noticed() -> None:
    """Its chunks are longer than any document of the comparison, were they not made short for it."""
    config = AutoConfig.for_model("llama4_text", **SIZES, attention_chunk_size=8192, num_local_experts=4)
    assert "hides more" in str(probe.varlen_obstacle(skeleton(config, Model())))


def test_it_is_not_chosen_without_a_gpu_in_float32_or_with_another_kernel(tmp_path: Path) -> None:
    for plan in (plan_of(tmp_path), gpu_plan(tmp_path, fsdp__mixed_precision={"param_dtype": "float32"})):
        found, bare = choose_attention(plan, config_of(plan))
        assert found.recipe.model.attn_implementation == bare.config._attn_implementation == "sdpa"
    plan = gpu_plan(tmp_path, model__attn_implementation="eager")
    assert choose_attention(plan, config_of(plan))[0].recipe.model.attn_implementation == "eager"
    plan = gpu_plan(tmp_path, model__attn_implementation="sdpa", data__packing="none")
    assert choose_attention(plan, config_of(plan))[0].recipe.model.attn_implementation == varlen.NAME


PAIRS = {"data__format": "preference", "train__objective": "dpo"}
LONG = {"data__packing": "none", "data__seq_len": 128}
CUDNN = {  # what is different, and the kernel on a card where torch prefers cuDNN
    "one document": ("llama", {}, {}, "sdpa"),
    "packed": ("llama", {}, {"data__packing": "bfd"}, varlen.NAME),
    "pairs": ("llama", {}, PAIRS, varlen.NAME),
    "length": ("llama", {}, {"data__seq_len": 192}, varlen.NAME),
    "deterministic": ("llama", {}, {"train__deterministic": True}, varlen.NAME),
    "window": ("mistral", {"sliding_window": 40}, {}, varlen.NAME),
    "shared rows": ("llama", {}, {"parallel__context": 2}, varlen.NAME),
    "large heads": ("llama", {"head_dim": 256}, {}, varlen.NAME),
    "unequal heads": ("deepseek_v3", MODELS["deepseek_v3"], {}, varlen.NAME),
}


@pytest.mark.parametrize("kind", CUDNN)
def test_rows_of_one_document_are_left_to_cudnn_where_torch_prefers_it(tmp_path: Path, kind: str) -> None:
    name, own, changes, kernel = CUDNN[kind]
    plan, config = gpu_plan(tmp_path, **LONG | changes), AutoConfig.for_model(name, **SIZES | own)
    found, bare = choose_attention(plan, config, prefers_cudnn=True)
    assert found.recipe.model.attn_implementation == bare.config._attn_implementation == kernel
    assert attention.mask_note(found, bare) is None
    assert choose_attention(plan, config, prefers_cudnn=False)[0].recipe.model.attn_implementation == varlen.NAME


@pytest.mark.parametrize(
    ("cards", "version", "preferred"),
    [
        ([(9, 0), (9, 0)], 91900, True), ([(10, 0)], 91501, True), ([(9, 0)], 91002, False), ([(9, 0)], None, False),
        ([(8, 0)], 91900, False), ([(9, 0), (8, 0)], 91900, False), ([(12, 0)], 91900, False), ([], 91900, False),
    ],
)  # fmt: skip
def test_cudnn_is_preferred_as_torch_prefers_it(
    cards: list[tuple[int, int]], version: int | None, preferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_capability", cards.__getitem__)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert attention.is_cudnn_preferred() == preferred


@pytest.mark.parametrize(("seq_len", "stays"), [(4096, True), (4160, False), (1000, False)])
def test_masks_do_not_go_to_cudnn_where_it_gives_nan(seq_len: int, stays: bool) -> None:
    try:
        attention.avoid_wrong_kernel(seq_len)
        assert torch.backends.cuda.cudnn_sdp_enabled() == stays
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


# --- FlashAttention 3 and 4, with registrations that stand in for them ---------------------------------------------

CPU = torch.device("cpu")
MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}  # what torch 2.13 imports


def built_in_varlen(kind: str) -> Any:
    config = AutoConfig.for_model(kind, **SIZES | MODELS[kind])
    return skeleton(config, Model(attn_implementation=varlen.NAME))


def test_the_heads_are_those_of_the_model_s_own_forward() -> None:
    assert heads_of(built_in_varlen("llama")) == {(4, 2, 16, 16, False)}
    assert heads_of(built_in_varlen("gemma3_text")) == {(4, 2, 16, 16, False), (4, 2, 16, 16, True)}
    assert heads_of(built_in_varlen("deepseek_v3")) == {(4, 4, 48, 32, False)}


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


def install_packages(folder: Path, *names: str) -> None:
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
    install_packages(packages, "FA3", "FA4")
    assert [installed_flash(major) for major in (8, 9, 10, 12)] == [[], ["FA3", "FA4"], ["FA4"], []]
    assert "flash_attn" not in sys.modules
    monkeypatch.delattr(of_torch, "activate_flash_attention_impl")  # an older torch
    assert installed_flash(9) == []


def test_without_kernels_flash_attention_2_is_used(packages: Path) -> None:
    """The registrations are torch's own."""
    install_packages(packages, "FA3", "FA4")
    note = str(activate_best_flash(built_in_varlen("llama"), CPU, 9))
    assert "FlashAttention 3 is installed but not used: " in note and "does not expose FA3" in note
    assert "FlashAttention 4 is installed but not used: " in note and "another CUDA" in note
    assert note.endswith("attention is computed by FlashAttention 2")
    assert of_torch.current_flash_attention_impl() is None


def wrong_gradient(out: torch.Tensor) -> torch.Tensor:
    return 1.1 * out - 0.1 * out.detach()


def test_the_first_that_is_right_is_used(packages: Path) -> None:
    install_packages(packages, "FA3", "FA4")
    bare, original = built_in_varlen("deepseek_v3"), varlen.varlen_attn
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
    install_packages(packages, "FA3")
    of_torch.register_flash_attention_impl("FA3", register_fn=lambda: Registered(lambda out: out * 1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "check_heads", lambda heads, device: None)
    session: Any = SimpleNamespace(
        reporter=SimpleNamespace(progress=lambda *_: None), watchdog=SimpleNamespace(reset=lambda: None)
    )
    inputs: Any = SimpleNamespace(prepared=SimpleNamespace(bare=built_in_varlen("llama")))
    world: Any = SimpleNamespace(device=torch.device("cuda"), gather_objects=lambda mine: [mine, "FA3"])
    assert setup.use_best_flash(session, inputs, world) == "attention is computed by FlashAttention 3"
    assert attention.active_flash() == "FA3"
    world.gather_objects = lambda mine: [mine, None]
    note = str(setup.use_best_flash(session, inputs, world))
    assert "not every rank" in note and "rank 1: FlashAttention 2" in note
    assert attention.active_flash() is None


# --- in a forecast --------------------------------------------------------------------------------------------------


def test_arithmetic_is_counted_for_the_pairs_that_are_seen() -> None:
    meta = [torch.empty(256, heads, 16, device="meta") for heads in (4, 2, 2)]
    bounds = torch.empty(17, device="meta", dtype=torch.int32)
    pairs = 2 * 128 * 129 // 2
    forward, backward = varlen.FLOPS[VARLEN_FORWARD], varlen.FLOPS[VARLEN_BACKWARD]
    assert forward(*meta, bounds, bounds, 128, 128, True, 0.3, [-1, 0]) == 2 * 2 * 4 * 16 * pairs
    args = (meta[0], *meta, meta[0], None, bounds, bounds, 128, 128, True, None, None, [-1, 0])
    assert backward(*args) == 5 * 2 * 4 * 16 * pairs
    windowed = sum(min(position + 1, 10) for position in range(128)) * 2
    assert forward(*meta, bounds, bounds, 128, 128, False, None, [9, 0]) == 2 * 2 * 4 * 16 * windowed
