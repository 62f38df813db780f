"""Keys of `model.config` without effect are rejected by name, with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import TINY, write_recipe

from fsdptrain.config.reader import load
from fsdptrain.errors import RecipeError
from fsdptrain.model.config import load_config
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import find_topology

REJECTED: dict[str, tuple[dict[str, Any], str]] = {  # key → (configuration, text of the message)
    "dtype": ({"dtype": "bfloat16"}, "use model.dtype"),
    "torch_dtype": ({"torch_dtype": "bfloat16"}, "use model.dtype"),
    "attn_implementation": ({"attn_implementation": "eager"}, "use model.attn_implementation"),
    "_attn_implementation": ({"_attn_implementation": "eager"}, "use model.attn_implementation"),
    "sliding_window": ({"model_type": "qwen2", "sliding_window": 32}, "use_sliding_window: true"),
    "output_router_logits": ({"model_type": "mixtral", "output_router_logits": True}, "output_router_logits: false"),
    "router_aux_loss_coef": ({"model_type": "mixtral", "router_aux_loss_coef": 0.1}, "auxiliary loss"),
    "num_labels": ({"num_labels": 3}, "remove the key"),
}


def config_of(tmp: Path, config: dict[str, Any]) -> Any:
    written = load(write_recipe(tmp, model__config={"model_type": "llama", **TINY, **config}))
    return load_config(make_plan(written, find_topology(written.recipe, {})), 512)


@pytest.mark.parametrize("key", REJECTED)
def test_a_key_without_effect_is_rejected(key: str, tmp_path: Path) -> None:
    config, words = REJECTED[key]
    with pytest.raises(RecipeError, match=rf"model\.config\.{key}: .*{words}"):
        config_of(tmp_path, config)


def test_the_suggested_ways_out_are_accepted(tmp_path: Path) -> None:
    sliding = {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}
    assert config_of(tmp_path, sliding).sliding_window == 32
    assert not config_of(tmp_path, {"model_type": "mixtral", "output_router_logits": False}).output_router_logits
