"""The gradient of a loss of a whole batch, at the memory of one chunk of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradkit._autograd.engine import inner_grads
from gradkit._autograd.guarded_pass import InnerPass
from gradkit._checks import eager_graph, recomputations
from gradkit._compat.transforms import layers, transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core import call as options
from gradkit._core import pytree
from gradkit._core.graph import Subgraph
from gradkit._core.leaf_arithmetic import add_leaves
from gradkit._core.ownership import leave_inference_mode, owned
from gradkit._core.params import Grads, Tensors
from gradkit._core.pytree import PyTree
from gradkit._core.results_without_graph import with_refused_derivatives
from gradkit._core.user_code import user_code_may_run
from gradkit._state.grad_attribute import set_grads
from gradkit._state.module_state import state_now
from gradkit._state.rerun import RerunState, recording_writes
from gradkit._state.snapshot import put_back
from gradkit.errors import OptionError, StructureError, UnsupportedGraphError, describe, message
from gradkit.func._arguments import Arguments, read_arguments
from gradkit.func._errors import independent, named_errors
from gradkit.func._grads import value_and_grads
from gradkit.func._level import cast_to, detached


def _row_chunks(tree: PyTree, chunk_size: int | None, root: str) -> list[PyTree]:
    """Return the chunks of tensors with one first dimension; all get what is no tensor."""
    leaves, spec = pytree.flatten(tree)
    sizes: dict[int, str] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            path = pytree.path(spec, index, root)
            if leaf.dim() == 0:
                expected, got = "a tensor with a first dimension", "one without dimensions"
                fix = "close over it, or give it as a number"
                raise StructureError(message(path, expected, got, fix))
            sizes.setdefault(leaf.shape[0], path)
    if len(sizes) != 1:
        got = ", ".join(f"{size} in {path}" for size, path in sizes.items()) or "no tensor"
        fix = "pass tensors of as many rows; close over what is no part of the batch"
        raise StructureError(message(root, "tensors with one first dimension", got, fix))
    (size,) = sizes
    if chunk_size is None or chunk_size >= size:
        return [tree]
    tensors, rebuild = pytree.partition_tensors(tree)
    return list(map(rebuild, zip(*(torch.split(x, chunk_size) for x in tensors), strict=True)))


def _joined(trees: Sequence[PyTree], root: str) -> tuple[PyTree, list[list[int]]]:
    """Return trees of one structure as one, each tensor joined, and the rows of each by tree."""
    spec = pytree.flatten(trees[0])[1]
    columns = list(zip(*(pytree.flatten_up_to(spec, root, t, root) for t in trees), strict=True))
    for index, column in enumerate(columns):
        if column[0].dim() == 0:
            expected = "a tensor with a first dimension, along which those of the chunks are joined"
            fix = "return one row for each sample; or value[None], for one row a chunk"
            path = pytree.path(spec, index, root)
            raise StructureError(message(path, expected, describe(column[0]), fix))
    rows = [[tensor.shape[0] for tensor in column] for column in columns]
    return pytree.unflatten(spec, [torch.cat(column) for column in columns]), rows


_Function: TypeAlias = Callable[..., Any]
_LossResult: TypeAlias = tuple[PyTree, PyTree, PyTree, PyTree]  # values, aux, gradients of both


class _EncodedChunk(NamedTuple):
    """What a run of the function made, with its graph."""

    variables: Tensors
    outputs: Tensors
    values: PyTree  # the tree of the outputs, without the graph
    below: Subgraph


_ENCODED = "encode(params, chunk)"


class _EncoderStage:
    """The outputs of a function for a whole batch, and the gradients of each chunk."""

    def __init__(self, encode: _Function, arguments: Arguments, chunks: list[PyTree]) -> None:
        self._encode, self._arguments, self._chunks = encode, arguments, chunks
        self.is_differentiable = False  # whether an output depends on the variables
        self.captured: dict[int, Tensor] = {}  # tensors that require grad, no variables, by id
        self.chunk_variables: Tensors = []  # first runs' variables, which losses must not reach
        self._kept = state_now()
        self._last: list[_EncodedChunk] = []  # the run of the last chunk, which runs once
        self._states: list[RerunState] = []  # the states of the chunks before it
        self._row_counts: list[list[int]] = []  # of each output, by chunk

    def outputs(self) -> PyTree:
        """Return the outputs for all chunks; but for the last, they leave no graph."""
        *others, last = self._chunks
        outputs = []
        for chunk in others:
            state = RerunState([*self._arguments.variables, *pytree.tensors(chunk)])
            with state.first_run():
                run = self._run(chunk)
            state.record_outputs(run.outputs)
            self._states.append(state)
            self.chunk_variables += run.variables
            outputs.append(run.values)
            del run  # and with it the graph, before the next one is made
        self._last = [self._run(last)]
        self.chunk_variables += self._last[0].variables
        if not others:
            return self._last[0].values
        values, self._row_counts = _joined([*outputs, self._last[0].values], _ENCODED)
        return values

    def add_grads(self, cotangents: PyTree, total: Grads) -> Grads:
        """Return the total, one for each variable, plus the gradients of each chunk."""
        leaves = pytree.flatten(cotangents)[0]
        seeds: list[Sequence[Tensor]] = [leaves]
        if self._states:
            parts = map(torch.split, leaves, self._row_counts)
            seeds = list(zip(*parts, strict=True))
        total = self._add_pass(self._last.pop(), seeds.pop(), total)
        for chunk, state, part in zip(self._chunks, self._states, seeds, strict=False):
            with state.second_run() as second:
                run = self._run(chunk)
                second.compare(run.outputs, "encode")
                total = self._add_pass(run, part, total)
            del run  # and with it the graph, before the next one is made
        return total

    def _run(self, chunk: PyTree) -> _EncodedChunk:
        with torch.enable_grad(), INSIDE:
            variables = [x.detach().requires_grad_() for x in self._arguments.variables]
            if self._kept is not None:
                self._kept.put_back()  # each chunk starts from what the modules kept before
            with recording_writes():
                args = *self._arguments.args_with(variables), chunk
                returned = recomputations.exact(lambda: self._encode(*args))
        outputs = options.read_losses(returned, scalar=False, returned=True)
        below = Subgraph(outputs.leaves)
        captured = {id(x): x for x in below.leaves.values() if x.requires_grad}
        for variable in variables:
            self.is_differentiable |= captured.pop(id(variable), None) is not None
        self.captured |= captured
        values = pytree.unflatten(outputs.spec, detached(outputs.leaves))
        return _EncodedChunk(variables, outputs.leaves, values, below)

    def _add_pass(self, run: _EncodedChunk, seeds: Sequence[Tensor], total: Grads) -> Grads:
        eager_graph.refuse_nodes(map(type, run.below.nodes), "encode")
        dtypes = [variable.dtype for variable in run.variables]
        if not user_code_may_run() and dtypes == list(self._arguments.dtypes):
            # Each is added as it arrives: the gradients of a chunk are never there all at once.
            set_grads(run.variables, total)
            grads = inner_grads(run.outputs, run.variables, seeds, accumulate=True)
            set_grads(run.variables, [None] * len(grads))
            # A gradient that the engine has put there, and not added, may be part of a cotangent,
            # or of another gradient: what is added to it later would be added to both.
            is_first = any(a is None and b is not None for a, b in zip(total, grads, strict=True))
            return owned(grads, run.variables) if is_first else grads
        one = InnerPass("encode", self._arguments.path, run.variables, run.below, seeds)
        return list(map(_plus_, total, one.grads(run.outputs)))


_INSIDE_A_TRANSFORM = message(
    "func.staged_value_and_grads",
    "a call outside of torch.func's transforms and torch.compile",
    "one inside, which runs twice",
    "gradkit.func.value_and_grads of the whole batch there",
)
_NO_DERIVATIVE = message(
    "func.staged_value_and_grads",
    "results that are used as they are",
    "a derivative of them, which would silently be zero: they are constants",
    "gradkit.func.value_and_grads of the whole batch",
)


def staged_value_and_grads(
    encode: PyTree,
    loss: Callable[..., Any],
    *,
    chunk_size: int | None = None,
    loss_chunk_size: int | None = None,
    has_aux: bool = False,
    weights: PyTree = None,
    create_graph: bool | None = None,
) -> Callable[[PyTree, PyTree], Any]:
    """Return a function that differentiates a loss of a whole batch, at the memory of a chunk.

    For losses that couple the batch, such as contrastive ones, and for outputs too wide to exist
    at once, such as logits. The chunks are encoded, the loss is differentiated with respect to
    their outputs, and each chunk but the last, whose graph is kept, is encoded again for its part
    of the gradient: that of `loss(encode(params, batch))`, up to rounding, if `encode` treats
    chunks independently. The second run draws the same random numbers, and buffers are as after
    one; if the call raises, as before it.

    Example:
        >>> import torch, gradkit
        >>> def encode(params, x):
        ...     return torch.tanh(x @ params["w"])
        >>> def loss(embeddings):
        ...     return torch.logsumexp(embeddings @ embeddings.T, 1).mean()
        >>> step = gradkit.func.staged_value_and_grads(encode, loss, chunk_size=2)
        >>> step({"w": torch.ones(3, 2)}, torch.eye(6, 3))[1]["w"].shape
        torch.Size([3, 2])

    Args:
        encode: `encode(params, chunk)` returns a tree of real floating-point tensors, which are
            concatenated along their first dimension. Or a tree of such functions, towers, each of
            which encodes its part of the batch, of its own size.
        loss: Takes what `encode` returned for the whole batch, with a second argument the params,
            with a third the batch. It returns losses as in `value_and_grads`.
        chunk_size: The number of samples that are encoded at once; None is all, and encodes once.
        loss_chunk_size: The number of rows of the outputs, and of the batch, that `loss` takes at
            once, if it is a sum over them: its values are added. None is all.
        has_aux: As in `value_and_grads`.
        weights: As in `value_and_grads`.
        create_graph: None: a derivative of the results raises `UnsupportedGraphError` when it is
            taken. False: the results are constants, and take one copy less.

    Returns:
        A function of `(params, batch)` that returns `(values, grads)`, or `((values, aux), grads)`,
        as `value_and_grads(...)(params)` does; with `loss_chunk_size`, aux is a tuple, of what each
        chunk gave. `batch` is a tree whose tensors have one first dimension, for several towers
        one such tree for each; what is no tensor in it is passed whole.

    Raises:
        StructureError: Tensors of the batch, or outputs of `encode`, without one first dimension.
        UnsupportedGraphError: It is called inside a transform or under torch.compile; a chunk gave
            another result when it was encoded again; or `loss` uses what `encode` has left in an
            attribute or a list.
        GradkitError: As in `value_and_grads`.

    Source:
        Gao, Zhang, Han, Callan 2021, "Scaling Deep Contrastive Learning Batch Size under Memory
        Limited Setup", https://arxiv.org/abs/2101.06983, section 3.2.
    """
    encoders, towers = pytree.flatten(encode)
    for index, encoder in enumerate(encoders):
        options.check_function(encoder, pytree.path(towers, index, "encode"), "params", "batch")
    options.check_function(loss, "loss")
    options.check_chunk_size(chunk_size)
    options.check_chunk_size(loss_chunk_size, "loss_chunk_size")
    options.check_bool("has_aux", has_aux)
    if create_graph is not None:
        options.check_option("create_graph", create_graph, (False, None))
    loss_stage = _LossStage(loss, _arguments_of(loss), loss_chunk_size, has_aux, weights)

    def run(params: PyTree, batch: PyTree) -> Any:
        if transforms() or torch.compiler.is_compiling():
            raise UnsupportedGraphError(_INSIDE_A_TRANSFORM)
        arguments = read_arguments((params,), 0, "params")
        parts = pytree.flatten_up_to(towers, "encode", batch, "batch")
        paths = pytree.paths(towers, "batch")
        chunks = [_row_chunks(p, chunk_size, path) for p, path in zip(parts, paths, strict=True)]
        pairs = zip(encoders, chunks, strict=True)
        stages = [_EncoderStage(encoder, arguments, one) for encoder, one in pairs]
        outputs = pytree.unflatten(towers, [stage.outputs() for stage in stages])
        if loss_stage.arguments == 1 and not any(stage.is_differentiable for stage in stages):
            raise independent(_ENCODED)
        captured: Tensors = []
        given = outputs, arguments.args[0], batch
        values, aux, cotangents, of_loss = loss_stage.run(*given, captured)
        _refuse_kept(captured, [x for stage in stages for x in stage.chunk_variables])
        total: Grads = [None] * len(arguments.variables)
        if of_loss is not None:  # the loss uses the params itself
            total = arguments.per_variable(pytree.flatten(of_loss)[0])
        by_tower = pytree.flatten_up_to(towers, "encode", cotangents, "outputs")
        for stage, cotangent in zip(stages, by_tower, strict=True):
            total = stage.add_grads(cotangent, total)
        total = cast_to(arguments.dtypes, total)
        grads = arguments.grads_to_tree(total)
        if create_graph is None:
            sources = [*arguments.variables, *captured]
            sources += [x for stage in stages for x in stage.captured.values()]
            values, grads = (_marked(tree, sources) for tree in (values, grads))
        return ((values, aux), grads) if has_aux else (values, grads)

    def call(params: PyTree, batch: PyTree) -> Any:
        with put_back(*encoders, loss), leave_inference_mode(record=True):
            return named_errors(lambda: run(params, batch))

    return call


def _refuse_kept(captured: Tensors, variables: Tensors) -> None:
    """Raise if a loss uses what `encode` has computed, otherwise than by its outputs."""
    ids = set(map(id, variables))
    if ids.isdisjoint(Subgraph(captured).leaves):
        return
    state = state_now()
    snapshots = state.snapshots.values() if state else ()
    kept = chain.from_iterable(one.tensors_now().values() for one in snapshots)
    reached = (path for path, x in kept if not ids.isdisjoint(Subgraph([x]).leaves))
    expected = "a loss of what encode returns"
    got = "one that uses what encode has left, of its last chunk: its gradient would be lost"
    fix = "return it from encode, one row for each chunk: return outputs, value[None]"
    path = next(reached, "loss").replace("module", "encode: module", 1)
    raise UnsupportedGraphError(message(path, expected, got, fix))


def _arguments_of(loss: Callable[..., Any]) -> int:
    """Return how many of (outputs, params, batch) the loss takes."""
    try:
        parameters = inspect.signature(loss).parameters.values()
    except ValueError:  # a builtin
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    if len(required) > 3:
        expected = "a function of (outputs), (outputs, params) or (outputs, params, batch)"
        got, fix = f"one of {len(required)} arguments", "functools.partial(loss, ...) for the rest"
        raise OptionError(message("loss", expected, got, fix))
    return max(len(required), 1)


@dataclass(frozen=True)
class _LossStage:
    """The loss of the outputs of the whole batch, and its gradients."""

    loss: _Function
    arguments: int
    chunk_size: int | None
    has_aux: bool
    weights: PyTree

    def run(self, outputs: PyTree, params: PyTree, batch: PyTree, captured: Tensors) -> _LossResult:
        """Return the values, the aux, and the gradients with respect to outputs and params."""
        # `captured` gets what the losses depend on besides.
        if self.chunk_size is None:
            return self._run_one(captured, outputs, params, batch)
        rows = (outputs, batch) if self.arguments == 3 else (outputs,)
        values, grads, aux, cotangents = None, None, [], []
        for chunk in _row_chunks(rows, self.chunk_size, "outputs"):
            value, one_aux, cotangent, grad = self._run_one(captured, chunk[0], params, chunk[-1])
            values, grads = _added(values, value), _added(grads, grad)
            aux.append(one_aux)
            cotangents.append(cotangent)
        return values, tuple(aux), _joined(cotangents, "outputs")[0], grads

    def _run_one(self, captured: Tensors, *given: PyTree) -> _LossResult:
        def loss(*args: Any) -> Any:
            returned = self.loss(*args)
            tensors = pytree.tensors(returned)
            innermost = [list(layers(tensor))[-1] for tensor in tensors]  # with the eager graph
            captured.extend(tensor for tensor in innermost if tensor.requires_grad)
            return returned

        options = {"has_aux": self.has_aux, "weights": self.weights, "create_graph": False}
        differentiated = value_and_grads(loss, 0 if self.arguments == 1 else (0, 1), **options)
        result, grads = differentiated(*given[: self.arguments])
        values, aux = result if self.has_aux else (result, None)
        return values, aux, *((grads, None) if self.arguments == 1 else grads)


def _added(total: PyTree, grads: PyTree) -> PyTree:
    """Return the sum of two trees, in the memory of the first where that is dense."""
    if total is None:
        return grads
    into, spec = pytree.flatten(total)
    return pytree.unflatten(spec, list(map(_plus_, into, pytree.flatten(grads)[0])))


def _plus_(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None or a.layout != torch.strided:
        return add_leaves(a, b)
    return a.add_(b)


def _marked(tree: PyTree, sources: Iterable[Tensor]) -> PyTree:
    """Return a tree whose derivative raises: it would silently be zero."""
    carriers = [x for x in sources if x.requires_grad]
    if not carriers or not torch.is_grad_enabled():
        return tree
    leaves, spec = pytree.flatten(tree)
    return pytree.unflatten(spec, with_refused_derivatives(leaves, carriers, _NO_DERIVATIVE))
