"""The auxiliary loss of a mixture's routers over the global batch: coefficient · E · Σ f_e · P_e, as in transformers.

f_e is how often a token of a layer chooses expert e, and P_e the mean of the probability that its router gives e, both
over all tokens and layers (`load_balancing_loss_func`; Fedus et al., arXiv:2101.03961, equations 4 to 6). Only P has a
gradient, for logits z of a token with probabilities p: coefficient · E · p · (f − Σ f_e p_e) / tokens. It is added
where backward passes the logits, and needs f of the whole global batch: all micro-batches have passed the routers
before the first backward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from fsdptrain.errors import Problem, RecipeError
from fsdptrain.model.units import EXPERTS_OF_A_TOKEN, first_number

KEY, COEFFICIENT = "output_router_logits", "router_aux_loss_coef"  # of a configuration


def routers(model: Any) -> list[tuple[Any, int]]:
    """Return the routers of a model, and which of their results are the logits, as transformers records them."""
    recorders = [each for each in _recorders(model) if getattr(each, "target_class", None)]
    return [
        (module, recorder.index)
        for module in model.modules()
        for recorder in recorders
        if isinstance(module, recorder.target_class)
    ]


def _recorders(model: Any) -> list[Any]:
    for module in model.modules():
        if found := (getattr(module, "_can_record_outputs", None) or {}).get("router_logits"):
            return found if isinstance(found, list) else [found]
    return []


def is_wanted(model: Any) -> bool:
    """Return whether a model's configuration asks for the auxiliary loss."""
    return bool(getattr(model.config.get_text_config(), KEY, False))


def check_router_loss(bare: Any, compute: str) -> None:
    """Raise RecipeError if the auxiliary loss of a skeleton's configuration cannot be computed."""
    if not is_wanted(bare):
        return
    config, reason = bare.config.get_text_config(), ""
    if not (hasattr(config, COEFFICIENT) and routers(bare)):
        reason = f"{type(bare).__name__} defines no auxiliary loss of its router"
    elif compute == "float16":
        reason = "the auxiliary loss of a router is not computed with fsdp.mixed_precision.param_dtype: float16"
    if reason:
        raise RecipeError([Problem(f"{KEY}: {reason}; set {KEY}: false", "model.config")])


class RouterLoss:
    """Computes the loss and adds its gradient; does nothing unless the model's configuration asks for it."""

    def __init__(self, model: Any, device: torch.device) -> None:
        """Watch the routers of a model."""
        self.wanted, config = is_wanted(model), model.config.get_text_config()
        self._counting, self._mask = False, torch.ones(0, dtype=torch.bool)
        if self.wanted:
            found = routers(model)
            self._coefficient = getattr(config, COEFFICIENT)
            self._chosen = first_number(config, EXPERTS_OF_A_TOKEN) or 1
            experts = max(getattr(module, "num_experts", None) or module.weight.shape[0] for module, _ in found)
            # Choices, probabilities, tokens.
            self._sums = torch.zeros(2 * experts + 1, dtype=torch.float64, device=device)
            for module, index in found:
                module.register_forward_hook(functools.partial(self._watch, index))

    def begin_step(self) -> None:
        """Count anew."""
        self._sums.zero_()
        self._counting = True

    def begin_micro_batch(self, is_token: torch.Tensor) -> None:
        """Take which positions [rows, tokens] of the next forward are tokens, not padding."""
        self._mask = is_token.flatten()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watch(self, index: int, router: Any, args: Any, output: Any) -> None:
        logits, mask = output[index], self._mask
        if self._counting:
            probabilities = logits.detach().float().softmax(-1) * mask[:, None]
            chosen = probabilities.topk(self._chosen, dim=-1).indices
            experts = logits.shape[-1]
            ones = mask.double()[:, None].expand(chosen.shape)
            self._sums[:experts].scatter_add_(0, chosen.flatten(), ones.flatten())
            self._sums[experts:-1] += probabilities.double().sum(0)
            self._sums[-1] += mask.sum()
        if torch.is_grad_enabled() and logits.requires_grad:
            logits.register_hook(functools.partial(self._with_gradient, logits.detach(), mask))

    def _with_gradient(self, logits: torch.Tensor, mask: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        experts, tokens = logits.shape[-1], self._sums[-1]
        share = (self._sums[:experts] / tokens).float()
        p = logits.float().softmax(-1)
        own = p * (share - p @ share[:, None]) * (self._coefficient * experts / tokens).float()
        return grad + (own * mask[:, None]).to(grad.dtype)

    def finish_forward(self) -> torch.Tensor:
        """Sum over the ranks what all micro-batches have counted; return the loss, float32, scalar. Collective."""
        self._counting = False
        dist.all_reduce(self._sums)
        choices, probabilities = self._sums[:-1].view(2, -1) / self._sums[-1]
        return (self._coefficient * len(choices) * (choices * probabilities).sum()).float()
