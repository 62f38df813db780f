"""The schema of a recipe: every key with its type, default and limits, and what it does in the docstring above it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdptrain.config.formats import DEFAULT_FORMAT, Format, LongRows
from fsdptrain.config.objectives import DEFAULT_OBJECTIVE, Objective
from fsdptrain.config.optimizers import DEFAULT_OPTIMIZER, ComputeDtype, Dtype, OptimizerKind, StateTensor, Weight
from fsdptrain.config.strategy import DEFAULT_STRATEGY, Strategy

# What several keys need to have an effect.
GATHERS = {"fsdp.strategy": [strategy for strategy in Strategy if strategy.gathers]}
PARTLY_TRAINED = {"data.format": [form for form in Format if form.is_trained_in_part]}
RENDERED = {"data.format": [form for form in Format if form.renders_chat]}
DPO, IPO, SIMPO, ORPO, KTO = ({"train.objective": [each]} for each in Objective if each.answers)
DISTILL = {"train.objective": [each for each in Objective if each.needs_teacher]}


def key(default: Any, **limits: Any) -> Any:
    """Declare a recipe key that has limits, or a default that is a list or a mapping.

    `needs`, another key or {key: values}, says when the key has an effect: if that key is set, or has one of these
    values. `unset` is the value with which it needs nothing, beside None, False, "" and [].

    The limits are `at_least`, `above`, `at_most`, `pair_below` (of a list: two numbers in [0, N)), `forms`, `values`,
    `items` and `any_text`. `forms` lists what a key of several types accepts: a string or None is that value, a type is
    any value of it, a pattern is any string that matches it, `list[str]` is such a list, and a dict is a mapping with
    exactly these keys (those that end in `"?"` are optional). `values` is the same for the values of a mapping whose
    keys are free; `items` is the dataclass of the items of a list. `any_text` allows strings that are empty, white
    space or control characters.
    """
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=limits)
    return field(default=default, metadata=limits)


@dataclass
class Model:
    """The model, where it comes from, and the dtype of its master weights.

    id: Hub id or local folder; null, with a whole `config`: a model from scratch
    revision: branch, tag or commit of a model on the Hub
    tokenizer: folder or Hub id (default: model.id), or {train: N}: a byte-level BPE of N tokens trained on data.path
    add_tokens: special tokens to add to the tokenizer, such as ["<|think|>"]; the embedding and the head grow by their
        rows, which are at first the mean of the others (random if the model is)
    config: overrides of the model's config or, with `model_type`, a whole config
    ignore_weights: tensors of the files, by name or pattern, that the architecture does not know; they are not exported
    init: pretrained: load the weights; random: draw them from `seed`
    dtype: dtype of the master weights and of the optimizer state
    trainable: train only these parameters, given by names, parts of names (`lm_head`, `layers.31`) or patterns (`*`
        matches any characters), and freeze the others; empty: train all
    attn_implementation: attention kernel, by its name in transformers; sdpa on CUDA is torch's varlen kernel, without
        masks, if that supports the model (cuDNN's on Hopper and Blackwell if sequences are single documents); auto:
        that, else sdpa (on a CPU in tiles if that is faster), else eager
    """

    id: str | None = None
    revision: str | None = key(None, needs="model.id")
    tokenizer: Any = key(None, forms=(None, str, {"train": int}))
    add_tokens: list[str] = key([])
    config: dict[str, Any] = key({})
    ignore_weights: list[str] = key([], needs={"model.init": ["pretrained"]})
    init: Literal["pretrained", "random"] = "pretrained"
    dtype: Dtype = "float32"
    trainable: list[str] = key([])
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention"] = "auto"


@dataclass
class Adapter:
    """Adapters (LoRA): small matrices that are trained beside the frozen weights of a pretrained model.

    kind: lora: train low-rank adapters and freeze the model's own weights; qlora: the same, with the frozen weights of
        linear layers in 4 bits (NF4); null: train the model itself
    r: rank of the adapters
    alpha: an adapter's output is multiplied by alpha / r
    dropout: share of an adapter's inputs that are set to 0
    target: the layers that get an adapter: all-linear (all but the head), or a list of names, parts of names (`q_proj`,
        `experts`) and patterns (`*` matches any characters), in which all-linear may be one
    modules_to_save: modules that are trained as a whole beside the adapters, by name or its end
    use_dora: DoRA: also train the norm of every weight vector
    use_rslora: multiply by alpha / √r instead of alpha / r
    from: folder of an adapter to continue from, as peft saves it; it determines the other keys but `dropout`
    """

    kind: Literal["lora", "qlora"] | None = None
    r: int = key(16, needs="adapter.kind", at_least=1, at_most=2**14)
    alpha: float = key(32.0, needs="adapter.kind", above=0)
    dropout: float = key(0.0, needs="adapter.kind", unset=0.0, at_least=0, at_most=0.9)
    target: Any = key("all-linear", needs="adapter.kind", forms=("all-linear", list[str]))
    modules_to_save: list[str] = key([], needs="adapter.kind")
    use_dora: bool = key(False, needs="adapter.kind")
    use_rslora: bool = key(False, needs="adapter.kind")
    from_: str | None = key(None, needs="adapter.kind")


Treatment = LongRows | Literal["continued"]  # of rows that are longer than a sequence


@dataclass
class SourceKeys:
    """The keys of `data` that each of several sources may have for itself.

    path: file, glob or folder (of several splits: that to train on), also in an object store (s3://BUCKET/…, gs://,
        az://), a list of them, or a Hub data set as org/name[:config[:split]]
    revision: branch, tag or commit of a Hub data set; a resumed run uses the commit of its first start
    format: what a row contains: text, a conversation, a prompt with its completion, a preference between two answers,
        or an answer with a judgement
    columns: field → its column, where the names differ; a list of columns is joined, and its last one is trained
    train_on: which tokens count in the loss (format text: all)
    separator: text between prompt and completion, a part of the prompt ("\\n": a line break)
    long_rows: what happens to rows of more than seq_len tokens; null: split for text, else cut
    turns: the assistant's turns that a conversation trains, for templates that render earlier turns otherwise (without
        their reasoning): all; last: the last one alone; split: each in a row of its own, as the last one of its row
    chat_template_kwargs: values for variables of the chat template, such as {enable_thinking: false}
    max_rows: read at most this many rows
    """

    path: Any = key(None, forms=(None, str, list[str]))
    revision: str | None = None
    format: Format = DEFAULT_FORMAT
    columns: dict[str, Any] = key({}, values=(str, list[str]))
    train_on: Literal["all", "completion"] = key("completion", needs=PARTLY_TRAINED, unset="all")
    separator: str = key(
        "", needs={"data.format": [form for form in Format if form.has_prompt or form.answers]}, any_text=True
    )
    long_rows: LongRows | None = key(None, needs={"data.packing": ["bfd", "none"]})
    turns: Literal["all", "last", "split"] = key(
        "all",
        needs={"data.format": [form for form in Format if form.is_chat], "data.train_on": ["completion"]},
        unset="all",
    )
    chat_template_kwargs: dict[str, Any] = key({}, needs=RENDERED, unset={})
    max_rows: int | None = key(None, at_least=1)


@dataclass
class DataSource(SourceKeys):
    """One of several sources of data; a key of `data` that it leaves out is as in `data`.

    name: what events and tables call it; default: the last part of its path, without suffixes
    weight: its share of the sequences that are trained, relative to the weights of the others
    epochs: without weights: how often it is read in one epoch of the run (default: 1)
    """

    name: str | None = None
    weight: float | None = key(None, above=0)
    epochs: float | None = key(None, above=0)


@dataclass
class Data(SourceKeys):
    """The training data, and how its rows become sequences of tokens.

    sources: in place of `path`, a mixture: a list of {path, weight or epochs, name} and any key above, which is then
        for that source alone; an epoch of the run has as many sequences as all sources together
    window: prepare and read the files of `path` in groups of this many, drawn by `seed`, the next one while one is
        trained, and remove what was prepared of those before; null: all files before the first step
    seq_len: tokens per sequence
    packing: bfd: best fit of rows in random order; concat: one continuous stream of them; none: one row per sequence
    chat_template: a chat template, as a file or a Jinja text, instead of the tokenizer's; the export has it too
    eval: held-out data: {path, max_rows}, beside `sources` with {source}, the name of the one as whose rows they are
        read; or {fraction} of the tokens of every source, as whole rows chosen by `seed`
    """

    sources: list[dict[str, Any]] = key([], items=DataSource, any_text=True)
    window: int | None = key(None, needs="train.steps", at_least=1)
    seq_len: int = key(2048, at_least=8)
    packing: Literal["bfd", "concat", "none"] = "bfd"
    chat_template: str | None = key(None, needs=RENDERED, any_text=True)
    eval: Any = key(None, forms=(None, {"path": str, "max_rows?": int, "source?": str}, {"fraction": float}))

    @property
    def treatment(self) -> Treatment:
        """What happens to a row of more than `seq_len` tokens; a stream continues it in the next sequence."""
        return "continued" if self.packing == "concat" else self.long_rows or self.format.long_rows


@dataclass
class Teacher:
    """The model whose probabilities are learned: computed before step 1 and cached, so that it is not held beside.

    id: Hub id or local folder of a model with the same tokenizer
    revision: branch, tag or commit of a teacher on the Hub
    top_k: likeliest tokens at each trained token whose probabilities are kept; the others count together, as one
    temperature: the logits of teacher and student are divided by it; above 1, unlikely tokens count more
    """

    id: str | None = key(None, needs=DISTILL)
    revision: str | None = key(None, needs="teacher.id")
    top_k: int = key(64, needs=DISTILL, at_least=1)
    temperature: float = key(1.0, needs=DISTILL, above=0.0)


@dataclass
class MixedPrecision:
    """The dtypes of compute, of gradient reduction and of the model's buffers.

    param_dtype: dtype of gathered parameters, activations and matrix products; float16, for GPUs without bfloat16,
        comes with a dynamic loss scale
    reduce_dtype: dtype in which gradients are summed over ranks (afterwards model.dtype)
    buffer_dtype: dtype of floating-point buffers; null: as the model creates them
    """

    param_dtype: ComputeDtype = "bfloat16"
    reduce_dtype: Dtype = "float32"
    buffer_dtype: Dtype | None = None


KINDS_OF_RECOMPUTATION = {"kind": Literal["none", "full", "selective"], "offload?": bool, "keep_attention?": bool}


@dataclass(frozen=True)
class Recomputation:
    """What backward recomputes: of every how many layers, and what becomes of that which a layer keeps."""

    kind: Literal["none", "full", "selective"]
    every: int = 1
    offload: bool = False
    keep_attention: bool = False

    @property
    def beside_compiler(self) -> bool:
        """Whether it needs what cannot be part of a compiled graph."""
        return self.offload or self.keep_attention


@dataclass
class Fsdp:
    """How parameters, gradients and optimizer state are sharded over the ranks.

    strategy: what is sharded over which ranks, and whether gathered weights are freed after forward
    shard_size: HYBRID_*: ranks that share one copy; default: the ranks of a node
    wrap: what becomes a unit: auto (the model's decoder layers), a list of class names, or {min_params: N}
    backward_prefetch: BACKWARD_PRE: gather the next unit before this unit's backward; BACKWARD_POST: after it; NONE:
        when needed
    forward_prefetch: extra units to gather ahead in forward
    accumulation: reduce: reduce gradients in every micro-batch (least memory); hold: only in the last one (least
        traffic); hold_shards: reduce them to shards in every one, and sum these over copies (HYBRID_*, NO_SHARD) and
        copy them to the host (cpu_offload) only in the last
    bucket_cap_mb: NO_SHARD: units are joined while their gradients have at most so many MiB, which one all-reduce then
        sums, as in DDP's buckets: faster where units are small, as in small models or beside adapters; null: none are
        joined
    cpu_offload: keep parameter shards, gradients and optimizer state in host memory
    activation_checkpointing: what backward recomputes: none, full, selective (all but matrix products and attention),
        {every: n} layers; {kind: full, keep_attention: true, offload: true}: full, but attention; what a layer keeps
        (its input, and the result of attention) waits in host memory
    """

    strategy: Strategy = DEFAULT_STRATEGY
    shard_size: int | None = key(
        None, needs={"fsdp.strategy": [strategy for strategy in Strategy if strategy.in_groups]}, at_least=1
    )
    wrap: Any = key("auto", forms=("auto", list[str], {"min_params": int}))
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NONE"] = key(
        "BACKWARD_PRE", needs={"fsdp.strategy": [strategy for strategy in Strategy if strategy.reshards]}, unset="NONE"
    )
    forward_prefetch: int = key(0, needs=GATHERS, unset=0, at_least=0, at_most=16)
    accumulation: Literal["reduce", "hold", "hold_shards"] = "reduce"
    bucket_cap_mb: int | None = key(
        None, needs={"fsdp.strategy": [strategy for strategy in Strategy if not strategy.gathers]}, at_least=1
    )
    cpu_offload: bool = False
    activation_checkpointing: Any = key(
        "none", forms=("none", "full", "selective", {"every": int}, KINDS_OF_RECOMPUTATION)
    )

    @property
    def recomputation(self) -> Recomputation:
        """What `activation_checkpointing` says, in one form."""
        value = self.activation_checkpointing
        return Recomputation(**{"kind": "full", **value} if isinstance(value, dict) else {"kind": value})


@dataclass
class Parallel:
    """How ranks share the computation of a row.

    context: ranks that share each row, for long sequences: each has a part of the tokens, and in attention of the heads
    tensor: ranks of a node that divide the weights of each decoder layer, and share rows: for models that are too large
        for FSDP alone, or steps of fewer sequences than ranks
    experts: ranks that divide the experts of each layer, and send tokens to them instead of gathering all experts
    pipeline: groups of ranks that have the decoder layers one after another, and pass micro-batches on: for models
        over many nodes with slow links
    schedule: order of forward (F) and backward (B) passes in a pipeline: 1f1b: one of each in turn; gpipe: all F, then
        all B; interleaved: 1f1b, with several stages on each rank
    chunks: stages on each rank with schedule: interleaved (default: 2)
    stage_layers: number of decoder layers of each stage, from the first; default: stages that take about equally long
    """

    context: int = key(1, at_least=1)
    tensor: int = key(1, at_least=1)
    experts: int = key(1, at_least=1)
    pipeline: int = key(1, at_least=1)
    schedule: Literal["1f1b", "gpipe", "interleaved"] = key("1f1b", unset="1f1b")
    chunks: int | None = key(None, at_least=2, needs={"parallel.schedule": ["interleaved"]})
    stage_layers: list[int] | None = None

    @property
    def ranks_of_row(self) -> int:
        """The ranks that share each row."""
        return self.context * self.tensor

    @property
    def stages(self) -> int:
        """The stages of the pipeline: stage k is on the ranks of group k modulo `pipeline`."""
        return self.pipeline * self.stages_of_rank

    @property
    def stages_of_rank(self) -> int:
        """The stages that each rank has."""
        return self.chunks or 2 if self.schedule == "interleaved" else 1


def _optimizers_with(setting: str) -> dict[str, Any]:
    return {"optim.name": [kind for kind in OptimizerKind if setting in kind.traits.settings]}


@dataclass
class Optim:
    """The optimizer.

    name: the optimizer; muon orthogonalises the updates of hidden matrices and uses AdamW for the rest
    lr: peak learning rate
    betas: decay of the first and second moments; lion: of its momentum in the update and in itself, [0.9, 0.99]
    eps: added to the root of the second moment
    momentum: sgd and muon: decay of the momentum (muon: 0.95); sgd with 0 keeps no state
    weight_decay: decay of matrices, not of norms, biases and embeddings; decoupled, but sgd adds it to the gradient
    max_grad_norm: clip the global gradient norm to this; null: never
    """

    name: OptimizerKind = DEFAULT_OPTIMIZER
    lr: float = key(2e-5, at_least=0)
    betas: list[float] = key(DEFAULT_OPTIMIZER.traits.settings["betas"], needs=_optimizers_with("betas"), pair_below=1)
    eps: float = key(DEFAULT_OPTIMIZER.traits.settings["eps"], needs=_optimizers_with("eps"), above=0)
    momentum: float = key(0.9, needs=_optimizers_with("momentum"), at_least=0, at_most=0.9999)
    weight_decay: float = key(0.1, at_least=0)
    max_grad_norm: float | None = key(1.0, above=0)

    def state(self, weight: Weight, master: Dtype) -> list[StateTensor]:
        """Return what the optimizer keeps for a parameter with master weights in `master`."""
        traits = self.name.traits
        return [] if traits.keeps_if and not getattr(self, traits.keeps_if) else traits.state(weight, master)

    def state_bytes(self, weights: Iterable[Weight], master: Dtype, ranks: int = 1) -> float:
        """Return the bytes of the state of these parameters on each of `ranks`, with master weights in `master`."""
        tensors = [tensor for weight in weights for tensor in self.state(weight, master)]
        return sum(tensor.nbytes if tensor.whole else tensor.nbytes / ranks for tensor in tensors)


@dataclass
class Schedule:
    """The learning rate as a function of the step.

    name: shape after the warm-up
    warmup: length of the warm-up: a fraction of all steps if below 1, else a number of steps
    min_lr: lowest learning rate, as a fraction of optim.lr
    """

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup: float = key(0.03, at_least=0)
    min_lr: float = key(0.1, needs={"schedule.name": ["linear", "cosine", "wsd"]}, at_least=0, at_most=1)


@dataclass
class Dpo:
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290); the reference is the model at step 0.

    beta: how strongly the model is held to the reference: the larger, the closer it stays
    label_smoothing: share of the pairs that are assumed to be labelled the wrong way round
    sft_weight: add this times the cross-entropy of each chosen answer, averaged over its tokens
    """

    beta: float = key(0.1, needs=DPO, above=0.0)
    label_smoothing: float = key(0.0, needs=DPO, at_least=0.0, at_most=0.5)
    sft_weight: float = key(0.0, needs=DPO, at_least=0.0)


@dataclass
class Ipo:
    """Identity preference optimization (Azar et al., arXiv:2310.12036), on means over the tokens of an answer.

    beta: the chosen answer is to gain 1 / (2 · beta) more than the rejected one: the larger, the less is learned
    """

    beta: float = key(0.1, needs=IPO, above=0.0)


@dataclass
class Simpo:
    """Simple preference optimization (Meng et al., arXiv:2405.14734), without a reference.

    beta: factor of the mean log-probability of an answer's tokens, its reward
    gamma: by how much the chosen answer's reward is to exceed the rejected one's
    """

    beta: float = key(2.0, needs=SIMPO, above=0.0)
    gamma: float = key(1.0, needs=SIMPO, at_least=0.0)


@dataclass
class Orpo:
    """Odds ratio preference optimization (Hong et al., arXiv:2403.07691): fine-tuning and preference in one.

    beta: weight of the preference beside the cross-entropy of the chosen answer, averaged over its tokens
    """

    beta: float = key(0.1, needs=ORPO, above=0.0)


@dataclass
class Kto:
    """Kahneman-Tversky optimization (Ethayarajh et al., arXiv:2402.01306), on answers that are judged one by one.

    beta: how strongly the model is held to the reference: the larger, the closer it stays
    desirable_weight: weight of the losses of desirable answers; desirable_weight × their number should be 1 to 4/3
        times undesirable_weight × the number of the others
    undesirable_weight: weight of the losses of undesirable answers
    """

    beta: float = key(0.1, needs=KTO, above=0.0)
    desirable_weight: float = key(1.0, needs=KTO, at_least=0.0)
    undesirable_weight: float = key(1.0, needs=KTO, at_least=0.0)


@dataclass
class Distill:
    """What is learned from the teacher's probabilities (Hinton et al., arXiv:1503.02531), at its temperature T.

    weight: the loss of a token is weight · T² · KL + (1 − weight) · cross-entropy
    kl: forward: from the teacher to the student, which covers all that the teacher finds likely; reverse: from the
        student to the teacher, which may keep to a part of it
    """

    weight: float = key(1.0, needs=DISTILL, at_least=0.0, at_most=1.0)
    kl: Literal["forward", "reverse"] = key("forward", needs=DISTILL, unset="forward")


@dataclass
class Train:
    """What to learn, how long, and in what batches.

    epochs: passes over the data; null: train.steps says how long
    steps: optimizer steps; replaces epochs
    global_batch_size: sequences per optimizer step, over all ranks
    micro_batch_size: sequences that a rank computes at a time
    objective: next_token: predict the trained tokens; dpo, ipo, simpo, orpo: prefer the chosen answer of each pair to
        the rejected one; kto: make desirable answers likelier and undesirable ones less likely; distill: predict the
        trained tokens as a teacher does
    loss: chunked: logits and loss of one chunk of tokens at a time; plain: of the whole micro-batch at once
    compile: apply torch.compile to every decoder layer; auto: on GPUs, if there is a C compiler
    float8: round the operands of the products of decoder layers' linear layers to float8, with a scale for each row, or
        for each tensor, which is faster and coarser; null: compute them in param_dtype
    deterministic: refuse kernels that are not bitwise reproducible
    router_bias_rate: balance the experts of models whose routers have a bias for choosing (DeepSeek-V3): raise it by so
        much after each step for experts with fewer tokens than the mean, and lower it for those with more; 0: leave it
    on_nonfinite: stop the run, or skip the step, if its loss or gradient is not finite; such a step changes no weights
    max_skipped: with on_nonfinite: skip, the most steps in a row that may be skipped
    """

    epochs: float | None = key(1.0, above=0)
    steps: int | None = key(None, at_least=1)
    global_batch_size: int = key(64, at_least=1)
    micro_batch_size: int = key(1, at_least=1)
    objective: Objective = DEFAULT_OBJECTIVE
    dpo: Dpo = field(default_factory=Dpo)
    ipo: Ipo = field(default_factory=Ipo)
    simpo: Simpo = field(default_factory=Simpo)
    orpo: Orpo = field(default_factory=Orpo)
    kto: Kto = field(default_factory=Kto)
    distill: Distill = field(default_factory=Distill)
    loss: Literal["chunked", "plain"] = "chunked"
    compile: Any = key("auto", forms=("auto", bool))
    float8: Literal["rowwise", "tensorwise"] | None = None
    deterministic: bool = False
    router_bias_rate: float = key(0.0, at_least=0.0, below=1.0)
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped: int = key(3, needs={"train.on_nonfinite": ["skip"]}, at_least=1)


@dataclass
class Eval:
    """Held-out evaluation.

    every: steps between evaluations; the first weights and the last step are always evaluated
    patience: end the run after this many evaluations without a lower held-out loss
    best_of: the source whose held-out loss says which step is best, for patience, keep_best and export; null: that of
        all
    prompts: texts that the model continues greedily at each evaluation; for a source of chats, messages of a user
    max_new_tokens: the most tokens of each continuation; all ranks compute a forward pass for each
    """

    every: int | None = key(None, needs="data.eval", at_least=1)
    patience: int | None = key(None, needs="eval.every", at_least=1)
    best_of: str | None = key(None, needs="eval.every")
    prompts: list[str] = key([], needs="data.eval", any_text=True)
    max_new_tokens: int = key(64, needs="eval.prompts", unset=64, at_least=1)


@dataclass
class Checkpoint:
    """Sharded checkpoints, from which a run resumes.

    every: steps between checkpoints; null: only when the run is stopped or ends
    path: where the checkpoints go: a folder that all ranks see, or a place in an object store (s3://BUCKET/FOLDER,
        gs://, az://) for this run alone; null: the run folder
    keep: number of verified checkpoints to keep
    keep_best: also keep this many checkpoints with the lowest held-out loss (eval.best_of)
    async: write in the background; training waits only for the copy to host memory
    verify: read-back: compare each file with memory after it was written, by reading it from the disk, before older
        checkpoints are removed; checksum: store its checksum only, which a resume compares anyway
    resume: auto: continue from the newest valid checkpoint in output_dir
    """

    every: int | None = key(500, at_least=1)
    path: str | None = None
    keep: int = key(2, at_least=1)
    keep_best: int | None = key(None, needs="eval.every", at_least=1)
    async_: bool = key(True, needs="checkpoint.every")
    verify: Literal["read-back", "checksum"] = "read-back"
    resume: Literal["auto", "never"] = "auto"


@dataclass
class Export:
    """The exported Hugging Face folder.

    at_end: export when training ends
    which: the weights to export: those of the last step, or those with the lowest held-out loss
    dtype: dtype of the exported weights
    adapter: with an adapter, separate: the adapter alone, in peft's format and model.dtype; merged: the model, with the
        adapter added to its weights; both: merged, with the adapter in the subfolder `adapter`
    merge_base: with adapter.kind: qlora, the weights that the adapter is merged into. original: those of the files;
        dequantized: those that the adapter was trained with
    compare: open the folder in a fresh process at the end of a run, and compare its logits with those of the trained
        model before it replaces an earlier one
    """

    at_end: bool = True
    which: Literal["last", "best"] = key("last", needs="checkpoint.keep_best", unset="last")
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    adapter: Literal["separate", "merged", "both"] = key("separate", needs="adapter.kind")
    merge_base: Literal["original", "dequantized"] = key(
        "original", needs={"adapter.kind": ["qlora"], "export.adapter": ["merged", "both"]}, unset="original"
    )
    compare: bool = True


TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]  # each the name of its library, too


@dataclass
class Log:
    """What a run records.

    every: steps between `step` events
    trackers: trackers that get what metrics.jsonl records: tensorboard, wandb, mlflow and trackio; the variables of
        their libraries (WANDB_MODE, MLFLOW_TRACKING_URI, …) say where to, and have the keys to their servers
    tensorboard: short for log.trackers: true is [tensorboard], false is []
    project: project of wandb and trackio, and experiment of mlflow; null: what WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME
        say, else `fsdptrain`
    forecast: on GPUs: forecast the run when it has ended, and compare the two
    profile: {steps: [FIRST, LAST]}: write a trace of these steps on each rank and, on GPUs, a memory snapshot
    """

    every: int = key(1, at_least=1)
    trackers: list[TrackerName] = key(["tensorboard"])
    tensorboard: bool | None = None
    project: str | None = None
    forecast: bool = True
    profile: Any = key(None, forms=(None, {"steps": list[int]}))

    @property
    def chosen_trackers(self) -> list[TrackerName]:
        """The trackers that `trackers`, or its short form, names."""
        if self.tensorboard is not None:
            return ["tensorboard"] if self.tensorboard else []
        return list(dict.fromkeys(self.trackers))


# No cluster is larger, and what is done for each rank ends in seconds.
MAX_NODES, MAX_WORKERS = 2**14, 2**10

NODE_RANGE = re.compile(r"([1-9][0-9]{0,5}):([1-9][0-9]{0,5})")


@dataclass
class Launch:
    """The worker processes and the nodes.

    nproc_per_node: workers per node; auto: one per GPU that gets a micro-batch in each step, or 2 on a CPU
    nnodes: number of nodes; start the same command on each; under Slurm, MPI or Kubeflow it is known. MIN:MAX: when a
        node is lost, the run goes on with the others, if they are at least MIN, from the last checkpoint
    rdzv_endpoint: host:port of the first node, for nnodes > 1 on plain hosts
    max_restarts: restarts after a worker or a node is lost; errors that would happen again are not retried
    timeout_s: seconds without a finished micro-batch before a run counts as hung; three times that before the first
        step
    grace_s: seconds that a stop may take, checkpoint included, before the workers are killed; null: no limit
    """

    nproc_per_node: Any = key("auto", forms=("auto", int), at_least=1, at_most=MAX_WORKERS)
    nnodes: Any = key(1, forms=(int, NODE_RANGE), at_least=1, at_most=MAX_NODES)
    rdzv_endpoint: str | None = None
    max_restarts: int = key(0, at_least=0)
    timeout_s: int = key(300, at_least=1)
    grace_s: int | None = key(None, at_least=1)


def node_range(nnodes: int | str) -> tuple[int, int]:
    """Return the least and the largest number of nodes that `launch.nnodes` allows."""
    if isinstance(nnodes, int):
        return nnodes, nnodes
    least, _, most = nnodes.partition(":")
    return int(least), int(most)


@dataclass
class Recipe:
    """A training recipe.

    Field names are the YAML keys; `async_` and `from_` are the keys `async` and `from`, which are Python keywords.

    name: name of the run, used in output_dir
    seed: seed of the initial weights, the data order and dropout
    output_dir: the run folder
    """

    name: str = "run"
    seed: int = key(42, at_least=0, at_most=2**31 - 1)
    output_dir: str = "runs/${name}"
    model: Model = field(default_factory=Model)
    adapter: Adapter = field(default_factory=Adapter)
    data: Data = field(default_factory=Data)
    teacher: Teacher = field(default_factory=Teacher)
    fsdp: Fsdp = field(default_factory=Fsdp)
    parallel: Parallel = field(default_factory=Parallel)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    export: Export = field(default_factory=Export)
    log: Log = field(default_factory=Log)
    launch: Launch = field(default_factory=Launch)

    @property
    def documents_share_sequences(self) -> bool:
        """Whether a sequence may hold several documents: packed rows, or the two answers of a pair, never packed."""
        return self.data.packing != "none" or self.train.objective.shares_sequences
