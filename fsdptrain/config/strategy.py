"""What each sharding strategy means.

No other module compares the names of strategies: they read these properties. To add a strategy, add a row to `Strategy`
and, if its ranks form a new kind of mesh, the mesh to `parallel.world`.
"""

from __future__ import annotations

from typing import Literal

from fsdptrain.config.enums import TableEnum

CopySpan = Literal["world", "group", "rank"]  # the ranks that share one copy of the model: all, fsdp.shard_size, one


class Strategy(TableEnum):
    """A sharding strategy; its value is the word in the recipe.

    `span`: the ranks that share one copy of the weights, gradients and optimizer state. `reshards`: gathered weights
    are freed after forward and gathered again for backward; otherwise they stay until backward.
    """

    span: CopySpan
    reshards: bool

    FULL_SHARD = "FULL_SHARD", "world", True
    SHARD_GRAD_OP = "SHARD_GRAD_OP", "world", False
    HYBRID_SHARD = "HYBRID_SHARD", "group", True
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2", "group", False
    NO_SHARD = "NO_SHARD", "rank", False

    @property
    def replicates(self) -> bool:
        """Whether there may be several copies of the model, over which gradients are summed: the mesh has two axes."""
        return self.span != "world"

    @property
    def gathers(self) -> bool:
        """Whether a rank gathers parameters from others."""
        return self.span != "rank"

    @property
    def gathers_once(self) -> bool:
        """Whether weights stay gathered until the last micro-batch of a step: the others then gather nothing.

        Without other ranks to gather from, this would save only a copy, and the peak would be higher.
        """
        return not self.reshards and self.gathers

    @property
    def in_groups(self) -> bool:
        """Whether `fsdp.shard_size` sets how many ranks share a copy."""
        return self.span == "group"

    @property
    def fastest_alone(self) -> Strategy:
        """The strategy that gives the same result on one rank in the least time: one that keeps weights gathered."""
        return Strategy.SHARD_GRAD_OP if self is Strategy.FULL_SHARD else self

    def ranks_per_copy(self, shard_size: int | None, world: int, node: int) -> int:
        """Return how many of `world` ranks, `node` on each node, share one copy; `shard_size` is the recipe's."""
        return {"world": world, "group": shard_size or node, "rank": 1}[self.span]

    def sizes_to_try(self, nodes: int, node: int) -> list[int]:
        """Return the numbers of ranks per copy worth trying on `nodes` × `node` ranks, smallest first.

        Groups are of whole nodes. A size at which the strategy is the same as another one is left out.
        """
        if self.span == "rank":
            return [1]
        if self.span == "group":
            return [node * count for count in range(1, nodes) if nodes % count == 0 and node * count > 1]
        return [nodes * node] if self.reshards or nodes * node > 1 else []


DEFAULT_STRATEGY = Strategy.FULL_SHARD
