"""Kinds of training that need less memory: they change the numerics, or what is trained.

Only the user can decide on such a change. So they are offered apart from other plans for the same job, and only where
no plan fits without offload.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdptrain.config.schema import Recipe
from fsdptrain.plan.plan import Counts, Plan, varied


@dataclass(frozen=True)
class Kind:
    """A kind of training, by the overrides that turn a recipe into it; `effect` says what they change."""

    name: str
    effect: str
    overrides: dict[str, Any]


def leaner_kinds(plan: Plan) -> list[Kind]:
    """Return the kinds that need less memory than the plan's, and are possible for it: the smallest change first."""
    recipe, found = plan.recipe, []
    smaller = recipe.optim.name.leaner
    if recipe.adapter.kind is None and smaller is not None:
        found.append(Kind(smaller.value, "changes the numerics (moments in 8 bits)", {"optim.name": smaller}))
    if recipe.adapter.kind is None and recipe.model.dtype != "bfloat16":
        effect = "changes the numerics (8 significant bits)"
        found.append(Kind("bfloat16 master weights", effect, {"model.dtype": "bfloat16"}))
    if not plan.freezes and plan.pretrained:
        # A recipe that sets the dtype of its export exports a whole model.
        export = {"export.adapter": "merged"} if recipe.export.dtype != Recipe().export.dtype else {}
        rank = f"adapters of rank {recipe.adapter.r}, usually at a higher optim.lr"
        effect = f"changes what is trained ({rank}; the model is frozen)"
        found.append(Kind("LoRA", effect, {"adapter.kind": "lora"} | export))
        effect = f"changes what is trained and the numerics ({rank}; the model is frozen, in 4 bits)"
        found.append(Kind("QLoRA", effect, {"adapter.kind": "qlora"} | export))
    elif recipe.adapter.kind == "lora" and not recipe.adapter.use_dora:
        found.append(Kind("QLoRA", "changes the numerics (the frozen model is in 4 bits)", {"adapter.kind": "qlora"}))
    return found


def all_kinds(plan: Plan) -> list[tuple[Kind, Plan]]:
    """Return training of the whole model and every leaner kind, each with the plan that trains so."""
    whole = varied(plan, {"adapter.kind": None, "model.trainable": []})
    kinds = [Kind("full", "trains the whole model", {}), *leaner_kinds(whole)]
    return [(kind, varied(whole, kind.overrides)) for kind in kinds]


def least_counts(plan: Plan, counts: Counts) -> Counts:
    """Return the least numbers of parameters of a plan; `counts` are those of another kind of training of its model.

    Adapters are not counted, and all frozen weights of QLoRA count as quantised.
    """
    model = counts.all - counts.adapters
    if plan.recipe.adapter.kind is None:
        return Counts(model, counts.trained if plan.freezes else model)
    return Counts(model, 0, 0, model if plan.recipe.adapter.kind == "qlora" else 0)
