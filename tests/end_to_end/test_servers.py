"""Exports continue prompts in vLLM and llama.cpp with the tokens that plain transformers gives (`make servers`)."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support import TESTS, environment, fsdptrain, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

SERVERS = Path(os.environ.get("SERVERS", "none"))
PROMPTS = ["ROMEO:\n", "First Citizen:\nBefore we", "To be, or"]
TOKENS = 24
# Heads of 64, because vLLM has no kernel for smaller ones; weights of a spread with which the tokens vary.
CONFIG = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not (SERVERS / "installed").exists(), reason="needs an environment with both: make servers"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return three exports: a model, an adapter on it, and that model with the adapter merged into it."""
    first, second = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("adapter")
    recipe = write_recipe(first, **{f"model__config__{name}": value for name, value in CONFIG.items()})
    other = write_recipe(
        second, model={"id": str(first / "run" / "export")}, adapter={"kind": "lora", "r": 8}, optim__lr=1e-1,
        export={"adapter": "separate", "compare": False},
    )  # fmt: skip
    merged = second / "merged"
    for words in (["run", recipe], ["run", other], ["export", second / "run", "--adapter", "merged", "--out", merged]):
        done = fsdptrain(*words)
        assert done.returncode == 0, done.stderr
    return {"model": first / "run" / "export", "adapter": second / "run" / "export", "merged": merged}


def expected(folder: Path, adapter: Path | None = None) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # in which both servers compute
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        whole = model.generate(input_ids=ids, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
        found.append(whole[0, ids.shape[1] :].tolist())
    return found


def served(server: str, folder: Path, adapter: Path | None = None) -> list[list[int]]:
    request: dict[str, Any] = {
        "folder": str(folder), "adapter": adapter and str(adapter), "prompts": PROMPTS, "tokens": TOKENS,
        "source": str(SERVERS / "llama.cpp"),
    }  # fmt: skip
    command = [SERVERS / "bin" / "python", TESTS / "servers" / "serve.py", server, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    tokens: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return tokens


@pytest.mark.parametrize("server", ["vllm", "llama_cpp"])
@pytest.mark.parametrize("which", ["model", "merged"])
def test_a_server_continues_as_transformers_does(server: str, which: str, trained: dict[str, Path]) -> None:
    tokens = expected(trained[which])
    assert len({*itertools.chain(*tokens)}) > 10
    assert served(server, trained[which]) == tokens


def test_vllm_serves_an_adapter_beside_its_base(trained: dict[str, Path]) -> None:
    base, adapter = trained["model"], trained["adapter"]
    tokens = expected(base, adapter)
    assert served("vllm", base, adapter) == tokens
    assert tokens != expected(base), "the adapter changes nothing"
