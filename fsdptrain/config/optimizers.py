"""What each optimizer is: its class, the recipe keys it reads, and what it keeps for each parameter.

To add an optimizer, add a row to `OptimizerKind`. Its parameter groups (which parameters decay) are made by
`train.optim`, the same for every optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdptrain.config.enums import TableEnum

# The dtypes that a recipe can name, and the bytes of one element.
Dtype = Literal["float32", "bfloat16"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]
HALF = ("bfloat16", "float16")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NF4_BYTES = 33 / 64  # of one number of a row: half a byte, and one byte for the scale of 64 numbers
BLOCK = 256  # values of an 8-bit moment that share one scale: what the kernels of bitsandbytes support


@dataclass(frozen=True)
class Weight:
    """What an optimizer knows of a parameter: its whole shape, and what it is.

    `matrix`: a weight of a matrix product inside the model, so neither embedding nor head. `decays`: weight decay
    applies, which it does to all but norms, biases, scales and embeddings. A frozen one is not `trained`; one of an
    `adapter` is trained beside the model's own. The numbers of a `quantised` one are stored in NF4.
    """

    shape: tuple[int, ...]
    decays: bool = True
    matrix: bool = True
    trained: bool = True
    adapter: bool = False
    quantised: bool = False

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer keeps for a parameter, by its key in the optimizer's state and in a checkpoint.

    It is sharded along dimension 0 with the rows of the parameter, or `whole` on every rank. Numbers of counted steps
    are not listed: they are not saved, because a checkpoint's manifest has the step.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    whole: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * {**BYTES, "uint8": 1}[self.dtype]


StateOf = Callable[[Weight, Dtype], list[StateTensor]]  # (a parameter, the dtype of its master weights) → its state


def _kept(*keys: str, dtype: str | None = None) -> StateOf:
    return lambda weight, master: [StateTensor(key, weight.shape, dtype or master) for key in keys]


_moments = _kept("exp_avg", "exp_avg_sq")


def _momentum_of_matrices(weight: Weight, master: Dtype) -> list[StateTensor]:
    return (_kept("momentum_buffer") if is_orthogonalised(weight) else _moments)(weight, master)


def _moments_in_8_bits(weight: Weight, master: Dtype) -> list[StateTensor]:
    """Return two moments with a byte a value and a scale a block if there are whole blocks, else in float32."""
    columns = padded_columns(weight.shape)
    if not columns:
        return _kept("state1", "state2", dtype="float32")(weight, master)
    rows = weight.shape[:-1]
    return [
        tensor
        for number in (1, 2)
        for tensor in (
            StateTensor(f"state{number}", (*rows, columns), "uint8"),
            StateTensor(f"absmax{number}", (*rows, columns // BLOCK), "float32"),
        )
    ]


def _factors(weight: Weight, master: Dtype) -> list[StateTensor]:
    """Return the second moment: its means over the rows and over the columns of a matrix, else itself."""
    shape = weight.shape
    if len(shape) < 2:
        return [StateTensor("exp_avg_sq", shape, "float32")]
    return [
        StateTensor("exp_avg_sq_row", shape[:-1], "float32"),
        StateTensor("exp_avg_sq_col", (*shape[:-2], shape[-1]), "float32", whole=len(shape) == 2),
    ]


def padded_columns(shape: tuple[int, ...]) -> int:
    """Return the columns of the 8-bit moments of a parameter, a multiple of `BLOCK`; 0 if they are kept in float32.

    A block never crosses the border of a row, so that its scale does not depend on which rank has which rows. Rows of
    other lengths are padded. Vectors, and matrices whose rows are shorter than a block, keep float32 moments. Neither
    depends on the number of rows, of which a rank has only a part.
    """
    return -(-shape[-1] // BLOCK) * BLOCK if len(shape) > 1 and shape[-1] >= BLOCK else 0


def is_orthogonalised(weight: Weight) -> bool:
    """Return whether Muon updates a parameter. AdamW updates the rest: also stacks of matrices, such as experts."""
    return weight.matrix and len(weight.shape) == 2


@dataclass(frozen=True)
class OptimizerTraits:
    """What the engine knows of an optimizer.

    `torch_class` is called with the parameter groups, with `lr` and the values of the keys `settings` of the recipe's
    `optim` section, and with `options`. `settings` has the default of each key for this optimizer.

    `found_inf`: a step does nothing, and is not counted, when the attribute `found_inf` is a tensor of 1.0. Without it
    the host waits for the numbers of a step before the update, and skips the update itself.

    `needs_ranks`: the class takes as `ranks` the mesh of the ranks that have the other rows of the parameters,
    and communicates in its step. `splits`: parameters that it treats otherwise are groups of their own. `divides` are
    the keys of `parallel` by which ranks may divide weights: some optimizers need whole matrices, or whole rows.
    """

    torch_class: str
    settings: dict[str, Any]
    state: StateOf
    options: dict[str, Any] = field(default_factory=dict)
    found_inf: bool = False
    needs_ranks: bool = False
    splits: Callable[[Weight], bool] | None = None
    divides: tuple[str, ...] = ("tensor", "experts")
    leaner: str | None = None  # see `OptimizerKind.leaner`
    largest_beta2: float = 1.0  # above it the second moment is wrong
    keeps_if: str | None = None  # the key of the recipe's `optim` section that is 0 if nothing is kept
    library: str | None = None  # a library that is not always installed, and the extra of fsdptrain that installs it


ADAM_SETTINGS: dict[str, Any] = {"betas": [0.9, 0.95], "eps": 1e-8}


class OptimizerKind(TableEnum):
    """An optimizer; its name and value are the word in the recipe."""

    traits: OptimizerTraits

    adamw = (
        "adamw",
        OptimizerTraits(
            "torch.optim.AdamW",
            ADAM_SETTINGS,
            _moments,
            {"fused": True},  # a foreach step would need another temporary as large as the shard
            found_inf=True,
            leaner="adamw_8bit",
        ),
    )
    adamw_bf16 = (
        "adamw_bf16",
        OptimizerTraits(
            "fsdptrain.train.optim.AdamWBfloat16",
            ADAM_SETTINGS,
            _kept("exp_avg", "exp_avg_sq", dtype="bfloat16"),
            found_inf=True,
            leaner="adamw_8bit",
            # A value of bfloat16 has 8 bits: one that decays by less than 1 / 2**9 of it is rounded back to itself.
            largest_beta2=0.995,
        ),
    )
    adamw_8bit = (
        "adamw_8bit",
        OptimizerTraits(
            "fsdptrain.train.blockwise.RowwiseAdamW8bit",
            ADAM_SETTINGS,
            _moments_in_8_bits,
            divides=("experts",),
            library="bitsandbytes",
        ),
    )
    adafactor = (
        "adafactor",
        OptimizerTraits(
            "fsdptrain.train.sharded_optimizers.ShardedAdafactor", {}, _factors, needs_ranks=True, divides=()
        ),
    )
    muon = (
        "muon",
        OptimizerTraits(
            "fsdptrain.train.sharded_optimizers.ShardedMuon",
            ADAM_SETTINGS | {"momentum": 0.95},
            _momentum_of_matrices,
            needs_ranks=True,
            splits=is_orthogonalised,
            divides=("experts",),
        ),
    )
    lion = (
        "lion",
        OptimizerTraits(
            "fsdptrain.train.blockwise.RowwiseLion",
            {"betas": [0.9, 0.99]},
            _kept("state1", dtype="float32"),
            library="bitsandbytes",
        ),
    )
    sgd = (
        "sgd",
        OptimizerTraits(
            "torch.optim.SGD",
            {"momentum": 0.9},
            _kept("momentum_buffer"),
            {"fused": True},
            found_inf=True,
            keeps_if="momentum",
        ),
    )

    @property
    def leaner(self) -> OptimizerKind | None:
        """The optimizer with the same update, but a smaller state of lower precision; None if there is none."""
        return OptimizerKind[self.traits.leaner] if self.traits.leaner else None


DEFAULT_OPTIMIZER = OptimizerKind.adamw
