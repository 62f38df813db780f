"""What each optimizer is: its class, the recipe keys it reads, and what it keeps for each parameter.

To add an optimizer, add a row to `OptimizerKind`. Its parameter groups (which parameters decay) are made by
`train.optim`, the same for every optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fsdptrain.config.dtypes import BYTES, Dtype


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer keeps for each parameter, by its key in the optimizer's state and in a checkpoint.

    It has the parameter's shape; `dtype` None is the parameter's dtype. A `counter` is instead one number, the steps
    made: it is not saved, because a checkpoint's manifest has the step.
    """

    key: str
    dtype: Dtype | None = None
    counter: bool = False


class OptimizerKind(StrEnum):
    """An optimizer; its name and value are the word in the recipe.

    `torch_class` is called with the values of the keys `settings` of the recipe's `optim` section, and with `options`.
    Its step does nothing, and is not counted, when its attribute `found_inf` is a tensor of 1.0: torch's fused ones do.
    `aliases` are names that other tools use.
    """

    torch_class: str
    settings: tuple[str, ...]
    options: dict[str, Any]
    state: tuple[StateTensor, ...]
    aliases: tuple[str, ...]

    adamw = (
        "adamw",
        "torch.optim.AdamW",
        ("lr", "betas", "eps"),
        {"fused": True},  # a foreach step would need another temporary as large as the shard
        (StateTensor("exp_avg"), StateTensor("exp_avg_sq"), StateTensor("step", "float32", counter=True)),
        ("adam", "adamw_torch", "adamw_torch_fused"),
    )

    def __new__(
        cls,
        word: str,
        torch_class: str,
        settings: tuple[str, ...],
        options: dict[str, Any],
        state: tuple[StateTensor, ...],
        aliases: tuple[str, ...] = (),
    ) -> OptimizerKind:
        """Make the member of a row."""
        member = str.__new__(cls, word)
        member._value_ = word
        member.torch_class, member.settings, member.options = torch_class, settings, options
        member.state, member.aliases = state, aliases
        return member

    @property
    def saved(self) -> list[str]:
        """The keys of the state that a checkpoint holds."""
        return [tensor.key for tensor in self.state if not tensor.counter]

    @property
    def counters(self) -> list[str]:
        """The keys of the state that count steps."""
        return [tensor.key for tensor in self.state if tensor.counter]

    def state_bytes(self, parameters: int, master: str) -> int:
        """Return the bytes of the state of so many parameters with master weights in dtype `master`.

        Counters are not included: a few bytes for each tensor of the model.
        """
        return parameters * sum(BYTES[tensor.dtype or master] for tensor in self.state if not tensor.counter)


DEFAULT_OPTIMIZER = OptimizerKind.adamw
