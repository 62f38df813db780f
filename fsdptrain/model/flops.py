"""Count the floating-point operations that a step of training must do."""

from __future__ import annotations

from typing import Any

from fsdptrain.model.skeleton import layer_values
from fsdptrain.model.units import tied

# What configurations call the number of experts, and how many of them a token uses.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def model_flops(bare: Any, tokens: int, seq_len: int) -> float:
    """Return the FLOPs of forward and backward for T tokens: 6·N·T + 12·L·A·S·T (Chowdhery et al., arXiv:2204.02311).

    N counts the weights that multiply every token: all parameters of the unsharded skeleton `bare` except an untied
    embedding table, and of a mixture's experts the share that a token uses. L is the number of layers, A heads × head
    size, 0 without attention, S the sequence length. A frozen weight counts 4 instead of 6: it has no gradient, but
    passes gradients on.
    """
    config = bare.config.get_text_config()
    experts, used = (
        next((n for name in names if isinstance(n := getattr(config, name, None), int)), None)
        for names in (EXPERTS, EXPERTS_OF_A_TOKEN)
    )
    share = used / experts if experts and used else 1.0
    # All experts of a layer are one tensor with three dimensions.
    used_by_token = {
        p: p.numel() * (share if p.ndim == 3 and p.shape[0] == experts else 1.0) for p in bare.parameters()
    }
    weights = sum(used_by_token.values())
    if not tied(bare):
        table = bare.get_input_embeddings().weight
        weights -= table.numel()
        used_by_token.pop(table)
    frozen = sum(count for param, count in used_by_token.items() if not param.requires_grad)
    layers = config.num_hidden_layers
    heads, sizes = (layer_values(config, name) for name in ("num_attention_heads", "head_dim"))
    heads, sizes = (values * layers if len(values) == 1 else values for values in (heads, sizes))
    width = sum(n * (size or config.hidden_size // n) for n, size in zip(heads, sizes, strict=True) if n)
    return 6.0 * weights * tokens + 12.0 * width * seq_len * tokens - 2.0 * frozen * tokens
