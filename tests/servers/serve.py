"""Continue prompts greedily with a server's own loader: `serve.py vllm|llama_cpp REQUEST`; runs without fsdptrain.

REQUEST is JSON: `folder` of the model, `adapter` (folder or null), `prompts` [P], `tokens` to add, and for llama.cpp
`source`, its folder. The last line of the output is JSON: the ids of the new tokens [P, tokens].
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def vllm(request: dict[str, Any]) -> list[list[int]]:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("trained", 1, request["adapter"]) if request["adapter"] else None
    server = LLM(
        request["folder"], dtype="float32", enforce_eager=True, max_model_len=256, enable_lora=adapter is not None
    )
    sampling = SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=True)
    answers = server.generate(request["prompts"], sampling, lora_request=adapter)
    return [[*answer.outputs[0].token_ids] for answer in answers]


def llama_cpp(request: dict[str, Any]) -> list[list[int]]:
    source, converted = Path(request["source"]), Path(request["folder"]) / "model.gguf"
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion.base import TextModel
    from llama_cpp import Llama

    # The script knows tokenizers of the Hub by what they make of a text. One that a run trained splits as GPT-2's does.
    TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    sys.argv = ["convert", request["folder"], "--outfile", str(converted), "--outtype", "f32"]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")
    model = Llama(str(converted), n_ctx=256, verbose=False)
    ids = [model.tokenize(prompt.encode(), add_bos=False) for prompt in request["prompts"]]
    return [[*itertools.islice(model.generate(each, top_k=1), request["tokens"])] for each in ids]


if __name__ == "__main__":
    print("\n" + json.dumps({"vllm": vllm, "llama_cpp": llama_cpp}[sys.argv[1]](json.loads(sys.argv[2]))))
