"""What each objective learns from a row, what it compares with, and what it measures.

No other module compares the names of objectives: they read these properties. To add one, add a row to `Objective`, a
section with its keys to `config.schema`, and its loss to `LOSSES` of `model.objectives`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdptrain.config.enums import TableEnum
from fsdptrain.config.formats import Format

OF_PAIRS = ("rewards_chosen", "rewards_rejected", "margin", "accuracy")
OF_ROWS = ("rewards_desirable", "rewards_undesirable", "margin", "kl")
MARGIN = "margin"  # the difference between the means of the two measures before it
SHOWN = {  # measures in tables, in their order → title and form
    "accuracy": ("accuracy", ".1%"), MARGIN: (MARGIN, ".4f"), "kl": ("KL", ".4f"),
    "cross_entropy": ("cross-entropy", ".4f"),
    "rewards_chosen": ("chosen", "+.4f"), "rewards_rejected": ("rejected", "+.4f"),
    "rewards_desirable": ("desirable", "+.4f"), "rewards_undesirable": ("undesirable", "+.4f"),
}  # fmt: skip


class Objective(TableEnum):
    """An objective; its value is the word in the recipe, and the section of `train` with its keys.

    `says`: what it learns. `answers`: how many answers of a row it judges as wholes; 0: its loss is a sum over label
    tokens. `measures`: what events have of it beside the loss. `needs_reference`: it compares the log-probabilities of
    answers with those under the model at step 0. `source`: where it is defined. `needs_teacher`: it learns the
    probabilities of the model in the section `teacher`.
    """

    says: str
    answers: int
    measures: tuple[str, ...]
    needs_reference: bool
    source: str
    needs_teacher: bool

    next_token = "next_token", "predict the trained tokens", 0, (), False, "", False
    dpo = (
        "dpo", "prefer the chosen answer of each pair to the rejected one", 2, OF_PAIRS, True,
        "Rafailov et al., arXiv:2305.18290", False,
    )  # fmt: skip
    ipo = (
        "ipo", "prefer it by a fixed margin, which does not grow without end where all agree", 2, OF_PAIRS, True,
        "Azar et al., arXiv:2310.12036", False,
    )  # fmt: skip
    simpo = (
        "simpo", "prefer it by its mean log-probability, without a reference", 2, OF_PAIRS, False,
        "Meng et al., arXiv:2405.14734", False,
    )  # fmt: skip
    orpo = (
        "orpo", "fine-tune on it, and prefer it by its odds, without a reference", 2, OF_PAIRS, False,
        "Hong et al., arXiv:2403.07691", False,
    )  # fmt: skip
    kto = (
        "kto", "make desirable answers likelier and undesirable ones less likely", 1, OF_ROWS, True,
        "Ethayarajh et al., arXiv:2402.01306", False,
    )  # fmt: skip
    distill = (
        "distill", "predict the trained tokens as a teacher does", 0, ("kl", "cross_entropy"), False,
        "Hinton et al., arXiv:1503.02531", True,
    )  # fmt: skip

    @property
    def unit(self) -> str:
        """What the loss is a mean over."""
        return self.formats[0].unit

    @property
    def formats(self) -> list[Format]:
        """The formats of data that it can be trained on."""
        return [form for form in Format if form.answers == self.answers]

    @property
    def shares_sequences(self) -> bool:
        """Whether a sequence has several documents even if rows are not packed: the two answers of a pair."""
        return self.answers > 1

    @property
    def estimates_kl(self) -> bool:
        """Whether a step begins with a forward pass over mismatched rows: prompts with the answers of other rows."""
        return self.needs_reference and "kl" in self.measures

    @property
    def averaged(self) -> list[str]:
        """The measures that each unit has, or some units."""
        return [name for name in self.measures if name != MARGIN]

    def means(self, sums: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        """Return the measures from the sums of those that are averaged, and over how many units; without those of 0."""
        pairs = zip(self.averaged, sums, counts, strict=True)
        found = {name: total / count for name, total, count in pairs if count}
        if self.measures and {*self.measures[:2]} <= found.keys():
            found[MARGIN] = found[self.measures[0]] - found[self.measures[1]]
        return {name: found[name] for name in self.measures if name in found}

    @classmethod
    def usual(cls, form: Format) -> Objective:
        """Return the first objective for data of a format."""
        return next(each for each in cls if form in each.formats)


DEFAULT_OBJECTIVE = Objective.next_token
