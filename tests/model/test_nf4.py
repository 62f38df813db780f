"""QLoRA: weights quantised as bitsandbytes does, by every rank for its own rows; adapters beside them, as peft has."""

from __future__ import annotations

import contextlib
import ctypes
import re
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from architectures import small_config
from peft import LoraConfig, PeftModel
from peft.tuners.lora import Linear
from ranks import build, local
from reference import OPTIMIZERS, in_nf4, largest_difference
from support import ROOT, TINY, events, on_ranks, planned, write_pretrained, write_recipe
from test_peft import BATCH, BF16, FULL, QLORA, SIZES, STEPS, Case, Parity
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

from fsdptrain.checkpoint.export_tensors import Exported
from fsdptrain.config.reader import load
from fsdptrain.errors import RecipeError
from fsdptrain.forecast import simulation as simulate
from fsdptrain.forecast.server import counted_model
from fsdptrain.forecast.trace import traffic
from fsdptrain.model import nf4
from fsdptrain.model.adapters import freeze, layers_in_nf4, quantised_ids, unquantised_note
from fsdptrain.model.config import load_config
from fsdptrain.model.lora import AdaptedLinear
from fsdptrain.model.patches import import_quietly
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.units import weights_of
from fsdptrain.parallel.patches import takes_two_dtypes
from fsdptrain.parallel.shard import check_dtypes
from fsdptrain.plan.plan import Counts, varied
from fsdptrain.train import trainer

bitsandbytes = import_quietly("bitsandbytes")

DTYPES = [torch.float32, torch.bfloat16]


def quantised(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nf4.NF4Linear:
    """An NF4Linear of a weight whose rows were quantised in two parts, beside a rank that has none."""
    layer = nf4.NF4Linear(*weight.shape, bias if bias is None else nn.Parameter(bias), weight.dtype)
    code = nf4.dynamic_code().to(weight.device)
    packed, absmax = zip(*(nf4.quantise_rows(part) for part in weight.split([65, len(weight) - 65, 0])), strict=True)
    coded, scales, offset = nf4.quantise_scales(torch.cat(absmax), code)
    layer.weight, layer.absmax = (nn.Parameter(p, requires_grad=False) for p in (torch.cat(packed), coded))
    layer.scales, layer.offset, layer.code = scales, offset, code
    return layer


needs_integers = pytest.mark.skipif(
    not takes_two_dtypes(), reason="torch before 2.13 converts quantised weights when it gathers them"
)


CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_computes_as_bitsandbytes_own(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """257 rows of 5 blocks: groups of 256 scales cross rows and end in the middle of one; chunks end anywhere."""
    monkeypatch.setattr(nf4, "CHUNK", 1000)
    torch.manual_seed(0)
    weight, bias = (torch.randn(257, 320) * 0.02).to(device, dtype), torch.randn(257).to(device, dtype)
    weight[3] = 0  # a block of zeros
    layer = quantised(weight, bias)
    data = bitsandbytes.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4", compress_statistics=True)
    theirs = bitsandbytes.nn.Linear4bit(320, 257, compute_dtype=dtype, quant_type="nf4")
    theirs.weight, theirs.bias = data.to(device), nn.Parameter(bias.clone())
    own = nf4.dequantise(layer.quantised, dtype)
    assert torch.equal(own, bitsandbytes.functional.dequantize_4bit(theirs.weight.data, theirs.weight.quant_state))
    assert torch.equal(own, nf4.round_trip(weight, nn.Linear(320, 257), dtype))
    assert torch.equal(own.T, nf4.round_trip(weight.T, Conv1D(257, 320), dtype))
    inputs = [torch.randn(2, 7, 320).to(device, dtype).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0])
    grad = torch.randn(2, 7, 257).to(device, dtype)
    results = [layer(inputs[0]), theirs(inputs[1])]
    for result in results:
        result.backward(grad)
    assert torch.equal(*results) and torch.equal(inputs[0].grad, inputs[1].grad)
    plain = nn.functional.linear(inputs[0].detach(), own, own_bias := bias.clone().requires_grad_())
    plain.backward(grad)
    assert torch.allclose(layer.bias.grad, own_bias.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert layer.weight.grad is None


# --- a layer with an adapter in one function, against peft's own ----------------------------------------------------

IN, OUT, RANK = 128, 192, 3
LAYERS = ("linear", "bias", "conv1d", "nf4")


def base_layer(kind: str, dtype: torch.dtype) -> Any:
    layer: Any = Conv1D(OUT, IN) if kind == "conv1d" else nn.Linear(IN, OUT, bias=kind == "bias")
    layer.to(dtype)
    return quantised(layer.weight.detach()) if kind == "nf4" else layer.requires_grad_(False)


def adapted(kind: str, dtype: torch.dtype, dropout: float) -> Any:
    config = LoraConfig(lora_dropout=dropout, fan_in_fan_out=kind == "conv1d")
    layer: Any = Linear(base_layer(kind, dtype), "default", config, r=RANK, lora_alpha=7)
    nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    for part in (layer.lora_A, layer.lora_B):
        part.to(dtype)
    return layer.train()


def lora_results(layer: Any, x: torch.Tensor, grad: torch.Tensor, needs_x: bool) -> list[torch.Tensor | None]:
    x = x.clone().requires_grad_(needs_x)
    layer.zero_grad()
    torch.manual_seed(5)  # of dropout
    out = layer(x)
    out.backward(grad)
    return [out.detach(), x.grad, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad]


def assert_equal_to_peft(layer: Any, x: torch.Tensor, limit: float, needs_x: bool = True) -> None:
    """Compare peft's results with those of one function; `limit` is relative to the largest value of each."""
    grad = torch.randn(*x.shape[:-1], OUT).to(x.dtype)
    expected = lora_results(layer, x, grad, needs_x)
    layer.__class__ = AdaptedLinear
    for layer.in_place in (True, False):
        for ours, theirs in zip(lora_results(layer, x, grad, needs_x), expected, strict=True):
            if ours is None or theirs is None:
                assert ours is theirs and not needs_x
            else:
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
                assert (ours - theirs).abs().max() <= limit * theirs.abs().max()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", LAYERS)
def test_results_and_gradients_are_those_of_peft(kind: str, dropout: float) -> None:
    torch.manual_seed(0)
    assert_equal_to_peft(adapted(kind, torch.float32, dropout), torch.randn(2, 5, IN), 2e-6)
    assert_equal_to_peft(adapted(kind, torch.float32, dropout), torch.randn(7, IN), 2e-6, needs_x=False)
    assert_equal_to_peft(adapted(kind, torch.float32, dropout).eval(), torch.randn(7, IN), 2e-6)
    assert_equal_to_peft(adapted(kind, torch.bfloat16, dropout), torch.randn(2, 5, IN).bfloat16(), 2e-2)


def test_peft_computes_what_the_function_cannot() -> None:
    torch.manual_seed(0)
    layer, x = adapted("linear", torch.float32, 0.0), torch.randn(7, IN)
    layer.__class__ = AdaptedLinear
    out = layer(x)
    layer.enable_adapters(False)
    torch.testing.assert_close(layer(x), layer.base_layer(x), rtol=0, atol=0)
    layer.enable_adapters(True)
    layer.merge()
    torch.testing.assert_close(layer(x), out)
    layer.unmerge()
    layer.base_layer.bfloat16()
    assert layer(x.bfloat16()).dtype == torch.bfloat16  # the adapter is still float32


def test_what_a_layer_returns_for_a_batch_can_be_changed_in_place() -> None:
    """Olmo clips queries, keys and values so, with `clip_qkv`."""
    torch.manual_seed(0)
    layer, x = adapted("linear", torch.float32, 0.0), torch.randn(2, 7, IN)
    found = []
    for kind in (Linear, AdaptedLinear):
        layer.__class__ = kind
        layer.zero_grad()
        clipped = layer(x).clamp_(-0.5, 0.5)
        clipped.sum().backward()
        found.append([clipped.detach(), *(param.grad.clone() for param in layer.parameters() if param.requires_grad)])
    assert found[0][0].abs().max() == 0.5
    torch.testing.assert_close(found[1], found[0])


# --- in the engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("nf4")
    sizes = SIZES | {"intermediate_size": 256}  # a matrix of this width has whole blocks of 8-bit moments
    return write_pretrained(
        tmp, LlamaConfig(**sizes, tie_word_embeddings=False), adapter={"kind": "qlora", "r": 3},
        optim__lr=1e-3, train__steps=STEPS, train__global_batch_size=BATCH, train__micro_batch_size=2, export={},
    )  # fmt: skip


CASES = {
    "QLoRA": Case(QLORA),
    # By the processor, the norm is 1e-3 to 3e-3 from that of the plain loop, alike in every layout.
    "QLoRA bf16, recomputed": Case([*QLORA, BF16, FULL], limit=5e-3, gradients=2e-2),
}
LINEAR = 14  # linear layers of the model


@needs_integers
def test_curves_agree_with_peft_and_bitsandbytes(recipe: Path, tmp_path: Path) -> None:
    """And bytes on the wire with the forecast, exports with the trained model."""
    copies = [
        "fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=1", "fsdp.cpu_offload=true", "export.adapter=both",
        "export.merge_base=dequantized", "export.dtype=float32",
    ]  # fmt: skip
    whole = {"QLoRA × copies": ["fsdp.strategy=NO_SHARD"]}
    variants = {"QLoRA": copies, "QLoRA bf16, recomputed": [], **whole}
    parity = Parity(recipe, CASES, steps=2)
    found = parity.train(2, variants, tmp_path)
    for name, variant in found.items():
        assert variant["quantised"] == LINEAR and variant["as in the file"], name
    assert not found["QLoRA × copies"]["copied"] and found["QLoRA"]["copied"]
    # What is gathered is the quantised bytes, as the forecast says.
    plan = planned(recipe, *CASES["QLoRA bf16, recomputed"].words, ranks=2)
    trace = simulate.simulate(plan, AutoConfig.from_pretrained(str(plan.recipe.model.id)), pretend=False)
    gathers = [each for each in traffic(trace.repeated(plan.accumulation), 2) if each.kind == "all-gather"]
    numbers = sum(each.size for each in gathers) - found["QLoRA bf16, recomputed"]["gathered"]
    assert 0 < numbers < 200, "only the numbers of the step are gathered besides"
    # The merged model computes what the adapter computes beside the base that bitsandbytes quantises.
    export = Path(plan.run_dir) / "export"
    base = AutoModelForCausalLM.from_pretrained(str(plan.recipe.model.id), **in_nf4(torch.float32))
    adapted = PeftModel.from_pretrained(base, export / "adapter").train()  # bitsandbytes evaluates in bfloat16
    merged = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    ids = torch.arange(40)[None]
    assert (adapted(ids).logits - merged(ids).logits).abs().max() < 1e-5
    # The run has found the same, in a process of its own that opened both.
    [event] = events(Path(plan.run_dir), "export")
    assert [found["what"] for found in event["compared"]] == ["merged", "separate"]
    for found in event["compared"]:
        assert found["mean"] <= found["largest"] < 1e-4 < found["spread"] and found["tokens"] > 20, found


def test_no_import_of_bitsandbytes_uses_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With that package bitsandbytes downloads code, on a CPU with bfloat16 instructions."""
    (tmp_path / "kernels.py").write_text("")
    for name in ("first", "second"):
        text = "try:\n    import kernels\nexcept ImportError:\n    kernels = None"
        (tmp_path / f"imports_kernels_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    assert import_quietly("imports_kernels_first").kernels is None
    assert "kernels" not in sys.modules
    import kernels

    assert import_quietly("imports_kernels_second").kernels is None
    assert sys.modules["kernels"] is kernels
    direct = re.compile(r"^\s*(import|from) bitsandbytes\b", re.MULTILINE)
    assert not [path for path in (ROOT / "fsdptrain").rglob("*.py") if direct.search(path.read_text(encoding="utf-8"))]


def test_what_cannot_be_quantised_is_refused(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or said: layers whose inputs are not in blocks of 64."""
    plan = planned(recipe)
    sizes = TINY | {"num_hidden_layers": 1}  # 96 inputs of the last layer

    def bare(**changes: Any) -> Any:
        return skeleton(LlamaConfig(**sizes | changes), plan.recipe.model)

    assert unquantised_note(bare(), plan.recipe) == (
        "1 of 7 linear layers stay in float32, because the number of their inputs is not a multiple of 64: "
        "model.layers.0.mlp.down_proj"
    )
    trained = freeze(bare(), plan.recipe)
    weights = weights_of(trained, quantised_ids(trained, plan.recipe)).values()
    assert Counts.of(weights).quantised == 6 * 64 * 64 - 2 * 64 * 32 + 2 * 32 * 64
    with pytest.raises(RecipeError, match="qlora quantises linear layers whose inputs are a multiple of 64, and Llama"):
        layers_in_nf4(bare(hidden_size=96), plan.recipe)
    with monkeypatch.context() as patched:  # a torch that casts integers
        patched.setattr(torch, "__version__", "2.11.0")
        with pytest.raises(RecipeError, match="would convert quantised weights to float32 when it gathers them"):
            check_dtypes(bare(), plan)
    with monkeypatch.context() as patched:
        patched.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(RecipeError, match=r"adapter\.kind: bitsandbytes is not installed: pip"):
            load(recipe)
    config = LlamaConfig(**sizes, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    config.save_pretrained(tmp_path)
    other = varied(plan, {"model.id": str(tmp_path)})
    with pytest.raises(RecipeError, match="are stored quantised, which cannot be read: name the model"):
        load_config(other, 512)


def test_export_and_forecast_quantise_the_layers_that_training_quantises(recipe: Path, tmp_path: Path) -> None:
    """Hunyuan keeps its routers in float32 when it computes in bfloat16."""
    words = ["fsdp.mixed_precision.param_dtype=bfloat16", "adapter.target=[q_proj,wg]"]
    plan = planned(recipe, *words)
    config, model = small_config("hunyuan_v1_moe"), plan.recipe.model
    trained = set(layers_in_nf4(skeleton(config, model, "bfloat16"), plan.recipe))
    master = skeleton(config, model)
    assert len(set(layers_in_nf4(master, plan.recipe)) - trained) == config.num_hidden_layers
    assert len(quantised_ids(counted_model(plan, config), plan.recipe)) == len(trained)
    base = {name: torch.randn(param.shape) for name, param in master.named_parameters() if param.ndim == 2}
    (merged,) = Exported(master, plan, plan.rundir, 0, {})._dequantized(iter([dict(base)]))
    assert {name for name in base if not torch.equal(base[name], merged[name])} == {
        f"{name}.weight" for name in trained
    }


@needs_integers
def test_no_rank_holds_the_model(tmp_path: Path) -> None:
    """Neither in 16 bits nor in 32: when a rank quantises its rows, and when the adapter is merged and written.

    The small model is for what is imported and kept once. What a rank takes besides weights differs by some 5 MB with
    what it has imported, so that the large one has 129 MB.
    """
    variants, sizes = {}, {}
    for name, layers in {"small": 1, "large": 40}.items():
        shape = TINY | {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": layers}
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / name)
        sizes[name] = sum(param.nbytes for param in model.parameters())
        variants[name] = [f"model.id={tmp_path / name}", f"output_dir={tmp_path}/run-{name}"]
    recipe = write_recipe(
        tmp_path, model={"id": "unset", "tokenizer": {"train": 512}, "dtype": "bfloat16"},
        adapter={"kind": "qlora", "r": 2}, export={"adapter": "merged", "dtype": "bfloat16", "compare": False},
    )  # fmt: skip
    found = [rank["large"] for rank in on_ranks(2, memory, tmp_path / "ranks", recipe=str(recipe), variants=variants)]
    size = sizes["large"]
    for rank in found:
        assert rank["held"] < 0.2 * size  # half of it in 4 bits, and the adapters
        assert rank["load"] < rank["held"] + 0.15 * size and rank["export"] < 0.6 * size


@needs_integers
def test_recomputation_repeats_the_dropout_of_adapters(recipe: Path, tmp_path: Path) -> None:
    """Curves and gradients are those without recomputation, bit for bit; they reach the adapters of the first block."""
    ways = [f"{kind} 0.3 {recomputed}" for kind in ("lora", "qlora") for recomputed in ("none", "full", "selective")]
    ways += ["qlora 0.0 none"]
    variants = {}
    for name in ways:
        kind, dropout, recomputed = name.split()
        variants[name] = [
            f"adapter.kind={kind}", f"adapter.dropout={dropout}", f"fsdp.activation_checkpointing={recomputed}",
            f"train.micro_batch_size={BATCH}",
        ]  # fmt: skip
    words = {"recipe": str(recipe), "variants": variants, "steps": 1, "made": str(tmp_path)}
    found = on_ranks(1, "adapted", tmp_path, **words)[0]
    gradients = {name: torch.load(tmp_path / f"{i}.pt")["gradients"] for i, name in enumerate(variants)}
    for name in ways[:6]:
        kept = f"{name.split()[0]} 0.3 none"
        assert sum("layers.0." in key for key, gradient in gradients[name].items() if gradient.any()) == 14
        assert found[name]["curve"] == found[kept]["curve"], name
        assert all(torch.equal(gradients[name][key], gradient) for key, gradient in gradients[kept].items()), name
    assert found["qlora 0.0 none"]["curve"] != found["qlora 0.3 none"]["curve"]


@needs_integers
@pytest.mark.parametrize(
    ("names", "worlds"),
    [
        (["lora muon", "qlora adamw_8bit"], [1]),
        pytest.param([f"{k} {o}" for k in ("lora", "qlora") for o in OPTIMIZERS], [1, 4], marks=pytest.mark.soak),
    ],
)
def test_adapters_resume_with_every_optimizer(
    names: list[str], worlds: list[int], recipe: Path, tmp_path: Path
) -> None:
    """Bitwise on two ranks; and on one, or on four of which one has no row of the matrices of rank 3."""
    variants = {}
    for name in names:
        kind, optimizer = name.split(maxsplit=1)
        variants[name] = [f"adapter.kind={kind}", *f"optim.name={optimizer}".split(), f"output_dir={tmp_path / name}"]
        variants[name].append("data.seq_len=32")
    words = {"recipe": str(recipe), "variants": variants, "steps": 4}
    saved = on_ranks(2, "saved_optimizers", tmp_path / "2", 1800, at=2, **words)[0]
    others = {world: on_ranks(world, "curves", tmp_path / str(world), 1800, **words)[0] for world in worlds}
    for name, found in saved.items():
        assert found["first"] == 2 and found["resumed"] == found["curve"][2:], name
        assert found["unchanged"] and found["stored"] == found["planned"], name
        for world, resumed in others.items():
            difference = max(largest_difference(resumed[name], found["curve"][2:]))
            assert difference < 1e-5, (name, world, difference)


# --- on every rank -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def growth() -> Iterator[list[int]]:
    """Give a list with the bytes by which this process's memory has grown at most within a `with` block, at its end.

    Counts anonymous memory, every 2 ms. Pages of files do not count: the kernel drops them when it needs memory.
    """

    def now() -> int:
        _, resident, of_files, *_ = Path("/proc/self/statm").read_text().split()
        return (int(resident) - int(of_files)) * resource.getpagesize()

    def poll() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], now() - start)

    libc = ctypes.CDLL(None)
    assert libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: larger pieces are given back when they are freed
    libc.malloc_trim(0)
    start, most, ended = now(), [0], threading.Event()
    thread = threading.Thread(target=poll)
    thread.start()
    yield most
    ended.set()
    thread.join()


def memory(recipe: str, variants: dict[str, list[str]]) -> dict[str, dict[str, int]]:
    """Return by how many bytes this rank's memory grows at most while the weights of each variant are read: `load`.

    `held` is what it has at the end of parameters, buffers and optimizer state, and `export` what it takes to export.
    """
    load_state, found = trainer.load_state, {}
    for name, overrides in variants.items():
        most: dict[str, list[int]] = {}

        def measured(*arguments: Any, most: dict[str, list[int]] = most) -> Any:
            with growth() as most["load"]:
                return load_state(*arguments)

        with patch.object(trainer, "load_state", measured):
            run = build(recipe, overrides)
        states = run.engine.optimizer.state.values()
        held = [*run.engine.model.parameters(), *run.engine.model.buffers(), *(v for s in states for v in s.values())]
        with growth() as most["export"]:
            assert run.export() is None
        size = sum(local(tensor).nbytes for tensor in held)
        found[name] = {"held": size, "load": most["load"][0], "export": most["export"][0]}
    return found
