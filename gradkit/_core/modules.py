"""The parameters of a module, and the classes of its parts."""

from __future__ import annotations

from torch import Tensor, nn

from gradkit._compat.modules import lists_as_torch


def named_parameters(module: nn.Module) -> tuple[dict[str, Tensor], set[type]]:
    """Return `dict(module.named_parameters())`, and the classes of the module and its parts."""
    # In a quarter of torch's time, without its generators: a step of small layers asks twice, and
    # would spend a tenth of its time on it. But for a part that lists in a way of its own, and for
    # one with parts that is in several places.
    params: dict[str, Tensor] = {}
    parents: set[int] = set()  # a part without parts cannot be inside of itself
    classes: set[type] = set()
    stack = [("", module)]
    while stack:
        prefix, part = stack.pop()
        kind = type(part)
        if kind not in classes:
            if not lists_as_torch(kind):
                return _listed_by_torch(module)
            classes.add(kind)
        attributes = part.__dict__
        if "named_modules" in attributes or "named_parameters" in attributes:
            return _listed_by_torch(module)
        own = attributes["_parameters"]
        if own:
            for name, param in own.items():
                if param is not None:
                    params[prefix + name] = param
        parts = attributes["_modules"]
        if parts:
            if id(part) in parents:
                return _listed_by_torch(module)
            parents.add(id(part))
            stack += [
                (f"{prefix}{name}.", each)
                for name, each in reversed(parts.items())
                if each is not None
            ]
    if len(set(map(id, params.values()))) < len(params):
        first: dict[int, tuple[str, Tensor]] = {}  # of its names, a tied parameter has the first
        for name, param in params.items():
            first.setdefault(id(param), (name, param))
        params = dict(first.values())
    return params, classes


def _listed_by_torch(module: nn.Module) -> tuple[dict[str, Tensor], set[type]]:
    return dict(module.named_parameters()), set(map(type, module.modules()))
