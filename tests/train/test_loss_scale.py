"""Training in float16: its loss scale is that of torch.amp.GradScaler, and a checkpoint has it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import build, digest_of
from reference import cosine_rates, documents_of, largest_difference, plain_adamw, stream_of
from support import TINY, on_ranks, write_pretrained
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdptrain.train import optim
from fsdptrain.train.optim import LossScale

STEPS, BATCH, START, INTERVAL, AT = 12, 4, 2.0**23, 3, 7


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_the_scale_is_that_of_gradscaler(overflows: list[bool], interval: int) -> None:
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=interval)
    with patch.object(optim, "START", 2.0**40), patch.object(optim, "INTERVAL", interval):
        scale, never = LossScale(torch.device("cpu")), torch.zeros(())
        for overflow in overflows:
            scaler.scale(weight.sum()).backward()
            weight.grad.fill_(math.inf if overflow else 1.0)  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
            norm = torch.tensor(math.inf if overflow else 1.0)
            scale.update(~never.bool(), torch.ones(()))  # of a step that is blocked: it changes nothing
            scale.update(scale.overflows(torch.ones(()), norm), never)
            scale = LossScale(torch.device("cpu"), scale.state())  # as a resume does
            assert scale.value.item() == scaler.get_scale()


def test_a_gradient_that_is_not_finite_with_a_scale_of_1_is_no_overflow() -> None:
    one, infinite = torch.ones(()), torch.tensor(math.inf)
    assert LossScale(torch.device("cpu"), [2.0, 0.0]).overflows(one, infinite)
    assert not LossScale(torch.device("cpu"), [1.0, 0.0]).overflows(one, infinite)
    assert not LossScale(torch.device("cpu"), [2.0, 0.0]).overflows(infinite, infinite)


def plain_curve(folder: Path, recipe: Path, scaler: torch.amp.GradScaler) -> list[list[float]]:
    """[loss, gradient norm, loss scale] a step of a plain loop: a sequence at a time, clip at 1, AdamW, decay 0.1."""
    model, stream = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), stream_of(recipe)[0]
    params, optimizer, curve = dict(model.named_parameters()), plain_adamw(model), []
    for step, rate in enumerate(cosine_rates(3e-4, STEPS)):
        rows = [documents_of(stream.corpus, [number]) for number in stream.at(range(step * BATCH, (step + 1) * BATCH))]
        tokens, mean = sum(int((labels >= 0).sum()) for *_, labels in rows), 0.0
        for ids, mask, labels in rows:
            cast = {name: param.half() for name, param in params.items()}
            inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
            logits = torch.func.functional_call(model, cast, kwargs=inputs, tie_weights=True).logits.float()
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
            scaler.scale(loss).backward()
            mean += loss.item()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        curve.append([mean, norm.item(), scaler.get_scale()])
        for group in optimizer.param_groups:
            group["lr"] = rate
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return curve


def test_float16_trains_as_a_plain_loop_with_gradscaler_and_resumes_bitwise(tmp_path: Path) -> None:
    recipe = write_pretrained(
        tmp_path, LlamaConfig(**TINY), train__steps=STEPS, train__global_batch_size=BATCH,
        fsdp__mixed_precision={"param_dtype": "float16"}, checkpoint__every=None,
    )  # fmt: skip
    words = {"start": START, "interval": INTERVAL, "at": AT, "overrides": []}
    found, other = on_ranks(2, scaled, tmp_path / "ranks", recipe=str(recipe), **words)
    torch.set_num_threads(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=START, growth_interval=INTERVAL)
    expected = plain_curve(tmp_path / "model", recipe, scaler)
    assert [step[2] for step in found["curve"]] == [step[2] for step in expected]
    finite = [math.isfinite(step[1]) for step in expected]
    assert not finite[0] and any(finite[:6]) and not all(finite[6:]), "it begins too high, and is too high again"
    pairs = [(own, plain) for own, plain, is_finite in zip(found["curve"], expected, finite, strict=True) if is_finite]
    assert max(largest_difference(*([step[:2] for step in steps] for steps in zip(*pairs, strict=True)))) < 2e-3
    assert len(found["skipped"]) == finite.count(False)
    assert found["skipped"][0]["what"] == "step 1: the gradient overflows float16 with a loss scale of " + (
        f"{START:g}, which is halved"
    )
    for rank in (found, other):
        assert rank["resumed"] and rank["again"] == rank["curve"][AT:] and rank["curve"] == found["curve"]


# --- on every rank -------------------------------------------------------------------------------------------------


def scaled(recipe: str, overrides: list[str], start: float, interval: int, at: int) -> dict[str, Any]:
    """Train in float16 with a loss scale that begins with `start`; save after step `at`, and resume from there.

    Returns [loss, gradient norm, loss scale] of each step, what was reported as skipped, and whether weights, state and
    loss scale at the end are those of the resumed run (`resumed`), which reports the same steps again (`again`).
    """
    found: dict[str, Any] = {}
    with patch.object(optim, "START", start), patch.object(optim, "INTERVAL", interval):
        for name in ("curve", "again"):
            run = build(recipe, overrides)
            events: list[Any] = []
            run.reporter.event = lambda kind, events=events, **fields: events.append((kind, fields))  # type: ignore
            report, made = run.add_step, []

            def add_step(queued: Any, stats: Any, report: Any = report, made: Any = made) -> None:
                made.append([stats.loss, stats.grad_norm, stats.loss_scale])
                report(queued, stats)

            run.add_step = add_step  # type: ignore[method-assign]
            run.reads_late = name == "again"  # the same, one step late
            for step in range(run.engine.steps_made, run.sizes.total_steps):
                run.step(step)
                if name == "curve" and step + 1 == at:
                    run.save(at, wait=True)
            run.read_steps()
            run.prefetch.close()
            found[name], end = made, [digest_of(run), run.engine.loss_scale.state()]  # type: ignore[union-attr]
            found.setdefault("skipped", [fields for kind, fields in events if kind == "skip"])
            found["resumed"] = found.setdefault("end", end) == end
    return found
