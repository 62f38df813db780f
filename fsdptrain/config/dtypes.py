"""The dtypes that a recipe can name, and their sizes."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["float32", "bfloat16"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]
HALF = ("bfloat16", "float16")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of one element
NF4_BYTES = 33 / 64  # of one number of a row: half a byte, and one byte for the scale of 64 numbers
