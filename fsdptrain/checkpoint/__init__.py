"""Sharded state on disk and back, and the Hugging Face folder."""
