"""Which statements can stay between `backward()` and `step()`: those that cannot touch `.grad`."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from gradkit._migrate.hazards import GRADIENT, HARMLESS_GRAD_NAMES
from gradkit._migrate.optimizers import Optimizers
from gradkit._migrate.program import Program, dotted, last_name

FUNCTIONS = {
    "print", "len", "float", "int", "str", "bool", "round", "abs", "min", "max", "sum", "range",
    "enumerate", "zip", "isinstance", "format", "repr", "list", "tuple", "dict",
}  # fmt: skip
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
    "torch.autograd.",
    "torch.distributed.",
    "torch.optim.",
    "torch.utils.",
    "torch.nn.",
)
NOT_CALLED = {"save", "load", "compile", "set_default_dtype", "manual_seed", "set_grad_enabled"}
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Pass, ast.If, ast.For, ast.With)
NOT_EVALUATED = (ast.Lambda, ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr)


class GradNeutrality:
    """Tells which statements and expressions cannot read or write a gradient."""

    def __init__(self, program: Program, optimizers: Optimizers, trained: Iterable[str]) -> None:
        self._program = program
        self._optimizers = optimizers
        self._trained = {*trained, *optimizers.modules}

    def statement(self, statement: ast.stmt) -> bool:
        """Return whether a statement, with all that is in it, leaves gradients alone."""
        parts = list(ast.walk(statement))
        statements = [part for part in parts if isinstance(part, ast.stmt)]
        return all(isinstance(s, SIMPLE) for s in statements) and all(map(self._node, parts))

    def expression(self, expression: ast.expr) -> bool:
        """Return whether an expression leaves gradients alone."""
        return all(map(self._node, ast.walk(expression)))

    def mentions(self, statement: ast.stmt) -> bool:
        """Return whether a statement names gradients, or what has them."""
        words = {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(statement)}
        texts = {dotted(node) for node in ast.walk(statement)}
        names_gradients = any(map(GRADIENT.search, words - HARMLESS_GRAD_NAMES))
        return names_gradients or any(
            text in self._trained or self._optimizers.is_optimizer(text) for text in texts
        )

    def _node(self, node: ast.AST) -> bool:
        if isinstance(node, NOT_EVALUATED):
            return False
        if isinstance(node, ast.Constant):
            return node.value not in {"grad", "params"}
        if isinstance(node, ast.Call):
            return self._call(node)
        text = dotted(node)
        if text in self._trained or self._optimizers.is_optimizer(text):
            parent = next(self._program.ancestors(node))[0]
            return isinstance(parent, ast.Attribute) and parent.attr in {"param_groups", "training"}
        return text != "self" or isinstance(next(self._program.ancestors(node))[0], ast.Attribute)

    def _call(self, call: ast.Call) -> bool:
        name, full = last_name(call), self._program.qualified(call.func)
        if isinstance(call.func, ast.Name) and full == name:
            known = name in self._program.functions or name in self._program.assignments
            return name in FUNCTIONS and not known
        if full.startswith(MODULES):
            inner = full.startswith(NOT_OF_TORCH) and not full.startswith("torch.nn.functional.")
            in_place = name.endswith("_") or any(k.arg == "out" for k in call.keywords)
            return not inner and not in_place and name not in NOT_CALLED
        if not isinstance(call.func, ast.Attribute) or name in self._program.functions:
            return False
        if name == "step":
            return self._optimizers.is_scheduler(dotted(call.func.value))
        if name == "update" and not call.args:  # of an average of weights, say
            return False
        return name in METHODS
