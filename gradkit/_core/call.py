"""A call, read and flattened: its options, losses and weights, the passes that it asks for."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Real
from operator import attrgetter
from sys import float_info
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from gradkit._compat.distributed import cotangent_for
from gradkit._compat.transforms import BATCH, transforms
from gradkit._core import pytree
from gradkit._core.grad_recorder import any_observers, observed_tensors
from gradkit._core.graph import GraphView, Subgraph, is_leaf_node, refuse_lost_history
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.params import Params, expand_params
from gradkit._core.pytree import LEAF, PyTree, Structure
from gradkit._core.user_code import FunctionLeaves, FunctionsAlive, functions_alive
from gradkit.errors import (
    DetachedLossError,
    GradkitError,
    LeafTypeError,
    NotScalarLossError,
    OptionError,
    StructureError,
    describe,
    message,
    with_article,
)

Unused: TypeAlias = Literal["none", "zeros", "error"]
# The values of `unused` under which every trainable parameter has a gradient.
Filled: TypeAlias = Literal["zeros", "error"]
Strategy: TypeAlias = Literal["sequential", "batched", "auto"]

UNUSED: tuple[Unused, ...] = ("none", "zeros", "error")
STRATEGIES: tuple[Strategy, ...] = ("sequential", "batched", "auto")


def check_option(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise if an option is none of the values that it takes, by equality and by type."""
    for one in allowed:
        if type(value) is type(one) and value == one:
            return
    values = " or ".join(map(repr, allowed))
    texts = [one for one in allowed if isinstance(one, str)]
    meant = get_close_matches(value, texts, 1) if isinstance(value, str) else []
    raise OptionError(message(name, values, repr(value), f"{name}={[*meant, allowed[0]][0]!r}"))


def check_bool(name: str, value: object) -> None:
    """Raise if an option is not a bool."""
    if value is not True and value is not False:
        check_option(name, value, (False, True))


def check_optional_bool(name: str, value: object) -> None:
    """Raise if an option is neither a bool nor None."""
    if value is not None:
        check_option(name, value, (None, False, True))


def check_function(value: object, name: str = "fn", *takes: str) -> None:
    """Raise if what is to be differentiated is not a function, or does not take these arguments."""
    if isinstance(value, type) and issubclass(value, nn.Module):
        expected, fix = f"a function, such as an instance of {value.__name__}", "make one"
        raise OptionError(message(name, expected, f"the class {value.__name__}", fix))
    if not callable(value):
        fix = "pass a function; for losses that exist: gradkit.value_and_grads(losses, params)"
        raise OptionError(message(name, "a function", describe(value), fix))
    called: Any = value.forward if isinstance(value, nn.Module) else value
    if takes and not torch.compiler.is_compiling():
        try:
            inspect.signature(called).bind(*takes)
        except ValueError:  # a function of C, whose arguments are not known
            return
        except TypeError as error:
            listed, got = ", ".join(takes), f"one that takes {inspect.signature(called)}"
            fix = f"{name}=lambda {listed}: ..."
            raise OptionError(
                message(name, f"a function that takes ({listed})", got, fix)
            ) from error


_WEIGHTING, _AGGREGATOR = "from [K, K] to K weights", "from [K, n] to a gradient [n]"


def check_weighting(weights: object) -> None:
    """Raise if what is to weigh losses by their Gramian is an aggregator of TorchJD, or a class."""
    fix = "gradkit.combine(gradkit.per_loss_grads(losses, params), aggregator)"
    _check_function_of_losses("weights", weights, "Aggregator", _WEIGHTING, _AGGREGATOR, fix)


def check_aggregator(aggregator: object) -> None:
    """Raise if what is to make one gradient of several is a weighting of TorchJD, or a class."""
    fix = "pass an aggregator: UPGrad(); or a weighting by the Gramian: UPGradWeighting()"
    _check_function_of_losses("aggregator", aggregator, "Weighting", _AGGREGATOR, "to weights", fix)


def is_weighting(function: object) -> bool:
    """Return whether this makes K weights of a Gramian, as some classes of TorchJD do."""
    return not isinstance(function, type) and _is_of_torchjd(function, "_GramianWeighting")


def _is_of_torchjd(value: object, base: str) -> bool:
    mro = type(value).__mro__
    return any(each.__name__ == base and each.__module__[:8] == "torchjd." for each in mro)


def _check_function_of_losses(
    name: str, value: object, refused: str, expected: str, got: str, fix: str
) -> None:
    if isinstance(value, type):
        got, fix = f"the class {value.__name__}", f"pass an instance: {value.__name__}()"
    elif _is_of_torchjd(value, refused):
        got = f"{describe(value)}, {got}"  # would be right for no sizes, and run for some
    else:
        return
    raise OptionError(message(name, f"a function {expected}", got, fix))


def read_pass_options(unused: object, create_graph: object, retain_graph: bool | None) -> bool:
    """Return whether a call keeps the losses' graph; raise if an option has no such value."""
    if unused.__class__ is not str or unused not in UNUSED:
        check_option("unused", unused, UNUSED)
    if create_graph is not True and create_graph is not False:
        check_bool("create_graph", create_graph)
    if retain_graph is None:
        return bool(create_graph)
    check_optional_bool("retain_graph", retain_graph)
    return retain_graph


def check_batching(strategy: object, chunk_size: object) -> None:
    """Raise if an option of per-loss gradients has no such value."""
    if strategy.__class__ is not str or strategy not in STRATEGIES:
        check_option("strategy", strategy, STRATEGIES)
    if chunk_size is not None:
        check_chunk_size(chunk_size)


def check_chunk_size(value: object, name: str = "chunk_size") -> None:
    """Raise if a chunk size is neither a positive int nor None, which is everything at once."""
    if value is not None and not is_positive_int(value):
        fix = f"{name}=None, for all at once; {name}=1 takes the least memory"
        raise OptionError(message(name, "a positive int or None", repr(value), fix))


def is_number(value: object) -> bool:
    """Return whether a value is a real number that fits in a float; a bool is no number."""
    if isinstance(value, int):
        return not isinstance(value, bool) and -float_info.max <= value <= float_info.max
    return isinstance(value, float | Real)  # a float at once: Real is an abstract class


def is_positive_int(value: object) -> bool:
    """Return whether a value is an int of at least 1; a bool is no int."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_real_number(value: object) -> bool:
    """Return whether this is a real number, or a real tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return is_number(value)


def number_for_torch(value: Any) -> float | Tensor:
    """Return a number as one that torch takes: not an int of more than 64 bits, or a fraction."""
    is_taken = isinstance(value, Tensor) or (isinstance(value, int) and abs(value) < 1 << 63)
    result: float | Tensor = value if is_taken else float(value)
    return result


def check_number(name: str, value: Any, fix: str, *, nonnegative: bool = False) -> Any:
    """Return a number for torch; raise if it is none, and no tensor of one, whose sign is free."""
    if not is_real_number(value):
        kind = "a real number, or a real tensor of one element"
        raise OptionError(message(name, kind, describe(value), fix))
    if nonnegative and not isinstance(value, Tensor) and not value >= 0:
        raise OptionError(message(name, "a number of at least 0", repr(value), fix))
    return number_for_torch(value)


_grad_fn, _requires_grad = attrgetter("grad_fn"), attrgetter("requires_grad")
_DENSE = torch.strided
_LOSSES_FIRST = "the arguments are (losses, params), in this order: pass the loss first"


@dataclass(slots=True)
class Losses:
    """The losses of a call: the tensors, in the order of the tree, and its structure."""

    leaves: list[Tensor]
    spec: Structure
    root: str = "losses"  # the name of the tree in error messages
    numbers: Sequence[int] | None = None  # the leaves' own in the tree, if it has others

    def path(self, index: int) -> str:
        """Return the path of a loss: `losses['aux']`."""
        number = index if self.numbers is None else self.numbers[index]
        return pytree.path(self.spec, number, self.root)

    def first_paths(self) -> str:
        """Return the paths of the first three losses, for an error that concerns all of them."""
        return ", ".join(map(self.path, range(min(len(self.leaves), 3))))


def read_losses(
    tree: PyTree, *, scalar: bool, returned: bool = False, may_be_aux: bool = False
) -> Losses:
    """Check a tree of losses: given by the caller, or `returned` by the caller's function."""
    if type(tree) in PLAIN_TYPES and not returned:  # as `flatten` does, which may be traced
        leaves, spec = [tree], LEAF
    else:
        leaves, spec = pytree.flatten(tree)
    if not set(map(type, leaves)) <= PLAIN_TYPES and not any(map(_has_params, leaves)):
        leaves, spec = expand_params(tree, "losses")  # an iterator of losses, say
    losses = Losses(leaves, spec)
    if not leaves:
        is_iterator = hasattr(tree, "__next__")
        got = "an iterator with nothing left in it" if is_iterator else "an empty tree"
        raise StructureError(message("losses", "at least one tensor", got, "pass a loss"))
    for index, loss in enumerate(leaves):
        is_plain = type(loss) in PLAIN_TYPES and not loss.is_nested
        is_plain = is_plain and (not scalar or (loss.layout == _DENSE and loss.numel() == 1))
        if is_plain and loss.dtype.is_floating_point:
            continue
        defect = _defect(loss, scalar, returned, losses.path(index))
        if defect is not None:
            error, expected, fix = defect
            if may_be_aux and type(tree) is tuple and len(tree) == 2:
                fix += "; if this is aux, pass has_aux=True"
            raise error(message(losses.path(index), expected, describe(loss), fix))
    try:
        _ = returned or list(map(_grad_fn, leaves))
    except RuntimeError:
        refuse_lost_history(leaves, losses.path)
        raise
    return losses


def _has_params(leaf: object) -> TypeGuard[nn.Module | Optimizer]:
    return isinstance(leaf, nn.Module | Optimizer)


def _defect(
    loss: Any, scalar: bool, returned: bool, where: str
) -> tuple[type[GradkitError], str, str] | None:
    """Return the error, what was expected and what to do if this is no loss; None if it is one."""
    if not isinstance(loss, Tensor):
        fix = pytree.as_known_tree(loss, where) or _advice_for_no_tensor(loss, returned)
        return LeafTypeError, "a tensor", fix
    if scalar and loss.layout not in (_DENSE, torch.jagged):
        return LeafTypeError, "a dense loss", "loss.to_dense()"
    if not loss.dtype.is_floating_point:
        fix = "leave it out: integers have no gradient"
        if loss.dtype.is_complex:
            fix = "make it real: loss.real, or loss.abs().square()"
        return LeafTypeError, "a real floating-point loss", fix
    if not scalar and loss.is_nested:
        fix = "a loss for each part: list(loss.unbind())"
        return LeafTypeError, "a tensor whose elements can be counted", fix
    if scalar and loss.numel() != 1:
        eager, pulled = "gradkit.vjp(loss, params, weights)", "gradkit.func.vjp(fn, params)"
        fix = (
            "loss.sum() or loss.mean(); with a weight for each element, (weights * loss).sum(), or "
            f"{pulled if returned else eager}; for the gradient of each element, "
            "gradkit.per_loss_grads(losses, params)"
        )
        fix = _LOSSES_FIRST if isinstance(loss, nn.Parameter) else fix
        return NotScalarLossError, "a loss of exactly one element", fix
    return None


def _advice_for_no_tensor(loss: object, returned: bool) -> str:
    if isinstance(loss, Real):
        return "pass the tensor itself, before .item() or float(); a constant as torch.tensor(0.0)"
    if _has_params(loss):
        if returned:
            return "return the loss, computed with it"
        is_criterion = isinstance(loss, nn.Module) and not any(True for _ in loss.parameters())
        return "call it, and pass the loss that it returns" if is_criterion else _LOSSES_FIRST
    if loss is None:
        first = "return the loss that fn computes" if returned else "leave it out"
        return f"{first}; a constant as torch.tensor(0.0)"
    if not callable(loss):
        return "pass the tensor"
    if returned:
        return "call it, and return the loss"
    return "call it, and pass the loss; or gradkit.func.value_and_grads(fn)(params)"


_CONSTANTS = (
    "only constants: made under no_grad or inference_mode, detached, from inputs none of which "
    "requires grad, by a checkpoint with use_reentrant=True of such inputs, or by an operation "
    "that drops its graph (torch.special.airy_ai, say)"
)
_WITH_GRAPH = (
    "compute the loss from the parameters with gradients enabled, and checkpoint with "
    "use_reentrant=False; gradkit returns detached values: pass the loss itself, or get them with "
    "create_graph=True; `with gradkit.checked():` around the forward pass names an operation that "
    "drops its graph"
)


def require_graph(
    losses: Losses, outputs: Sequence[Tensor], params: Sequence[Params] = ()
) -> Sequence[int]:
    """Return the indices of the outputs, one for each loss, that carry a graph; raise if none."""
    if all(map(_requires_grad, outputs)):
        return range(len(outputs))
    differentiable = [index for index, output in enumerate(outputs) if output.requires_grad]
    if not differentiable:
        raise DetachedLossError(_why_constant(losses, params))
    return differentiable


def _why_constant(losses: Losses, params: Sequence[Params]) -> str:
    """Return the message for losses without a graph, which names the params that are frozen."""
    frozen = [leaf for one in params for leaf in one.frozen_leaves()]
    if BATCH in transforms():
        got = "ones inside of torch.vmap, where tensors outside of it carry none"
        fix = "gradkit.func.value_and_grads(fn)(params) in the place of the eager call"
        return message(losses.first_paths(), "a loss that carries a graph", got, fix)
    if not frozen:
        return message(losses.first_paths(), "a loss that carries a graph", _CONSTANTS, _WITH_GRAPH)
    paths = ", ".join(frozen[:3]) + (", ..." if len(frozen) > 3 else "")
    call = f"call {frozen[0]}.requires_grad_() before the forward pass"
    if not any(one.variables for one in params):
        got = f"none that does, and so no loss that carries a graph: {losses.first_paths()}"
        fix = f"{call}; state_dict() and .data are detached, so pass the module"
        return message(paths, "parameters that require grad", got, fix)
    got = f"{_CONSTANTS}; without requires_grad is {paths}"
    fix = f"{_WITH_GRAPH}; or {call}"
    return message(losses.first_paths(), "a loss that carries a graph", got, fix)


def params_of_each_loss(losses: Losses, params: PyTree) -> list[PyTree]:
    """Return the part of `params` that stands in the place of each loss."""
    if isinstance(params, nn.Module) and losses.spec.type is not None:
        got = f"one module, {with_article(type(params).__name__)}"
        fix = 'a dict of modules with the keys of the losses: {"G": generator, "D": discriminator}'
        if isinstance(params, nn.ModuleList | nn.Sequential) and losses.spec.type in (list, tuple):
            fix = f"{losses.spec.type.__name__}(params), which has one module for each loss"
        elif isinstance(params, nn.ModuleDict) and losses.spec.type is dict:
            fix = "dict(params.items()), with the keys of the losses"
        raise StructureError(message("params", "a tree with the structure of losses", got, fix))
    return pytree.flatten_up_to(losses.spec, "losses", params, "params")


def _is_weight(weight: Tensor, loss: Tensor) -> bool:
    if weight.layout != torch.strided or weight.dtype.is_complex:
        return False
    return weight.numel() == 1 and (loss.is_meta or not weight.is_meta)


def read_weights(weights: PyTree, losses: Losses) -> list[float | Tensor] | None:
    """Return one weight for each loss, or None for ones."""
    if weights is None:
        return None
    tree = pytree.unflatten(losses.spec, losses.leaves)
    by_loss = pytree.broadcast_prefix(weights, "weights", tree, "losses")
    for index, weight in enumerate(by_loss):
        is_tensor = isinstance(weight, Tensor)
        if not (_is_weight(weight, losses.leaves[index]) if is_tensor else is_number(weight)):
            where = f"the weight of {losses.path(index)}"
            expected = "a real number that fits in a float, or a real tensor of one element"
            fix = _advice_for_weight(weight, losses)
            raise LeafTypeError(message(where, expected, describe(weight), fix))
        loss = losses.leaves[index]
        # Torch multiplies a DTensor by a number that requires grad, and by no other plain tensor.
        if is_tensor and (
            type(weight) not in PLAIN_TYPES
            or (type(loss) not in PLAIN_TYPES and not weight.requires_grad)
        ):
            by_loss[index] = cotangent_for(loss, weight.reshape(loss.shape))
    return cast("list[float | Tensor]", by_loss)


def _advice_for_weight(weight: object, losses: Losses) -> str:
    if not isinstance(weight, Tensor):
        of_all = "weights=weighting, for all losses, in gradkit.value_and_grads(losses, params)"
        return of_all if callable(weight) else "pass a number"
    if weight.layout != torch.strided:
        return "pass weight.to_dense()"
    if weight.is_meta:
        return "pass a weight that has a value"
    several = "dict(zip(losses, weights))" if losses.spec.type is dict else "list(weights)"
    return f"weights={several} for a tensor of several"


Grads: TypeAlias = list[Tensor | None]


class Pass(NamedTuple):
    """One engine pass."""

    losses: Sequence[int]  # the indices of those that it starts from
    params: Params  # the tensors to differentiate with respect to


@dataclass(slots=True)
class Call:
    """What a public call is to compute."""

    losses: Losses  # as given
    outputs: Sequence[Tensor]  # each loss, or it times a weight that requires grad
    passes: Sequence[Pass]  # in order
    unused: str = "none"  # or "zeros", or "error"
    create_graph: bool = False
    weights: Sequence[Tensor] = ()  # the losses' weights that are part of the graph
    allowed: Collection[str] = ()  # kinds of nodes that raise otherwise: the caller sees to them
    # The nodes of Python Functions that the graph could hold.
    functions: FunctionsAlive = field(default_factory=functions_alive)
    around: int | None = None  # see `circumstances`
    function_nodes: list[Node] | None = None  # see `modified_tensors`
    function_leaves: list[FunctionLeaves] | None = None  # the leaves of those nodes
    _graph: GraphView | None = None
    # `replace` does not hand these on, as it may give other passes.
    _params: list[Params] | None = field(default=None, init=False)
    _whole: Subgraph | None = field(default=None, init=False)

    @property
    def params(self) -> list[Params]:
        """The params of the passes, each once."""
        if self._params is None:
            self._params = list({id(params): params for _, params in self.passes}.values())
        return self._params

    @property
    def no_subclasses(self) -> bool:
        """Whether no variable is of a subclass of torch's tensors."""
        return all(params.no_subclasses for params in self.params)

    @property
    def only_leaves(self) -> bool:
        """Whether no variable is an intermediate value."""
        return all(params.only_leaves for params in self.params)

    @property
    def graph(self) -> GraphView:
        """The graph of the losses, as far as passes for the variables go; one view a call."""
        if self._graph is None:
            self._graph = GraphView(self.outputs, self._ends())
        return self._graph

    def _ends(self) -> frozenset[Node]:
        """Return the nodes at which the passes end; none if one of them ends at a leaf."""
        if self.only_leaves:
            return frozenset()
        nodes = {variable.grad_fn for _, _, variable in self.variables()}
        if any_observers():
            nodes.update(edge.node for _, edge in observed_tensors())
        inner = frozenset(node for node in nodes if node is not None and not is_leaf_node(node))
        return inner if len(inner) == len(nodes) else frozenset()

    @property
    def differentiated(self) -> list[int]:
        """The indices of the losses that some pass starts from."""
        return [index for one in self.passes for index in one.losses]

    @property
    def whole(self) -> Subgraph:
        """The graph of all those losses together."""
        if self._whole is None:
            self._whole = self.graph.below(self.differentiated)
        return self._whole

    def params_of(self, variables: list[Tensor]) -> Params:
        """Return the params whose variables these are."""
        return next(params for params in self.params if params.variables is variables)

    def variables(self) -> Iterator[tuple[Params, int, Tensor]]:
        """Yield every variable of every pass, with its params and its index there."""
        for params in self.params:
            for index, variable in enumerate(params.variables):
                yield params, index, variable
