"""A process that opens an export as its user does, with transformers and peft, and computes logits with it on the CPU.

`checkpoint.comparison` starts it, sends one job, and gets the logits (safetensors) behind a record with their size.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from safetensors.torch import save
from transformers import AutoConfig, BitsAndBytesConfig

from fsdptrain.model.config import own_classes
from fsdptrain.model.patches import import_quietly, use_torch_operators
from fsdptrain.model.skeleton import auto_class
from fsdptrain.model.weights import stored_names
from fsdptrain.processes import answer_parent, records_of_parent


def open_model(folder: str, dtype: torch.dtype, **options: Any) -> Any:
    """Return a whole model. Raises ValueError if its files lack weights, or have some that nothing reads."""
    model, loading = _from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    loading["unexpected_keys"] = stored_names(model, loading["unexpected_keys"]).unknown
    if wrong := {kind: sorted(map(str, names)) for kind, names in loading.items() if names}:
        raise ValueError(f"not every weight was found: {wrong}")
    return model


def open_adapter(folder: str, dtype: torch.dtype, unquantised: list[str] | None, **options: Any) -> Any:
    """Return an adapter with the base that its configuration names.

    bitsandbytes quantises the base to NF4, except the layers `unquantised`; None: it is not quantised.
    """
    peft = import_quietly("peft")
    if unquantised is not None:
        import_quietly("bitsandbytes")
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=unquantised,
        )  # fmt: skip
        options["device_map"] = "cpu"
    config = peft.PeftConfig.from_pretrained(folder)
    base = _from_pretrained(config.base_model_name_or_path, revision=config.revision, dtype=dtype, **options)
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # bitsandbytes would compute in bfloat16 whatever the dtype
    return peft.PeftModel.from_pretrained(base, folder)


def _from_pretrained(name: str, revision: str | None = None, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return what transformers opens: a causal language model, or a whole vision-language model."""
    own = own_classes(name, revision, trust_remote_code, "model")
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": bool(own)}
    return auto_class(AutoConfig.from_pretrained(name, **where)).from_pretrained(name, **where, **options)


def open_export(export: dict[str, Any], **options: Any) -> Any:
    """Return the model of an export that `comparison.Way.job` describes."""
    folder, dtype = export["folder"], getattr(torch, export["dtype"])
    if "unquantised" in export:
        return open_adapter(folder, dtype, export["unquantised"], **options)
    return open_model(folder, dtype, **options)


def logits_of(model: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits of each row of tokens: float32 [tokens, vocabulary]."""
    model.eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row]), use_cache=False).logits[0].float() for row in rows]


def main() -> None:
    """Send the logits of every export of the job, as NAME.ROW."""
    send = answer_parent()
    warnings.filterwarnings("error", message="Found missing adapter keys")  # peft would set them to first values
    use_torch_operators()
    job = next(records_of_parent())
    found: dict[str, torch.Tensor] = {}
    for name, export in job["exports"].items():
        logits = logits_of(open_export(export, trust_remote_code=job["trust_remote_code"]), job["rows"])
        found |= {f"{name}.{number}": values for number, values in enumerate(logits)}
    content = save(found)
    send({"bytes": len(content)}, content)
