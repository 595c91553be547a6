"""What stands between `backward()` and `step()`: what leaves `.grad` alone, clips, or scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import libcst as cst

from gradkit_migrate import reasons
from gradkit_migrate.calls import CLIP, LoopCall, Optimizers, clip_values
from gradkit_migrate.params import Owner
from gradkit_migrate.reasons import Advice, NotSureError
from gradkit_migrate.source import Node, Source, arguments, dotted, last_name

# Of tensors, lists, strings, meters, progress bars and loggers, which are given values alone.
METHODS = {
    "item", "detach", "cpu", "numpy", "tolist", "size", "numel", "dim", "float", "long", "int",
    "double", "sum", "mean", "max", "min", "argmax", "eq", "sqrt", "exp", "log", "abs", "any",
    "all", "view", "reshape", "squeeze", "unsqueeze", "flatten", "clone", "isnan", "isfinite", "to",
    "append", "extend", "format", "join", "update", "set_postfix", "set_description", "add_scalar",
    "info", "debug", "write", "items", "keys", "values", "get",
}  # fmt: skip
MODULES = ("torch.", "math.", "numpy.", "time.")
NOT_OF_TORCH = (
    "torch.autograd.", "torch.distributed.", "torch.optim.", "torch.utils.", "torch.nn.",
)  # fmt: skip
NOT_CALLED = {"save", "load", "compile", "set_default_dtype", "manual_seed", "set_grad_enabled"}
SIMPLE = (
    cst.Expr, cst.Assign, cst.AugAssign, cst.AnnAssign, cst.Pass, cst.If, cst.For, cst.With,
)  # fmt: skip
NOT_EVALUATED = (cst.Lambda, cst.Yield, cst.Await, cst.NamedExpr)


class GradNeutrality:
    """Tells which statements and expressions cannot read or write a gradient."""

    def __init__(self, source: Source, optimizers: Optimizers, trained: Iterable[str]) -> None:
        self._source = source
        self._optimizers = optimizers
        self._trained = {*trained, *optimizers.modules}

    def is_neutral(self, code: Node) -> bool:
        """Return whether some code, with all that is in it, leaves gradients alone."""
        return all(map(self._leaves_alone, self._source.nodes(code)))

    def _is_trained(self, text: str) -> bool:
        return text in self._trained or self._optimizers.is_optimizer(text)

    def _leaves_alone(self, node: Node) -> bool:
        if isinstance(node, cst.BaseSmallStatement | cst.BaseCompoundStatement):
            return isinstance(node, SIMPLE)
        if isinstance(node, NOT_EVALUATED):
            return False
        if isinstance(node, cst.Call):
            return self._is_neutral_call(node)
        if isinstance(node, cst.SimpleString):
            return node.evaluated_value not in {"grad", "params"}
        text, parent = dotted(node), self._source.parents[node]
        attribute = parent.attr.value if isinstance(parent, cst.Attribute) else ""
        if isinstance(node, cst.Name) and (self._is_word(node, parent) or text == "self"):
            return text != "self" or bool(attribute)
        return not self._is_trained(text) or attribute in {"param_groups", "training"}

    def _is_word(self, name: cst.Name, parent: Node) -> bool:
        """Return whether a name is that of an attribute or of a keyword, and no value by itself."""
        is_attribute = isinstance(parent, cst.Attribute) and parent.attr is name
        return is_attribute or (isinstance(parent, cst.Arg) and parent.keyword is name)

    def _is_neutral_call(self, call: cst.Call) -> bool:
        name, source = last_name(call), self._source
        if source.is_builtin(call.func):
            return True
        if source.is_from(call.func, *MODULES):
            inner = source.is_from(call.func, *NOT_OF_TORCH)
            inner = inner and not source.is_from(call.func, "torch.nn.functional.")
            in_place = name.endswith("_") or "out" in arguments(call)
            return not inner and not in_place and name not in NOT_CALLED
        if not isinstance(call.func, cst.Attribute) or name in source.functions:
            return False
        if name == "step":
            return self._optimizers.is_scheduler(dotted(call.func.value))
        is_average = name == "update" and not call.args  # of weights, say
        return name in METHODS and not is_average and not source.full_names(call.func)


def norm_name(clip: LoopCall) -> str | None:
    """Return the name to which the norm is assigned, '' if it is not used, None if otherwise."""
    if clip.is_statement:
        return ""
    statement = clip.statement
    if not isinstance(statement, cst.Assign) or statement.value is not clip.call:
        return None
    (first, *others) = (one.target for one in statement.targets)
    return first.value if isinstance(first, cst.Name) and not others else None


def check_clipping(
    advice: Advice, clip: LoopCall, neutral: GradNeutrality, between: Sequence[Node], owner: Owner
) -> None:
    """Raise if `step_(max_norm=)` is not the same as this call."""
    source, values = advice.source, clip_values(clip.call)
    is_torchs = bool(source.full_names(clip.call.func) & CLIP)
    if values is None or not is_torchs:
        what = "has options that gradkit.step_ does not have" if is_torchs else "is not torch's"
        reason = f"`{source.shown(clip.call)}` {what}"
        raise NotSureError(clip.line, reason, advice.clipped_as_it_is())
    norm = norm_name(clip)
    if not neutral.is_neutral(values[1]):
        reason = f"max_norm is {source.shown(values[1])}"
        raise NotSureError(clip.line, reason, advice.clipped_as_it_is())
    if norm is None:
        reason = f"the norm is used in `{source.shown(clip.statement)}`"
        raise NotSureError(clip.line, reason, advice.clipped_as_it_is())
    # The clipping, and the norm, come with the step: nothing between may need or change them.
    after = [name for part in between if source.at(part) > clip.at for name in _names(source, part)]
    stored = {name.value for name in after if source.is_stored(name)}
    needed = {norm, *(name.value for name in _names(source, values[1]))}
    if norm in {name.value for name in after} or needed & stored:
        reason = "the norm, or what max_norm is computed from, is used before step()"
        raise NotSureError(clip.line, reason, advice.clipped_as_it_is())
    clipped = source.text(values[0])
    is_same = clipped == (f"{owner.name}.parameters()" if owner.is_module else owner.name)
    if not is_same or owner.doubt is not None:
        doubt = source.shown_at(owner.doubt) if owner.doubt else f"{owner.name} in its place"
        reason = f"{clipped} is clipped, and may not be exactly what {advice.optimizer} has, "
        reason += f"because of {doubt}"
        raise NotSureError(clip.line, reason, advice.clipped_in_step(clip.call))


def _names(source: Source, node: Node) -> Iterator[cst.Name]:
    return source.walk(node, cst.Name)


def check_scaling(advice: Advice, clip: LoopCall | None, unscale: LoopCall | None) -> None:
    """Raise if the loss is scaled, and `step_(scaler=)` may not be the same."""
    source, backward, step = advice.source, advice.backward, advice.step
    loss = backward.call.func.value if isinstance(backward.call.func, cst.Attribute) else None
    scale = loss.func if isinstance(loss, cst.Call) and last_name(loss) == "scale" else None
    if not step.scaler and scale is None and unscale is None:
        return
    unscaled = unscale is None or (
        unscale.receiver == step.scaler and unscale.argument == step.argument
        and unscale.is_statement and (clip is None or unscale.at < clip.at)
    )  # fmt: skip
    is_same = bool(step.scaler) and dotted(scale) == f"{step.scaler}.scale"
    if not (is_same and unscaled and _is_scaler(source, step.scaler)):
        shown = source.shown(step.call)
        reason = f"a scaler that is not torch's, or not used as usual ({shown})"
        raise NotSureError(backward.line, reason, reasons.SCALED)
    if clip is not None and unscale is None:
        reason = "scaled gradients are clipped, without unscale_"
        raise NotSureError(clip.line, reason, reasons.SCALED_CLIP)


def _is_scaler(source: Source, scaler: str) -> bool:
    values: list[Node | None] = []
    for one in source.bindings.get(scaler, ()):
        value = one.value
        values += [value.body, value.orelse] if isinstance(value, cst.IfExp) else [value]
    return all(
        dotted(value) in {"None", scaler.rpartition(".")[2]}
        or (isinstance(value, cst.Call) and last_name(value) == "GradScaler"
            and source.is_from(value.func, "torch."))
        for value in values
    )  # fmt: skip
