"""A defect of torch, pinned: the second derivative of weight norm, by `gradkit.func.check_grads`.

torch has the gradient of `torch.nn.utils.parametrizations.weight_norm` right, and its second
derivative wrong, without an error, on the CPU. Training is not affected; MAML, Hessians and
penalties of the gradient are. Ten lines say so, and name the operation.

The table is what it does to MAML: a classifier of digits takes one step on 50 images, the loss of
50 others is differentiated with respect to where it started, and the gradient is compared with the
one through a weight norm that is written out, whose operations torch differentiates rightly.

    python examples/proof/pinned_defect.py [--seeds 3] [--plot defect.png]

Source: not reported, as far as we know; "Known to be silently wrong" in the documents has others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from _proof import conclude, digits, over_seeds, parse, save_plot, table, use_one_thread
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.utils.parametrizations import weight_norm

import gradkit

RATE, IMAGES = 1.0, 50

Params = dict[str, Tensor]
Images = tuple[Tensor, Tensor]  # and their digits
Loss = Callable[[Params, Images], Tensor]


# --- The ten lines -------------------------------------------------------------------------------


def pinned() -> gradkit.GradientCheckError | None:
    """Return what check_grads raises for a layer with weight norm; None if torch is right."""
    layer = weight_norm(nn.Linear(4, 3))
    call, params, buffers = gradkit.func.make_functional(layer)
    x = torch.randn(5, 4)
    try:
        gradkit.func.check_grads(lambda params, x: call(params, buffers, x)[0].sin(), params, x)
    except gradkit.GradientCheckError as error:
        return error
    return None


# --- What it does to MAML ------------------------------------------------------------------------


def by_layer(layer: nn.Module) -> Loss:
    """Return the loss through torch's weight norm."""

    def loss(params: Params, data: Images) -> Tensor:
        return cross_entropy(torch.func.functional_call(layer, params, data[0]), data[1])

    return loss


def written_out(params: Params, data: Images) -> Tensor:
    """Return the loss through a weight norm of plain operations."""
    g, v = (params[f"parametrizations.weight.original{i}"] for i in (0, 1))
    return cross_entropy(
        linear(data[0], g * v / v.norm(dim=1, keepdim=True), params["bias"]), data[1]
    )


def by_torch(loss: Loss, params: Params, shown: Images, asked: Images) -> Params:
    """Return the meta-gradient of one step, by torch.autograd.grad."""
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    grads = torch.autograd.grad(loss(params, shown), [*params.values()], create_graph=True)
    pairs = zip(params.items(), grads, strict=True)
    adapted = {name: p - RATE * grad for (name, p), grad in pairs}
    outer = torch.autograd.grad(loss(adapted, asked), [*params.values()])
    return dict(zip(params, outer, strict=True))


def by_torch_func(loss: Loss, params: Params, shown: Images, asked: Images) -> Params:
    """Return it by torch.func.grad of torch.func.grad."""

    def after(params: Params) -> Tensor:
        grads = torch.func.grad(loss)(params, shown)
        return loss({name: p - RATE * grads[name] for name, p in params.items()}, asked)

    meta_grads: Params = torch.func.grad(after)(params)
    return meta_grads


def by_value_and_grads(loss: Loss, params: Params, shown: Images, asked: Images) -> Any:
    """Return it by gradkit.value_and_grads, twice."""
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    _, grads = gradkit.value_and_grads(loss(params, shown), params, create_graph=True)
    adapted = gradkit.tree.sub(params, gradkit.tree.scale(grads, RATE))
    _, meta_grads = gradkit.value_and_grads(loss(adapted, asked), params)
    return meta_grads


def by_unroll(loss: Loss, params: Params, shown: Images, asked: Images) -> Any:
    """Return it by gradkit.meta.unroll."""
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    adapted = gradkit.meta.unroll(
        lambda params, _, data: loss(params, data), params, [shown], gradkit.meta.sgd(lr=RATE)
    )
    _, meta_grads = gradkit.value_and_grads(loss(adapted.params, asked), params)
    return meta_grads


WAYS = {
    "torch.autograd.grad": by_torch,
    "torch.func.grad": by_torch_func,
    "gradkit.value_and_grads": by_value_and_grads,
    "gradkit.meta.unroll": by_unroll,
}


def measure(seed: int) -> dict[str, float | None]:
    """Return the relative error of each way's meta-gradient; None where it raises."""
    images, labels = digits(seed)
    torch.manual_seed(seed)
    layer = weight_norm(nn.Linear(64, 10)).double()
    params = {name: p.detach() for name, p in layer.named_parameters()}
    shown, asked = ((images[i::2][:IMAGES], labels[i::2][:IMAGES]) for i in (0, 1))
    right = by_torch(written_out, params, shown, asked)
    errors: dict[str, float | None] = {}
    for name, way in WAYS.items():
        try:
            gap = gradkit.tree.sub(way(by_layer(layer), params, shown, asked), right)
        except gradkit.UnsupportedGraphError:
            errors[name] = None
        else:
            errors[name] = float(gradkit.tree.global_norm(gap) / gradkit.tree.global_norm(right))
    return errors


def draw(errors: Sequence[dict[str, float | None]], axes: Any) -> None:
    """Draw the relative errors of each seed."""
    for seed, each in enumerate(errors):
        shown = {name: error for name, error in each.items() if error is not None}
        axes.plot([*shown], [100 * error for error in shown.values()], "o", label=f"seed {seed}")
    axes.set(ylabel="relative error of the meta-gradient, %")
    axes.legend(frameon=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit status: 0 if the claims hold."""
    options = parse(__doc__, argv)
    torch.manual_seed(0)
    error = pinned()
    print(f"{error or 'check_grads raises nothing: this torch is right'}\n")
    errors = [measure(seed) for seed in range(options.seeds)]
    rows = []
    for name in WAYS:
        values = [each[name] for each in errors]
        numbers = [value for value in values if value is not None]
        rows.append([
            name,
            over_seeds(numbers, ".1e") if len(numbers) == len(values) else "refuses",
        ])
    print(table(["meta-gradient of one step by", "relative error"], rows))
    print(
        "\nFails: check_grads tries one point and random directions there; what is wrong elsewhere,"
    )
    print("as in a branch that was not taken, it does not see.")
    save_plot(options.plot, partial(draw, errors))
    claims = {
        "check_grads names the operation": error is None
        or error.operation == "WeightNormInterface",
        "gradkit is right or refuses": all(
            (each[name] or 0.0) < 1e-10 for each in errors for name in WAYS if "gradkit" in name
        ),
    }
    return conclude(claims)


if __name__ == "__main__":
    use_one_thread()
    sys.exit(main())
