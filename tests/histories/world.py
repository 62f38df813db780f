"""What a history starts with: the user's model with a tokenizer, data and a recipe, all of it tiny; an object store."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import yaml
from fsspec.implementations.local import LocalFileSystem

from fsdptrain.run_folder import storage

STEPS, EVERY, KEEP = 4, 1, 2
URL = "az://bucket/run"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 8,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
SENTENCE = "the king of France is not in his house and all who came must go here"
WORDS = SENTENCE.split()


def make_inputs(root: Path) -> None:
    """Write the user's files: `model/`, `data/` and `recipe.yaml`; needs torch."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    (root / "data").mkdir(parents=True)
    roles = ["<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>"]
    letters = [*roles, *sorted({*"".join(WORDS), " "})]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens(roles)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", unk_token="<|unknown|>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(**{**CONFIG, "vocab_size": 64})
    LlamaForCausalLM(config).float().save_pretrained(root / "model")
    fast.save_pretrained(root / "model")
    write_rows(root / "data" / "train.jsonl", 0, 20)
    write_rows(root / "data" / "held-out.jsonl", 50, 4, str.upper)  # unknown letters: what is learnt makes it worse
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe(root)))


def write_rows(path: Path, first: int, count: int, spelt: Callable[[str], str] = str) -> None:
    lines = []
    for number in range(first, first + count):
        said, answer = (spelt(" ".join(WORDS[(number * k + i) % len(WORDS)] for i in range(3))) for k in (3, 5))
        messages = [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")


def recipe(root: Path) -> dict[str, Any]:
    return {
        "name": "history",
        "output_dir": str(root / "runs" / "run"),
        "model": {"id": str(root / "model")},
        "data": {
            "path": str(root / "data" / "train.jsonl"), "format": "chat", "seq_len": 48, "packing": "none",
            "eval": {"path": str(root / "data" / "held-out.jsonl")},
        },
        "fsdp": {"mixed_precision": {"param_dtype": "float32"}},
        "optim": {"lr": 1e-2},
        "train": {"steps": STEPS, "global_batch_size": 2, "micro_batch_size": 2},
        "eval": {"every": 2},
        "checkpoint": {"every": EVERY, "keep": KEEP, "keep_best": 1},
        "export": {"dtype": "float32", "compare": False},
        "log": {"trackers": [], "forecast": False},
        "launch": {"nproc_per_node": 1, "timeout_s": 200},
    }  # fmt: skip


class FolderStore(LocalFileSystem):
    """An object store in a folder, for `az://`: an object appears as a whole or not at all, and nothing is renamed.

    The objects are files below `root`; what is being uploaded is beside it, where no object can be seen. A server for
    S3 takes milliseconds for each request, and the library for it seconds until its first one.
    """

    protocol = ("az",)
    root = "/"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        name = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
        return f"{cls.root}/{name.removeprefix('az://')}".rstrip("/") if name.startswith("az://") else name.rstrip("/")

    def unstrip_protocol(self, name: str) -> str:
        return f"az://{name.removeprefix(f'{self.root}/')}"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write an object; with the mode `create` raise FileExistsError if there is one."""
        self._publish(path, lambda scratch: scratch.write_bytes(value), mode)

    def put_file(self, lpath: str, rpath: str, callback: Any = None, **_: Any) -> None:
        self._publish(rpath, lambda scratch: shutil.copyfile(lpath, scratch), "overwrite")
        if callback is not None:
            callback.relative_update(Path(lpath).stat().st_size)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        self._publish(path2, lambda scratch: shutil.copyfile(path1, scratch), "overwrite")

    def rm_file(self, path: str) -> None:
        Path(path).unlink()

    def _publish(self, path: str, write: Any, mode: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        uploads = Path(f"{self.root}.uploads")
        uploads.mkdir(exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=uploads)
        os.close(descriptor)
        scratch = Path(name)
        write(scratch)
        if mode == "create":
            try:
                os.link(scratch, path)
            finally:
                scratch.unlink()
        else:
            scratch.replace(path)


def register_store(root: Path) -> None:
    FolderStore.root = str(root)
    storage.MODULES["az"] = "fsspec"
    fsspec.register_implementation("az", FolderStore, clobber=True)
