"""fsdptrain: one YAML recipe, one command, a trained Hugging Face folder."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdptrain.api import export, load_recipe, read_history, run, validate

__all__ = ["export", "load_recipe", "read_history", "run", "validate"]
__version__ = "0.2.0"

# transformers and peft import torchao where it is installed, which takes seconds and prints warnings in every process.
# Hide it from them; `model.float8` alone uses it.
sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]  # the documented way to make an import fail


def __getattr__(name: str) -> Any:
    """Return a function of `fsdptrain.api`, which is imported at its first use: commands and workers need none."""
    if name in __all__:
        return getattr(importlib.import_module("fsdptrain.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
