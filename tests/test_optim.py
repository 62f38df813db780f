"""The learning rate is a pure function of the step, of the shape its name says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdptrain.optim import learning_rate, warmup_steps
from fsdptrain.schema import Optim, Schedule

OPTIM = Optim(lr=1.0)


def rates(total: int, **schedule: object) -> list[float]:
    return [learning_rate(step, total, OPTIM, Schedule(**schedule)) for step in range(total)]  # type: ignore[arg-type]


def test_warm_up_is_linear_and_counts_fractions_or_steps() -> None:
    assert rates(10, name="constant", warmup=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]
    assert rates(10, name="constant", warmup=0.4) == rates(10, name="constant", warmup=4)
    assert rates(3, name="constant", warmup=0) == [1, 1, 1]
    assert rates(2, name="cosine", warmup=8) == [0.5, 1]


def test_decays_end_at_the_floor() -> None:
    for name in ("linear", "cosine", "wsd"):
        curve = rates(101, name=name, warmup=0, min_lr=0.1)
        assert curve[0] == 1 and curve[-1] == pytest.approx(0.1)
        assert curve == sorted(curve, reverse=True)


def test_shapes() -> None:
    assert rates(101, name="linear", warmup=0, min_lr=0)[50] == pytest.approx(0.5)
    assert rates(101, name="cosine", warmup=0, min_lr=0)[25] == pytest.approx(0.5 + 0.5 * 2**-0.5)
    wsd = rates(101, name="wsd", warmup=0, min_lr=0)
    assert wsd[:81] == [1] * 81 and wsd[90] == pytest.approx(1 - 9 / 19)


@given(
    st.integers(1, 3000), st.sampled_from(["constant", "linear", "cosine", "wsd"]), st.floats(0, 4000), st.floats(0, 1),
    st.data(),
)  # fmt: skip
def test_a_rate_is_never_above_the_peak_nor_zero_in_warm_up(
    total: int, name: str, warmup: float, floor: float, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, total - 1))
    schedule = Schedule(name=name, warmup=warmup, min_lr=floor)  # type: ignore[arg-type]
    rate = learning_rate(step, total, OPTIM, schedule)
    assert 0 <= rate <= 1 + 1e-12
    if step >= warmup_steps(total, schedule):
        assert rate >= min(1.0, floor) - 1e-12
    else:
        assert rate > 0
