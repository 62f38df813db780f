"""fsdptrain: one YAML recipe, one command, a trained Hugging Face folder."""

__version__ = "0.1.0"
