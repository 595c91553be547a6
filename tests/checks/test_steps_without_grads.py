"""Inside `checked()`: `optimizer.step()` that was left in a loop whose gradients are returned."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, AdamW, Optimizer, optimizer

import gradkit
from gradkit._core import user_code

Loop: TypeAlias = Callable[[nn.Module, Optimizer], object]

pytestmark = pytest.mark.filterwarnings("error::gradkit.GradkitWarning")


def model_on(device: torch.device) -> nn.Linear:
    return nn.Linear(3, 1, device=device)


def loss_of(model: nn.Module) -> Tensor:
    device = next(model.parameters()).device
    loss: Tensor = model(torch.ones(2, 3, device=device)).square().sum()
    return loss


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    grads: dict[str, Tensor] = gradkit.value_and_grads(loss_of(model), model)[1]
    return grads


def leftover_step(model: nn.Module, optimizer: Optimizer) -> None:
    grads_of(model)
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def leftover_step_with_a_scheduler(model: nn.Module, optimizer: Optimizer) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    gradkit.per_loss_grads([loss_of(model)], model)
    optimizer.step()
    scheduler.step()


def of_an_optimizer(_: nn.Module, optimizer: Optimizer) -> None:
    (first, *_rest) = optimizer.param_groups[0]["params"]
    gradkit.simultaneous_grads([(first * first).sum()], [optimizer])
    optimizer.step()


def closure_that_writes_nothing(model: nn.Module, _: Optimizer) -> None:
    def closure() -> Tensor:
        value: Tensor = gradkit.value_and_grads(loss_of(model), model)[0]
        return value

    LBFGS(model.parameters()).step(closure)


@pytest.mark.parametrize(
    "loop",
    [leftover_step, leftover_step_with_a_scheduler, of_an_optimizer, closure_that_writes_nothing],
)
def test_a_step_without_gradients_is_seen(device: torch.device, loop: Loop) -> None:
    model = model_on(device)
    with (
        gradkit.checked(),
        pytest.warns(gradkit.GradkitWarning, match=r"with every \.grad None.*gradkit\.step_\("),
    ):
        loop(model, AdamW(model.parameters()))


def step(model: nn.Module, optimizer: Optimizer) -> None:
    gradkit.step_(optimizer, model, grads_of(model))
    gradkit.step_(optimizer, model, grads_of(model), max_norm=0.1)


def written(model: nn.Module, optimizer: Optimizer) -> None:
    gradkit.write_grads_(model, grads_of(model))
    optimizer.step()


def written_and_cleared_by_a_hook(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    written(model, optimizer)


def looked_at_first(model: nn.Module, optimizer: Optimizer) -> None:
    grads_of(model)
    loss_of(model).backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(2):
        gradkit.add_grads_(model, grads_of(model))
    optimizer.step()


def another_optimizer_is_idle(model: nn.Module, optimizer: Optimizer) -> None:
    step(model, optimizer)
    SGD([torch.ones(2, requires_grad=True)], lr=0.1).step()


def closure_that_writes(model: nn.Module, unused: Optimizer) -> None:
    lbfgs = LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        value, grads = gradkit.value_and_grads(loss_of(model), model)
        gradkit.write_grads_(model, grads)
        loss: Tensor = value
        return loss

    for _ in range(2):
        with gradkit.capture_grads(model):
            lbfgs.step(closure)


@pytest.mark.parametrize(
    "loop",
    [
        step,
        written,
        written_and_cleared_by_a_hook,
        looked_at_first,
        accumulated,
        another_optimizer_is_idle,
        closure_that_writes,
    ],
)
def test_nothing_is_said_of_a_loop_that_trains(device: torch.device, loop: Loop) -> None:
    model = model_on(device)
    with gradkit.checked():
        loop(model, AdamW(model.parameters()))


def test_it_is_said_once_at_the_line_of_the_step(device: torch.device) -> None:
    model = model_on(device)
    adam, sgd = AdamW(model.parameters()), SGD(model.parameters(), lr=0.1)
    with gradkit.checked(), gradkit.checked(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            leftover_step(model, adam)
            leftover_step(model, sgd)
    assert [w.filename for w in caught] == [__file__]
    assert str(caught[0].message).startswith("AdamW has stepped")


def test_a_step_is_that_of_a_plain_loop(device: torch.device) -> None:
    plain, ours = model_on(device), model_on(device)
    ours.load_state_dict(plain.state_dict())
    step(plain, AdamW(plain.parameters()))
    with gradkit.checked():
        step(ours, AdamW(ours.parameters()))
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))


def test_no_hook_is_left_nor_counted(device: torch.device) -> None:
    tables = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
    before, made = [dict(table) for table in tables], user_code.hooks_made()
    with gradkit.checked():
        assert [len(table) for table in tables] == [len(table) + 1 for table in before]
    with pytest.raises(ZeroDivisionError), gradkit.checked():
        raise ZeroDivisionError
    assert [dict(table) for table in tables] == before
    assert user_code.hooks_made() == made
    assert not any(before)  # a loop outside pays nothing


def test_the_second_of_two_optimizers(device: torch.device) -> None:
    body, head = nn.Linear(3, 4, device=device), nn.Linear(4, 1, device=device)
    opt_body, opt_head = (SGD(m.parameters(), lr=0.1) for m in (body, head))
    loss = head(body(torch.ones(2, 3, device=device))).square().sum()
    with gradkit.checked():
        gradkit.minimize_(opt_body, loss)
        with pytest.warns(gradkit.GradkitWarning, match="changed nothing"):
            opt_head.step()
    loss = head(body(torch.ones(2, 3, device=device))).square().sum()
    with gradkit.checked():  # both move, from one pass
        gradkit.minimize_([opt_body, opt_head], loss)
