"""FLOPs of a step: those that torch counts in a plain forward and backward, whatever is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import TINY
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

from fsdptrain.config.schema import Adapter, Model, Recipe
from fsdptrain.model.adapters import freeze
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.units import model_flops

LLAMA = LlamaConfig(**TINY | {"num_hidden_layers": 4}, tie_word_embeddings=False)
TRAINED: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "all": (LLAMA, {}),
    "LoRA": (LLAMA, {"adapter": Adapter(kind="lora", r=8)}),
    "LoRA in a few layers": (LLAMA, {"adapter": Adapter(kind="lora", r=8, target=["2.self_attn.q_proj", "down_proj"])}),
    "last layer, norm and head": (LLAMA, {"trainable": ["layers.3", "norm", "lm_head"]}),
    "layers without the embedding": (LLAMA, {"trainable": ["layers"]}),
    "MLP of a layer": (LLAMA, {"trainable": ["layers.1.mlp"]}),
    "head": (LLAMA, {"trainable": ["lm_head"]}),
    "tied": (LlamaConfig(**TINY, tie_word_embeddings=True), {"trainable": ["layers.1"]}),
    "tied, LoRA": (LlamaConfig(**TINY, tie_word_embeddings=True), {"adapter": Adapter(kind="lora", r=8)}),
    "gpt2, LoRA": (GPT2Config(vocab_size=512, n_embd=64, n_layer=3, n_head=4), {"adapter": Adapter(kind="lora", r=8)}),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    config, trained = TRAINED[name]
    model = Model(id="base", attn_implementation="eager", trainable=trained.get("trainable", []))
    recipe = Recipe(model=model, adapter=trained.get("adapter", Adapter()))
    bare = freeze(skeleton(config, model), recipe)
    rows, length = 2, 96
    counted = model_flops(bare, rows * length, length)
    real = bare.to_empty(device="cpu").float().train()
    ids = torch.zeros(rows, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        real(input_ids=ids, labels=ids).loss.backward()
    assert counted == counter.get_total_flops()
