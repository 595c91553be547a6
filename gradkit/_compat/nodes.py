"""What a node of the autograd graph shows of the operation that made it, and what it has saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import prod
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias, cast

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from gradkit.errors import FreedGraphError, message

Shape: TypeAlias = tuple[int, ...]

# torch's words for a view that was one of several, of unbind, split or chunk, or of a Function.
WRITTEN_VIEW = "is a view and its base or another view of its base has been modified inplace"
# torch's words for saved tensors that were changed in place since.
CHANGED = ("modified by an inplace operation", WRITTEN_VIEW)


def output_shape(node: Node, number: int) -> Shape:
    """Return the shape of an output of a node's operation. Run on torch 2.13."""
    return tuple(cast("Any", node)._input_metadata[number].shape)


def output_kind(node: Node, number: int) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device of an output of a node's operation. Run on torch 2.13."""
    metadata = cast("Any", node)._input_metadata[number]
    return metadata.dtype, metadata.device


def node_type(name: str) -> type:
    """Return the type of the nodes of an operation of torch. Run on torch 2.13."""
    return cast("type", getattr(torch._C._functions, name))


# The second factor that a product has saved, without torch's look at its version; or None.
second_factor = attrgetter("_raw_saved_other.data")


def saved(node: Node, name: str) -> Any:
    """Return what a node has saved: a tensor, or an option of its operation."""
    # Raises RuntimeError if it was freed, or changed in place since, or if this version of torch
    # saves none. Run on torch 2.13.
    try:
        return getattr(node, f"_saved_{name}")
    except AttributeError as error:
        raise RuntimeError(f"{node.name()} saves no {name}") from error


def saved_or(default: Any, node: Node, *names: str) -> Any:
    """Return the first of some things that a node has saved; the default if its kind saves none."""
    for name in names:
        try:
            return getattr(node, f"_saved_{name}")
        except AttributeError:
            continue
    return default


def names_of_nodes(operations: str) -> list[str]:
    """Return the names of the types of nodes: `Sum.1` is SumBackward1, without a number it is 0."""
    parts = (operation.partition(".") for operation in operations.split())
    return [f"{name}Backward{number or 0}" for name, _, number in parts]


IN_EVAL_MODE = " in eval mode"


def kind_of_node(node: Any) -> str:
    """Return the kind of a node: its type's name, and for a normalization in eval mode, that."""
    training = getattr(node, "_saved_training", getattr(node, "_saved_train", True))
    return type(node).__name__ if training else f"{type(node).__name__}{IN_EVAL_MODE}"


# The name of the type of nodes that extensions of torch define; torch.jit is one.
SCRIPTED = "CppFunction"


def is_scripted(node: Node) -> bool:
    """Return whether a node is what torch.jit has compiled of several. Run on torch 2.13."""
    return type(node).__name__ == SCRIPTED and node.name().endswith(":DifferentiableGraphBackward")


def any_sparse_gradients(nodes: Iterable[Node]) -> bool:
    """Return whether one of the nodes makes a sparse gradient, as an embedding may."""
    return any(getattr(node, "_saved_sparse", False) is True for node in nodes)


# Nodes of scalars that are sums of terms, or a term with another sign, shape or dtype, a choice, or
# a function of a term, which of a mean is no sum over targets either.
_SUMS_OF_TERMS = frozenset(
    names_of_nodes(
        "Add Add.1 Sub Sub.1 Rsub Rsub.1 Addcmul Lerp Lerp.1 Where NanToNum Neg Clone Alias ToCopy "
        "Squeeze Squeeze.1 Squeeze.2 Unsqueeze View UnsafeView ReshapeAlias Expand Abs Clamp "
        "Clamp.1 ClampMax ClampMax.1 ClampMin ClampMin.1 Exp Expm1 Hardtanh LeakyRelu Log Log1P "
        "Maximum Minimum Pow Relu Sqrt Softplus"
    )
)
# Nodes of products and quotients. Torch itself multiplies by MulBackward1: to smooth labels, say.
_PRODUCTS, _QUOTIENTS = names_of_nodes("Mul Mul.1"), names_of_nodes("Div Div.1")
_AVERAGES = ("MeanBackward", "VarBackward", "StdBackward")
_BY_CLASS = ("NllLoss", "MultiMargin", "MultilabelMargin")  # their inputs: [C], [N, C], [N, C, ...]


def averaged_elements(root: Any, count: float, scales: set[float]) -> tuple[int, bool]:
    """Return over how many targets a scalar, or a term of it, is a mean; and whether of a term."""
    # The number is 0 if none, or unknown. `scales` gets divisors that are no number of targets.
    # Run on torch 2.13.
    waiting: list[tuple[Any, tuple[float, ...]]] = [(root, ())] if root is not None else []
    seen: set[Any] = set()
    is_sum = False
    for node, divisors in waiting:  # the list grows meanwhile
        if node in seen:
            continue
        seen.add(node)
        kind, terms = node.name(), [child for child, _ in node.next_functions if child is not None]
        if kind in _QUOTIENTS:
            terms = [child for child, _ in node.next_functions[:1] if child is not None]
        elements = _mean_of(node, kind)
        if elements == 0 and kind not in _SUMS_OF_TERMS and kind not in (*_PRODUCTS, *_QUOTIENTS):
            elements, terms = _mean_by_hand(node, kind, divisors, count, scales), []
        if elements > 1:
            return elements, is_sum
        if kind in (*_QUOTIENTS, "MulBackward0") and len(terms) == 1:
            divisors += _divisor(node, kind)
        is_sum = is_sum or len(terms) > 1
        waiting += [(child, divisors) for child in terms]
    return 0, False


def _mean_of(node: Any, kind: str) -> int:
    """Return how many elements an operation of torch averages; 0 if it is no mean."""
    if not (kind.startswith(_AVERAGES) or getattr(node, "_saved_reduction", None) == 1):
        return 0
    shape = _shape_below(node)
    return prod(shape) // (shape[:2][-1] if shape and kind.startswith(_BY_CLASS) else 1)


def _shape_below(node: Any) -> Shape:
    """Return the shape of what an operation was given; () if it is unknown."""
    shapes = (output_shape(above, index) for above, index in node.next_functions if above)
    shape = next(shapes, ())
    return shape if {int}.issuperset(map(type, shape)) else ()  # not of a nested tensor


def _divisor(node: Any, kind: str) -> tuple[float, ...]:
    """Return the constant that a scalar is divided by; nothing if it is unknown, or a weight."""
    try:
        name = "self" if node.next_functions[0][0] is None else "other"
        if getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None:
            return ()
        value = abs(float(getattr(node, f"_saved_{name}")))
    except (AttributeError, RuntimeError, TypeError):  # freed, changed since, complex
        return ()
    if kind in _QUOTIENTS:
        return (value,)
    # 0.5 and 0.25 are weights that people choose, whatever the number of targets.
    is_weight = not value or (value >= 0.1 and abs(round(value, 3) - value) < 1e-6)
    return () if is_weight else (1 / value,)


def _mean_by_hand(
    node: Any, kind: str, divisors: tuple[float, ...], count: float, scales: set[float]
) -> int:
    """Return the number of targets that a sum was divided by; 0 if it was by none."""
    numbers = {count} if divisors else set()
    below = node.next_functions[0][0] if kind.startswith("Sum") else None
    while below is not None and below.name() in _QUOTIENTS:  # the quotients of each element
        divisors += _divisor(below, below.name())
        below = below.next_functions[0][0]
    if below is not None and below.name() == "MeanBackward1" and count:
        # The mean is over the batch if it takes the first dimension, or as many elements as there
        # are targets. A mean for each target, which is none over them, leaves a multiple of these.
        kept, shape = prod(output_shape(below, 0)), _shape_below(below)
        elements = prod(shape) // (kept or 1)
        takes_first = not {0, -len(shape)}.isdisjoint(saved_ints(below, "dim"))
        is_left_over = bool(kept % count)
        if takes_first + is_left_over + (elements == count) > 1:
            return elements
    if not divisors:
        return 0
    if kind.startswith("Nansum"):
        return round(max(divisors))
    if kind.startswith("Sum") or getattr(node, "_saved_reduction", None) == 2:
        first, *others = _shape_below(node) or (1,)
        sizes = {first}  # the batch's, and products with further dimensions: positions, classes
        for other in others[:5]:
            sizes |= {size * other for size in sizes}
        numbers |= sizes
    for divisor in {*divisors, prod(divisors)} - scales:
        if divisor > 1 and any(abs(divisor - n) < 1e-5 * n for n in numbers):
            return round(divisor)
    scales.update(divisors)
    return 0


def saved_ints(node: Node, name: str) -> list[int]:
    """Return the integer, or integers, that a node has saved. Run on torch 2.13."""
    value = saved(node, name)
    numbers = [value] if isinstance(value, int) else list(value or ())
    return [n - (1 << 64) if n >= 1 << 63 else n for n in numbers]  # torch shows them unsigned


def sizes_of_gradients(nodes: Iterable[Node]) -> list[int]:
    """Return the numbers of elements of the gradients that a pass through the nodes makes."""
    metadata = (one for node in nodes for one in cast("Any", node)._input_metadata)
    return [prod(one.shape) for one in metadata]


def saved_names(kind: Any) -> tuple[str, ...]:
    """Return the attributes by which nodes of a type show the tensors they have saved."""
    if issubclass(kind, BackwardCFunction):
        return ("_raw_saved_tensors",)  # not through the cache, which would keep the class alive
    return _saved_names(kind)


@cache
def _saved_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def hooked_tensors(node: Node) -> list[Any]:
    """Return what a node has saved that is in the hands of hooks of saved tensors, packed."""
    every = (one for name in saved_names(type(node)) for one in _raw(node, name))
    return [one for one in every if one.unpack_hook is not None]


def packed_tensors(node: Node) -> list[tuple[str, Any]]:
    """Return the names of the tensors that a node has saved, and how it keeps them."""
    names = saved_names(type(node))
    return [(name.removeprefix("_raw_saved_"), one) for name in names for one in _raw(node, name)]


def _raw(node: Node, name: str) -> Sequence[Any]:
    raw = getattr(node, name)
    return raw if isinstance(raw, tuple | list) else (raw,)


# The nodes of rrelu. Torch saves its noise first, and draws it then, into the same memory:
# https://github.com/pytorch/pytorch/issues/193671
DRAW_AFTER_SAVING: frozenset[type] = frozenset(
    map(node_type, ("RreluWithNoiseBackward0", "RreluWithNoiseBackward1"))
)


def has_released(node: Node) -> bool:
    """Return whether the node has lost a tensor that it saved, and so cannot run again."""
    return any_released([node], names_by_kind([type(node)]))


def names_by_kind(kinds: Iterable[type]) -> dict[type, tuple[str, ...]]:
    """Return `saved_names` of each of these types of nodes, without those that save no tensor."""
    return {kind: names for kind in kinds if (names := saved_names(kind))}


def any_released(nodes: Iterable[Node], names_of: Mapping[type, tuple[str, ...]]) -> bool:
    """Return whether one of the nodes has lost a tensor that it saved; see `names_by_kind`."""
    try:
        for node in nodes:
            for name in names_of.get(type(node), ()):
                saved = getattr(node, name)
                if isinstance(saved, tuple):
                    if any(one.unpack_hook is raise_freed for one in saved):
                        return True
                elif saved.data is None:
                    if saved.unpack_hook is raise_freed:
                        return True
                    # A tensor with hooks is not unpacked: that could recompute a checkpoint.
                    if saved.unpack_hook is None:
                        # Raises if it is released; an optional one that was never saved is None.
                        getattr(node, name.replace("_raw_saved_", "_saved_"))
                elif saved.unpack_hook is None:
                    break  # a node loses all that have no hooks at once
    except RuntimeError:
        return True
    return False


def raise_freed(_: object) -> NoReturn:
    """Raise, as the unpack hook of a saved tensor that has been released."""
    expected = "a graph that still holds its saved tensors"
    got = "one that an earlier gradkit call has freed (Trying to backward through the graph a "
    fix = "pass retain_graph=True to the earlier call"
    raise FreedGraphError(message("a loss", expected, f"{got}second time)", fix))


def changed_since_saved(node: Node) -> tuple[str, str] | None:
    """Return the name of a saved tensor that was changed in place since, and torch's error."""
    # Reading unpacks the tensor, which computes nothing; one with hooks, whose unpacking may
    # recompute a checkpoint, is left alone. Run on torch 2.13.
    for name in saved_names(type(node)):
        try:
            if all(getattr(one, "unpack_hook", None) is None for one in _raw(node, name)):
                is_custom = isinstance(node, BackwardCFunction)
                getattr(node, name.removeprefix("_raw_" if is_custom else "_raw"))
        except RuntimeError as error:  # a node that a pass has freed raises another
            if any(text in str(error) for text in CHANGED):
                return name.removeprefix("_raw_saved_"), str(error)
    return None
