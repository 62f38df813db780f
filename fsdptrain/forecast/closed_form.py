"""The memory of a step by arithmetic, for Llama-like models: used if the simulation fails, and to check it.

docs/memory.md derives the terms. The peak is the highest of a few levels: at the loss, in the backward of each unit,
and at the optimizer. H, I, V, A, K are the sizes of hidden state, MLP, vocabulary, queries and keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdptrain.config.dtypes import BYTES
from fsdptrain.config.optimizers import Weight
from fsdptrain.config.plan import Plan, loss_chunks, loss_rows
from fsdptrain.errors import FsdptrainError
from fsdptrain.forecast.memory import Level
from fsdptrain.forecast.trace import Category

LIKE_LLAMA = ("llama", "mistral", "qwen2")


NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


Parts = dict[Category, float]  # bytes


def peak_by_arithmetic(plan: Plan, config: Any, cublas: int = 0) -> Level:
    """Return the highest level of the device's memory in a step, as `memory.peak` does for a simulated step.

    `config` has the attributes of a transformers configuration; `cublas` are the bytes that cuBLAS gets from torch.
    Units gathered ahead in forward, or after a unit's backward (BACKWARD_POST), are not counted. Raises FsdptrainError
    if this arithmetic does not apply: for another architecture, for units other than those of `auto`, for eager
    attention, and for frozen weights.
    """
    passes = [_MicroBatch(plan, config, cublas, earlier=plan.accumulation > 1, last=True)]
    if plan.accumulation > 1 and plan.recipe.fsdp.strategy.gathers_once:
        passes.append(_MicroBatch(plan, config, cublas, earlier=plan.accumulation > 2, last=False))
    return max((level for each in passes for level in each.levels()), key=lambda level: level.allocated)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and the parameters of its units: blocks, embedding, and [norm, head] (the root if tied)."""

    hidden: int
    inner: int
    vocab: int
    queries: int
    keys: int
    heads: int
    head_dim: int
    layers: int
    tied: bool

    @property
    def block(self) -> int:
        """Parameters of a block."""
        return 2 * self.hidden * (self.queries + self.keys) + 3 * self.hidden * self.inner + 2 * self.hidden

    @property
    def embedding(self) -> int:
        """Parameters of the embedding's unit; 0 if it is tied."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def head(self) -> int:
        """Parameters of [norm, head]; if tied, those of the root, which includes the embedding."""
        return self.vocab * self.hidden + self.hidden

    @property
    def all(self) -> int:
        """All parameters."""
        return self.layers * self.block + self.embedding + self.head

    def weights(self) -> list[Weight]:
        """Return all parameters, each with its shape."""
        h, norm = self.hidden, Weight((self.hidden,), decays=False, matrix=False)
        queries, keys = [Weight((self.queries, h)), Weight((h, self.queries))], [Weight((self.keys, h))] * 2
        mlp = [Weight((self.inner, h)), Weight((self.inner, h)), Weight((h, self.inner))]
        ends = [Weight((self.vocab, h), decays=False, matrix=False)]
        ends += [] if self.tied else [Weight((self.vocab, h), matrix=False)]
        return [*queries, *keys, *mlp, norm, norm] * self.layers + [*ends, norm]


def shape_of(config: Any) -> Shape:
    """Return the shape that a configuration describes. Raises FsdptrainError if it is not Llama-like."""
    kind = getattr(config, "model_type", None)
    missing = [name for name in NEEDED if not isinstance(getattr(config, name, None), int)]
    other = getattr(config, "hidden_act", "silu") != "silu" or getattr(config, "sliding_window", None) is not None
    if missing or other or kind not in (None, *LIKE_LLAMA):
        why = f"it has no {', '.join(missing)}" if missing else "its blocks are not Llama's"
        raise FsdptrainError(f"no closed form for the memory of {kind or type(config).__name__}: {why}")
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    tied = bool(getattr(config, "tie_word_embeddings", False))
    return Shape(
        config.hidden_size, config.intermediate_size, config.vocab_size, heads * size, groups * size, heads, size,
        config.num_hidden_layers, tied,
    )  # fmt: skip


class _MicroBatch:
    """The levels of a micro-batch of one plan's step; `earlier` and `last`: whether others precede it and follow it."""

    def __init__(self, plan: Plan, config: Any, cublas: int, earlier: bool, last: bool) -> None:
        recipe, self.cublas = plan.recipe, cublas
        fsdp, self.shape = recipe.fsdp, shape_of(config)
        if plan.freezes:
            raise FsdptrainError("no closed form for the memory of adapters and frozen weights")
        if fsdp.wrap != "auto" or recipe.model.attn_implementation == "eager":
            raise FsdptrainError(
                "no closed form for the memory of eager attention, or of units other than those of fsdp.wrap: auto"
            )
        self.device = plan.topology.device
        self.master = BYTES[recipe.model.dtype]
        self.compute = BYTES[fsdp.mixed_precision.param_dtype]
        self.reduce = BYTES[fsdp.mixed_precision.reduce_dtype]
        self.rows, self.length = recipe.train.micro_batch_size, recipe.data.seq_len
        self.tokens = self.rows * self.length
        on_gpu = self.device == "cuda"
        # In bfloat16 a GPU computes each document by itself, without a mask: see `model.varlen`.
        varlen = on_gpu and self.compute == 2 and self.shape.head_dim <= 256 and self.shape.head_dim % 8 == 0
        self.masked = recipe.data.packing != "none" and not varlen
        # On a GPU, the kernel for masks and for float32 has no groups: keys and values are repeated for every query.
        repeated = on_gpu and (self.masked or self.compute == 4)
        self.keys = self.shape.queries if repeated else self.shape.keys
        # On a CPU the tiled kernel uses the mask as it is, and saves no logarithms of sums: see `model.attention`.
        self.tiled = not on_gpu and (self.masked or self.compute == 2)
        self.holds_shards = fsdp.accumulation == "hold_shards"
        self.ranks, self.copied = plan.shard_size, plan.replicas > 1 or self.holds_shards
        self.state = recipe.optim.state_bytes(self.shape.weights(), recipe.model.dtype, self.ranks)
        self.accumulates, self.earlier, self.last = plan.accumulation > 1, earlier, last
        self.holds = self.accumulates and fsdp.accumulation == "hold"
        self.holds_until_last = self.accumulates and fsdp.accumulation != "reduce"
        self.offload, self.reshards = fsdp.cpu_offload, fsdp.strategy.reshards
        self.gathers = self.ranks > 1 and not (earlier and fsdp.strategy.gathers_once)  # in forward
        self.ahead = fsdp.backward_prefetch == "BACKWARD_PRE"
        self.kind, self.plain = fsdp.activation_checkpointing, recipe.train.loss == "plain"

    def levels(self) -> Iterator[Level]:
        """Yield the levels that can be the highest, in the order of the step."""
        last = self.shape.layers - 1
        kept = self.kept(self.shape.layers) + self.norm()
        around: tuple[Parts, ...] = ({"gradients": self.gradients(0)}, self.saved(kept))
        yield self.level("forward of head", *around, *self.at_gather())
        for moment, parts in self.at_loss():
            yield self.level(moment, *around, self.gathered(last + 1), *parts)
        for parts in self.at_head():
            yield self.level("backward of head", *around, self.next_up(last + 1), *parts)
        for i in range(last, -1, -1):
            yield from self.in_block(i)
        yield from self.at_embedding()
        yield self.level("optimizer", {"gradients": 0 if self.offload else self.shard(self.shape.all)})

    def level(self, moment: str, *parts: Parts) -> Level:
        """Return the level with these parts and what is allocated all the time."""
        sums: Counter[Category] = Counter()
        always: Parts = {
            "parameter shards": 0 if self.offload else self.shard(self.shape.all),
            "optimizer state": 0 if self.offload else self.state,
            "inputs and buffers": 3 * 8 * self.tokens,
            "temporaries": self.cublas,
        }
        for part in (always, *parts):
            sums.update(part)
        whole = {category: round(size) for category, size in sums.items()}
        return Level(sum(whole.values()), moment, whole)

    # ------------------------------------------------------------------------------------------ weights and gradients

    def shard(self, parameters: float) -> float:
        """Return the bytes of a rank's shard of so many parameters, in the master dtype."""
        return parameters * self.master / self.ranks

    def gradients(self, done: float) -> float:
        """Return the bytes of gradients when backward has passed the units of `done` parameters."""
        left = self.shape.all - done
        held = self.reduce / self.ranks if self.holds_shards else self.reduce  # bytes a parameter
        if self.holds_until_last and not self.last:
            return (self.shape.all if self.earlier else done) * held
        if self.holds_until_last:
            return left * held + (0 if self.offload else self.shard(done)) + self.copies(done)
        if self.offload:
            return self.copies(done)
        return self.shard(self.shape.all if self.earlier else done) + self.copies(done)

    def copies(self, done: float) -> float:
        """Return the bytes reduced over replicas that are kept to the end of backward; 0 if they are the gradients."""
        itself = self.master == self.reduce and not self.offload and (self.holds_until_last or not self.accumulates)
        return done * self.reduce / self.ranks if self.copied and not itself else 0

    def gathered(self, block: int, freed: bool = False) -> Parts:
        """Return the gathered weights in backward of a block (`layers`: the head, -1: the embedding), or right after.

        Tied weights belong to the root, which stays gathered. The embedding alone is not gathered for its backward.
        """
        s, last = self.shape, self.shape.layers
        if not self.last:
            return {"gathered parameters": self.compute * s.all}
        own = s.head if block == last else s.block if block >= 0 else 0 if self.reshards else s.embedding
        below = 0 if self.reshards or block < 0 else s.embedding + s.block * block
        root = s.head if s.tied and block < last else 0
        if freed and block < 0:
            return {}
        return {"gathered parameters": self.compute * (root + below + (0 if freed else own))}

    def next_up(self, block: int) -> Parts:
        """Return the buffer of the all-gather of the unit that is gathered ahead of its backward."""
        if not (self.reshards and self.ahead and self.ranks > 1 and block > 0):
            return {}
        return {"communication buffers": self.shape.block * self.compute}

    def reduction(self, parameters: float, last: bool = False) -> Parts:
        """Return the gradients of a unit copied for their reduction, and its result.

        On one rank they are divided first. Gradients are freed once they are copied, those of the last unit later. Held
        gradients count in `gradients`.
        """
        if self.holds and not self.last:
            return {}
        whole = parameters * self.reduce
        divided, narrowed = whole * (self.ranks == 1), self.shard(parameters) * (self.master != self.reduce)
        result = whole / self.ranks + max(divided, narrowed)
        own = parameters * self.compute
        if self.device == "cpu" and self.ranks > 1:  # the parts that other ranks sent are also allocated
            alone = not self.shape.tied and (last or parameters == self.shape.head)  # freed later than a block's
            late = own if alone and not self.holds else 0
            return {"communication buffers": 2 * whole, "gradients": late + whole / self.ranks}
        if self.holds:
            own = max(0.0, result - whole)
        else:
            own = own + whole / self.ranks if last and self.ranks > 1 else max(own, result)
        return {"communication buffers": whole, "gradients": own}

    # -------------------------------------------------------------------------------------------------- activations

    def saved(self, size: float) -> Parts:
        """Return the activations saved in forward, with the mask (a byte an entry) for tiles and recomputed blocks."""
        mask = self.rows * self.length**2 if self.masked and (self.tiled or self.kind != "none") else 0
        tables = 2 * self.compute * self.shape.head_dim * self.tokens
        return {"saved activations": size + mask, "temporaries": tables}

    def norm(self) -> float:
        """Return the bytes that a norm saves: its input in float32, and values before and after its weight.

        If compute is in float32, the saved input is not a copy.
        """
        return self.tokens * (self.shape.hidden * (4 + 2 * self.compute) + 4)

    def whole(self) -> float:
        """Return the bytes that a block saves if nothing is recomputed."""
        s, c = self.shape, self.compute
        attention = c * (2 * s.queries + 2 * self.keys) + self.sums()
        mask = c * self.rows * self.length**2 if self.masked and not self.tiled else 0
        return 2 * self.norm() + self.tokens * (4 * c * s.inner + attention) + mask

    def of_block(self, i: int) -> float:
        """Return the bytes that block i saves from forward to backward."""
        s, c = self.shape, self.compute
        if not self.recomputed(i):
            return self.whole()
        if self.kind == "selective":
            return self.tokens * (c * (2 * s.inner + 3 * s.hidden + 2 * s.queries + 2 * s.keys) + self.sums())
        return self.tokens * c * s.hidden

    def sums(self) -> int:
        """Return the bytes a token of the logarithms of sums that a fused attention kernel saves."""
        return 0 if self.tiled else 4 * self.shape.heads

    def recomputed(self, i: int) -> bool:
        """Return whether block i is recomputed in backward."""
        every = self.kind["every"] if isinstance(self.kind, dict) else 1
        return self.kind != "none" and i % every == 0

    def kept(self, blocks: int) -> float:
        """Return the bytes that the first `blocks` blocks save."""
        return sum(self.of_block(i) for i in range(blocks))

    # ------------------------------------------------------------------------------------------- moments of the step

    def at_gather(self) -> tuple[Parts, ...]:
        """Return the parts at the last gather of forward: its buffer, and the one before, which is still allocated."""
        s = self.shape
        two = s.block + (s.block if s.tied else s.head) if self.gathers else 0
        return self.gathered(s.layers), {"communication buffers": two * self.compute}

    def at_loss(self) -> Iterator[tuple[str, tuple[Parts, ...]]]:
        """Yield the moments of the loss that may need the most memory, each with its parts."""
        s, c = self.shape, self.compute
        if self.plain:  # in float32: the log-softmax, the gradient that comes into it and the one that goes out
            yield "backward of the loss", ({"logits and loss": 12 * s.vocab * self.tokens},)
            return
        count = loss_chunks(self.tokens, s.hidden)
        chunk, weight = s.vocab * -(-self.tokens // count), s.vocab * s.hidden
        arrived = (s.block if s.tied else s.head) * c if self.gathers else 0
        hidden = c * s.hidden * self.tokens if count > 1 else 0
        buffers: Parts = {"communication buffers": arrived, "temporaries": hidden}
        # Allocated for the weight's gradient: nothing, one chunk's product, or from the second chunk on a float32 sum.
        sums = 0 if count == 1 else c * weight if count == 2 else 4 * weight
        rows = s.vocab * min(loss_rows(s.vocab, self.device), -(-self.tokens // count))  # float32, two of them
        yield "forward of head", (buffers, {"logits and loss": c * chunk + 8 * rows, "gradients": sums})
        adding = c * weight if count == 1 else 4 * weight + (2 * c * weight if c < 4 else 0)
        yield "forward of head", (buffers, {"logits and loss": c * chunk, "gradients": adding})
        narrowing = c * weight + (4 * weight if count > 1 and c < 4 else 0)
        yield "backward of the loss", (self.next_up(s.layers), {"gradients": narrowing})

    def at_head(self) -> Iterator[tuple[Parts, ...]]:
        """Yield the parts in backward of [norm, head]: at the product, at the norm, and at the reduction."""
        s, c = self.shape, self.compute
        hidden, weight = c * s.hidden * self.tokens, c * s.vocab * s.hidden
        logits: Parts = {"logits and loss": c * s.vocab * self.tokens if self.plain else 0}
        yield self.gathered(s.layers), {"gradients": weight, "temporaries": hidden}, logits
        wide = (20 if c == 4 else 22) * s.hidden * self.tokens - 2 * hidden  # without what `saved` still counts
        yield self.gathered(s.layers), {"gradients": weight, "temporaries": wide}
        if not s.tied:
            yield self.gathered(s.layers, freed=True), self.reduction(s.head), {"temporaries": hidden - self.norm()}

    def in_block(self, i: int) -> Iterator[Level]:
        """Yield the levels in backward of block i: five places inside it, and the reduction after it."""
        s, c, moment = self.shape, self.compute, f"backward of model.layers.{i}"
        done = (0 if s.tied else s.head) + (s.layers - 1 - i) * s.block
        before = s.block if i < s.layers - 1 else 0 if s.tied else s.head
        tied: Parts = {"temporaries": c * s.vocab * s.hidden if s.tied else 0}
        around: tuple[Parts, ...] = (self.next_up(i), {"gradients": self.gradients(done)}, tied)
        category: Category = "recomputed activations" if self.recomputed(i) else "saved activations"
        reducing: Parts = {"communication buffers": before * self.reduce}
        for alive, passing, weights in self.inside(i):
            own: Parts = {category: alive, "temporaries": passing, "gradients": weights * c}
            yield self.level(moment, *around, self.gathered(i), self.saved(self.kept(i)), own, reducing)
        passing = c * s.hidden * self.tokens
        rest: tuple[Parts, ...] = (self.saved(self.kept(i)), {"temporaries": passing}, self.reduction(s.block))
        yield self.level(moment, *around, self.gathered(i, freed=True), *rest)

    def inside(self, i: int) -> Iterator[tuple[float, float, float]]:
        """Yield, for each place: bytes of activations, of their gradients, and parameters that have a gradient."""
        s, c, tokens = self.shape, self.compute, self.tokens
        hidden, inner = c * s.hidden * tokens, c * s.inner * tokens
        wide = (22 if c == 2 else 20) * s.hidden * tokens  # backward of a norm, in float32
        extra = 0.0
        if self.recomputed(i):
            extra = hidden * (1 if c == 2 else 0) + (hidden if self.kind == "selective" else 0)
        alive = self.whole() + extra
        mlp = s.hidden * s.inner
        yield alive - inner, hidden + 3 * inner, mlp  # at the product of gate and up
        yield alive - 3 * inner, 2 * hidden + 2 * inner, 2 * mlp  # at up
        yield alive - 4 * inner, 3 * hidden + inner, 3 * mlp  # at gate
        yield alive - 4 * inner - 2 * hidden, wide, 3 * mlp  # at the norm before the MLP
        yield extra + (4 * s.hidden * tokens), wide, s.block  # at the norm before attention

    def at_embedding(self) -> Iterator[Level]:
        """Yield the levels in backward of the embedding (of the root if tied): at the lookup, and at the reduction."""
        s, c, moment = self.shape, self.compute, "backward of embedding"
        size = s.head if s.tied else s.embedding
        grads: Parts = {"gradients": self.gradients(s.all - size)}
        looked_up: Parts = {
            "gradients": c * size * (3 if s.tied else 1),  # tied: the head's, the lookup's, and their sum
            "communication buffers": s.block * self.reduce,
            "temporaries": c * s.hidden * self.tokens,
        }
        yield self.level(moment, grads, self.gathered(-1), looked_up)
        yield self.level(moment, grads, self.gathered(-1, freed=True), self.reduction(size, last=True))
