"""fsdptrain: one YAML recipe, one command, a trained Hugging Face folder."""

import sys

__version__ = "0.1.0"

# transformers and peft import torchao where it is installed, which takes seconds and prints warnings in every process.
# Hide it from them; `model.float8` alone uses it.
sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]  # the documented way to make an import fail
