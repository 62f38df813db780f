"""The independent reference: a plain single-process PyTorch loop over transformers' own model, on whole batches."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from fsdptrain.config.optimizers import OptimizerKind
from fsdptrain.config.reader import load
from fsdptrain.config.schema import Optim
from fsdptrain.data.corpus import Corpus, Stream
from fsdptrain.data.prepare import prepare
from fsdptrain.data.tokenizer import load_tokenizer
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import find_topology


def stream_of(recipe: Path, *overrides: str) -> tuple[Stream, list[int], Corpus]:
    """The data of a recipe (which rows are in which batch, and their tokens), and the sequences that are held out."""
    written = load(recipe, [*overrides])
    plan = make_plan(written, find_topology(written.recipe, dict(os.environ)))
    return prepare(plan, load_tokenizer(plan, lambda *_: None), lambda *_: None)


class Operators(TorchDispatchMode):
    """Notes the operators that are called while it is entered, and the elements of their largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.largest = list[Any](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.called.append(func)
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


def most_allocated(operation: Callable[..., object], *arguments: Any) -> int:
    """Return the most bytes that torch's allocator holds at a time for an operation on the CPU, beside those before."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        operation(*arguments)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


Documents = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, mask and labels [documents, longest]


def documents_of(corpus: Corpus, sequences: Sequence[int]) -> Documents:
    """Return the documents of some sequences, each in a row of its own: nothing is packed, a mask hides the padding.

    They are made from the tokens of the data alone: a label is the next token of the same row, if it is trained.
    """
    pieces = [piece for n in sequences for piece in corpus.pieces[corpus.offsets[n] : corpus.offsets[n + 1]]]
    shape = (len(pieces), max(length for _, length, _ in pieces))
    ids, mask = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    labels = torch.full(shape, -100)
    for row, (first, length, end) in enumerate(pieces):
        tokens = torch.from_numpy(corpus.tokens[first:end].astype("int64"))
        following = tokens[1 : length + 1]  # of a piece of a row, its last token predicts the next one of the row
        ids[row, :length], mask[row, :length] = tokens[:length], 1
        trained = torch.from_numpy(corpus.trained[first + 1 : first + 1 + len(following)].copy())
        labels[row, : len(following)] = torch.where(trained, following, -100)
    return ids, mask, labels


def batches_of(stream: Stream, size: int, steps: int) -> list[Documents]:
    return [documents_of(stream.corpus, stream.at(range(step * size, (step + 1) * size))) for step in range(steps)]


def cosine_rates(lr: float, steps: int) -> list[float]:
    """Learning rates by the defaults: 3% of the steps to warm up, then a cosine that ends at a tenth of `lr`."""
    warmup = round(0.03 * steps)
    angles = [math.pi * (step - warmup) / (steps - 1 - warmup) for step in range(warmup, steps)]
    return [lr * (step + 1) / warmup for step in range(warmup)] + [lr * (0.55 + 0.45 * math.cos(a)) for a in angles]


def plain_curve(
    folder: str, batches: Sequence[Documents], rates: Sequence[float], compute: torch.dtype
) -> list[list[float]]:
    """[loss, gradient norm] a step: mean cross-entropy over the batch's labels, clip at 1, AdamW(0.9, 0.95), decay 0.1.

    Master weights are float32; in the bf16 policy every weight is cast for compute, and its gradient back.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    params = dict(model.named_parameters())
    optimizer = plain_adamw(model)
    curve = []
    for batch, rate in zip(batches, rates, strict=True):
        loss = mean_loss(model, params, batch, compute)
        loss.backward()
        curve.append([loss.item(), clipped_step(optimizer, rate)])
    return curve


def plain_adamw(model: Any) -> torch.optim.Optimizer:
    """AdamW(0.9, 0.95) for what is trained, with decay 0.1 for matrices but the embedding."""
    embedding, groups = model.get_input_embeddings(), dict[float, list[Any]]()
    undecayed = {id(param) for param in embedding.parameters()} if isinstance(embedding, torch.nn.Embedding) else set()
    for param in filter(lambda param: param.requires_grad, model.parameters()):
        groups.setdefault(0.1 if param.ndim > 1 and id(param) not in undecayed else 0.0, []).append(param)
    made = [{"params": params, "weight_decay": decay} for decay, params in groups.items()]
    return torch.optim.AdamW(made, betas=(0.9, 0.95), fused=True)


def clipped_step(optimizer: torch.optim.Optimizer, rate: float) -> float:
    """Clip the gradients at 1, make a step at this rate, and drop them; return their norm before."""
    norm = torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


@torch.no_grad()
def plain_loss(folder: str, documents: Documents) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return mean_loss(model, dict(model.named_parameters()), documents, torch.float32).item()


def mean_loss(model: Any, params: dict[str, Any], documents: Documents, compute: torch.dtype) -> torch.Tensor:
    ids, mask, labels = documents
    cast = {name: param.to(compute) for name, param in params.items()}
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    made = torch.func.functional_call(model, cast, kwargs=inputs, tie_weights=True)
    loss = functional.cross_entropy(made.logits.flatten(0, 1).float(), labels.flatten())
    auxiliary = getattr(made, "aux_loss", None)  # of the router, if the configuration asks for it
    return loss if auxiliary is None else loss + model.config.router_aux_loss_coef * auxiliary


@torch.no_grad()
def plain_log_probs(folder: str, corpus: Corpus) -> torch.Tensor:
    """The log-probability of the trained tokens of each row that a corpus has, alone in a micro-batch; float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for first, length, end in corpus.pieces[corpus.pieces[:, 0].argsort()]:
        ids = torch.from_numpy(corpus.tokens[first : first + length].astype("int64"))
        trained = torch.from_numpy(corpus.trained[first + 1 : min(first + length + 1, end)].copy())
        log_probs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
        found.append((log_probs.gather(1, ids[1:, None])[:, 0] * trained).sum())
    return torch.stack(found)


Judge = Callable[..., tuple[torch.Tensor, list[torch.Tensor]]]


def plain_answers(
    policy: Any, reference: Any, batches: Sequence[Documents], rates: Sequence[float], judge: Judge,
    feedback: Sequence[tuple[Documents, torch.Tensor]] = (),
) -> list[list[float]]:  # fmt: skip
    """[loss, gradient norm, *measures] a step of an objective that judges answers, each a document, in float32.

    `judge` gets the log-probability of each answer under the policy and the reference, and its number of tokens; with
    `feedback`, the mismatched documents of each step and which answers are desirable, also the estimate of the KL
    divergence, and the latter. Optimizer as in `plain_curve`.
    """
    optimizer, curve = plain_adamw(policy), []

    def answers(model: Any, documents: Documents) -> torch.Tensor:
        """Sum log-probabilities over the trained tokens of each document, in float64."""
        ids, mask, labels = documents
        log_probs = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.double().log_softmax(-1)
        return (log_probs.gather(2, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)).sum(1)

    for step, (documents, rate) in enumerate(zip(batches, rates, strict=True)):
        more = []
        with torch.no_grad():
            before = answers(reference, documents)
            if feedback:
                others, desirable = feedback[step]
                kl = (answers(policy, others) - answers(reference, others)).mean().clamp(min=0)
                more = [kl, desirable]
        loss, measures = judge(answers(policy, documents), before, (documents[2] != -100).sum(1), *more)
        loss.backward()
        curve.append([loss.item(), clipped_step(optimizer, rate), *(value.item() for value in measures)])
    return curve


def judge_dpo(beta: float = 0.1, smoothing: float = 0.0, sft: float = 0.0) -> Judge:
    def judge(now: Any, before: Any, tokens: Any) -> Any:
        rewards = beta * (now - before)
        margin = rewards[0::2] - rewards[1::2]
        losses = -(1 - smoothing) * torch.log(torch.sigmoid(margin)) - smoothing * torch.log(torch.sigmoid(-margin))
        return (losses - sft * (now / tokens)[0::2]).mean(), measures_of_pairs(rewards)

    return judge


def judge_ipo(beta: float = 0.1) -> Judge:
    def judge(now: Any, before: Any, tokens: Any) -> Any:
        chosen, rejected = ((now - before) / tokens).view(-1, 2).unbind(1)
        return ((chosen - rejected - 0.5 / beta) ** 2).mean(), measures_of_pairs(beta * (now - before))

    return judge


def judge_simpo(beta: float = 2.0, gamma: float = 1.0) -> Judge:
    def judge(now: Any, before: Any, tokens: Any) -> Any:
        rewards = beta * now / tokens
        return -torch.log(torch.sigmoid(rewards[0::2] - rewards[1::2] - gamma)).mean(), measures_of_pairs(rewards)

    return judge


def judge_orpo(beta: float = 0.1) -> Judge:
    def judge(now: Any, before: Any, tokens: Any) -> Any:
        odds = (now / tokens).exp() / (1 - (now / tokens).exp())
        losses = -torch.log(torch.sigmoid(torch.log(odds[0::2] / odds[1::2])))
        return (-(now / tokens)[0::2] + beta * losses).mean(), measures_of_pairs(beta * now / tokens)

    return judge


def judge_kto(beta: float = 0.1, good: float = 1.0, bad: float = 1.0) -> Judge:
    def judge(now: Any, before: Any, tokens: Any, kl: Any, desirable: Any) -> Any:
        gains, rewards = beta * (now - before - kl), beta * (now - before)
        losses = torch.where(desirable, good * (1 - torch.sigmoid(gains)), bad * (1 - torch.sigmoid(-gains)))
        means = [rewards[desirable].mean(), rewards[~desirable].mean()]
        return losses.mean(), [*means, means[0] - means[1], kl]

    return judge


def measures_of_pairs(rewards: torch.Tensor) -> list[torch.Tensor]:
    margin = rewards[0::2] - rewards[1::2]
    return [rewards[0::2].mean(), rewards[1::2].mean(), margin.mean(), (margin > 0).double().mean()]


def plain_distillation(
    folder: str, teacher: str, batches: Sequence[Documents], rates: Sequence[float], keys: dict[str, Any]
) -> list[list[float]]:
    """[loss, gradient norm, KL, cross-entropy] a step of a loop that holds both models, in float32.

    `keys` are weight, kl, temperature and top_k. Tokens that only the teacher's embedding has are left out.
    """
    student, frozen = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (folder, teacher))
    optimizer, temperature, weight = plain_adamw(student), keys["temperature"], keys["weight"]
    curve = []
    for (ids, mask, labels), rate in zip(batches, rates, strict=True):
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        logits = student(**inputs).logits[labels != -100]
        with torch.no_grad():
            p = (frozen(**inputs).logits[labels != -100][:, : logits.shape[1]] / temperature).double().softmax(-1)
        q, kept = (logits.double() / temperature).softmax(-1), p.topk(min(keys["top_k"], p.shape[1] - 1)).indices
        outside = torch.ones_like(p).scatter(1, kept, 0)
        p, q = (torch.cat([each.gather(1, kept), (each * outside).sum(1, keepdim=True)], 1) for each in (p, q))
        p, q = (p, q) if keys["kl"] == "forward" else (q, p)
        kl, cross_entropy = (p * (p / q).log()).sum(1).mean(), functional.cross_entropy(logits, labels[labels != -100])
        loss = weight * temperature**2 * kl + (1 - weight) * cross_entropy
        loss.backward()
        curve.append([loss.item(), clipped_step(optimizer, rate), kl.item(), cross_entropy.item()])
    return curve


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str = "") -> None:
    assert found.keys() == expected.keys(), what
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), (what, name)


def largest_difference(a: list[list[float]], b: list[list[float]]) -> tuple[float, float]:
    left, right = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    worst = ((left - right).abs() / right.abs()).amax(dim=0)
    return worst[0].item(), worst[1].item()


def worst_gradient(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest distance of a gradient from the expected one, relative to its length, and its name."""
    assert found.keys() == expected.keys()
    lengths = {name: float(gradient.norm()) for name, gradient in expected.items()}
    assert min(lengths.values()) > 0, "a gradient that is zero shows nothing"
    return max((float((found[name] - expected[name]).norm()) / lengths[name], name) for name in expected)


# Every optimizer with its own defaults, by the words that follow `optim.name=`.
OPTIMIZERS = {str(kind): Optim(name=kind, lr=1e-2, **kind.traits.settings) for kind in OptimizerKind}
OPTIMIZERS["sgd optim.momentum=0"] = dataclasses.replace(OPTIMIZERS["sgd"], momentum=0.0)


def library_optimizers(name: str, decayed: list[Any], others: list[Any], matrices: list[Any]) -> list[Any]:
    """Return optimizers of the libraries on whole tensors, which together do what `optim.name` should do.

    `matrices` are those of `decayed` that are hidden matrices. The weight decay is 0.1, the learning rate 1e-2.
    """
    from bitsandbytes import optim as bnb
    from transformers.optimization import Adafactor

    lr, adam = 1e-2, {"betas": (0.9, 0.95), "eps": 1e-8}
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if name == "adamw":
        return [torch.optim.AdamW(groups, lr=lr, fused=True, **adam)]
    if name == "adamw_bf16":  # moments of float32, which have the values of bfloat16 after each step
        made = torch.optim.AdamW(groups, lr=lr, fused=True, **adam)
        made.register_step_post_hook(lambda *_: [
            state[key].copy_(state[key].bfloat16()) for state in made.state.values() for key in state if key != "step"
        ])  # fmt: skip
        return [made]
    if name.startswith("sgd"):
        return [torch.optim.SGD(groups, lr=lr, momentum=0.0 if "momentum=0" in name else 0.9, fused=True)]
    if name == "lion":
        return [bnb.Lion(groups, lr=lr, betas=(0.9, 0.99))]
    if name == "adafactor":
        return [Adafactor(groups, lr=lr, scale_parameter=False, relative_step=False)]
    if name == "muon":
        groups[0]["params"] = [p for p in decayed if not any(p is m for m in matrices)]
        settings = {"momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}
        return [
            torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, **settings),
            torch.optim.AdamW(groups, lr=lr, fused=True, **adam),
        ]  # fmt: skip
    assert name == "adamw_8bit"
    made = []
    for smallest, chosen in ((0, True), (10**9, False)):  # matrices with whole blocks in 8 bits, the rest in float32
        mine = [[p for p in group["params"] if (p.ndim > 1 and p.shape[-1] % 256 == 0) == chosen] for group in groups]
        kept = [{"params": p, "weight_decay": g["weight_decay"]} for p, g in zip(mine, groups, strict=True) if p]
        made += [bnb.AdamW8bit(kept, lr=lr, min_8bit_size=smallest, **adam)] if kept else []
    return made


def in_nf4(compute: torch.dtype) -> dict[str, Any]:
    """Options of `from_pretrained` with which bitsandbytes quantises the linear layers of a model on the CPU."""
    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": compute}
    config = BitsAndBytesConfig(load_in_4bit=True, **settings)
    return {"dtype": compute, "quantization_config": config, "device_map": "cpu"}


def peft_curve(
    folder: str,
    config: Any | None,
    start: dict[str, torch.Tensor],
    batches: Sequence[Documents],
    rates: Sequence[float],
    compute: torch.dtype,
    whole: Sequence[str] = (),
    quantised: bool = False,
) -> tuple[list[list[float]], Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]]:
    """[loss, gradient norm] a step of a plain loop over peft's model; `start` are the adapter's first weights by name.

    Also returned: a function from weights of what is trained to the gradients of the first batch, without clipping. The
    base is in `compute`, what is trained in float32: matrices decay, vectors and embeddings do not. Parameters with a
    part of their name in `whole` are trained, too. No `config`: there are no adapters. `quantised`: transformers lets
    bitsandbytes quantise the linear layers of the base.
    """
    from peft import get_peft_model

    options = in_nf4(compute) if quantised else {"dtype": torch.float32}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    prefix = "base_model.model." if config else ""
    if config:
        model = get_peft_model(model, config)
    model.train()
    params = {name.removeprefix(prefix): param for name, param in model.named_parameters()}
    _set_values(params, start)
    for name, param in params.items():
        param.requires_grad_(name in start or any(part in name for part in whole))
        if not param.requires_grad and param.is_floating_point():
            param.data = param.data.to(compute)
    trained = {name: param for name, param in params.items() if param.requires_grad}
    optimizer = plain_adamw(model)

    def backward(batch: Documents) -> float:
        whole = {f"{prefix}{name}": param for name, param in params.items() if param.is_floating_point()}
        loss = mean_loss(model, whole, batch, compute)
        loss.backward()
        return loss.item()

    curve = [[backward(batch), clipped_step(optimizer, rate)] for batch, rate in zip(batches, rates, strict=True)]

    def gradients(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        _set_values(params, values)
        backward(batches[0])
        found = {name: param.grad for name, param in trained.items() if param.grad is not None}
        optimizer.zero_grad()
        return found

    return curve, gradients


@torch.no_grad()
def _set_values(params: dict[str, Any], values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        params[name].copy_(value)
