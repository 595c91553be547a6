"""The gradient of a loss of a whole batch, at the memory of one chunk of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradkit._compat.transforms import layers, transforms
from gradkit._core import pytree
from gradkit._core.call import check_bool, check_chunk_size, check_function, check_option
from gradkit._core.leaf_arithmetic import add_leaves
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.pytree import PyTree
from gradkit._core.results_without_graph import with_refused_derivatives
from gradkit._state.snapshot import put_back_on_error
from gradkit.errors import DetachedLossError, OptionError, UnsupportedGraphError, message
from gradkit.func._arguments import Arguments, read_arguments
from gradkit.func._chunks import Batch, joined
from gradkit.func._differentiate import cast_to
from gradkit.func._encoder_stage import EncoderStage
from gradkit.func._errors import independent, named_errors
from gradkit.func._grads import value_and_grads

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
    at once, such as the logits of a language model. The chunks are encoded without a graph, the
    loss is differentiated with respect to their outputs, and each chunk is encoded again for its
    part of the gradient: exactly that of `loss(encode(params, batch))` in which `encode` treats
    chunks independently, up to rounding. The second run of a chunk draws the same random numbers
    and leaves buffers as the first left them. If the call raises, the buffers of modules that
    `encode` and `loss` refer to are as before.

    Example:
        >>> import torch, gradkit
        >>> def encode(params, x):
        ...     return torch.tanh(x @ params["w"])
        >>> def loss(embeddings):
        ...     similarities = embeddings @ embeddings.T
        ...     return torch.logsumexp(similarities, 1).mean()
        >>> step = gradkit.func.staged_value_and_grads(encode, loss, chunk_size=2)
        >>> value, grads = step({"w": torch.ones(3, 2)}, torch.eye(6, 3))
        >>> grads["w"].shape
        torch.Size([3, 2])

    Args:
        encode: `encode(params, chunk)` returns a tree of real floating-point tensors, which are
            concatenated along their first dimension. Or a tree of such functions, for several
            towers, each of which encodes its part of the batch with its own number of samples.
        loss: Takes what `encode` returned for the whole batch; if it has a second argument, the
            params too, and if it has a third, the batch. It returns a tree of real losses of one
            element each, with `has_aux` a pair of that and a tree of anything.
        chunk_size: The number of samples that are encoded at once; None is all, and encodes once.
        loss_chunk_size: The number of rows of what `encode` returned, and of the batch, that
            `loss` takes at once, if the loss is a sum over them: its values are added. None is all.
        has_aux: Whether `loss` returns something beside the losses.
        weights: As in `value_and_grads`.
        create_graph: None: a derivative of the results raises `UnsupportedGraphError` when it is
            taken. False: the results are constants, and take one copy less.

    Returns:
        A function of `(params, batch)` that returns `(values, grads)`, or `((values, aux), grads)`,
        as `value_and_grads(...)(params)` does; with `loss_chunk_size`, aux is a tuple, of what each
        chunk gave. `batch` is a tree whose tensors have one first dimension, for several towers
        one such tree for each; what is no tensor in it is passed whole.

    Raises:
        OptionError: An option has no such value, or `encode` or `loss` is not a function.
        StructureError: The batch has no tensors with one first dimension, or an output of `encode`
            has no dimension.
        UnsupportedGraphError: It is called inside a transform or under torch.compile; or a chunk
            gave another result when it was encoded again.
        GradkitError: As in `value_and_grads`.

    Source:
        Gao, Zhang, Han, Callan 2021, "Scaling Deep Contrastive Learning Batch Size under Memory
        Limited Setup", https://arxiv.org/abs/2101.06983, section 3.2.
    """
    encoders, towers = pytree.flatten(encode)
    for index, encoder in enumerate(encoders):
        check_function(encoder, pytree.path(towers, index, "encode"))
    check_function(loss, "loss")
    check_chunk_size(chunk_size)
    check_chunk_size(loss_chunk_size, "loss_chunk_size")
    check_bool("has_aux", has_aux)
    if create_graph is not None:
        check_option("create_graph", create_graph, (False, None))
    loss_stage = _LossStage(loss, _arguments_of(loss), loss_chunk_size, has_aux, weights)

    def run(params: PyTree, batch: PyTree) -> Any:
        _refuse_transforms()
        arguments = read_arguments((params,), 0, "params")
        parts = pytree.flatten_up_to(towers, "encode", batch, "batch")
        batches = [Batch(part, pytree.path(towers, i, "batch")) for i, part in enumerate(parts)]
        stages = [
            EncoderStage(encoder, arguments, part, chunk_size)
            for encoder, part in zip(encoders, batches, strict=True)
        ]
        outputs = pytree.unflatten(towers, [stage.outputs() for stage in stages])
        if loss_stage.arguments == 1 and not any(stage.is_differentiable for stage in stages):
            raise DetachedLossError(independent("encode(params, chunk)"))
        captured: list[Tensor] = []
        given = outputs, arguments.args[0], batch
        values, aux, cotangents, of_loss = loss_stage.run(*given, captured)
        total = _by_variable(of_loss, arguments)
        by_tower = pytree.flatten_up_to(towers, "encode", cotangents, "outputs")
        for stage, cotangent in zip(stages, by_tower, strict=True):
            for part in stage.grads(cotangent):
                total = list(map(_plus_, total, part))
        grads = arguments.grads_to_tree(cast_to(arguments.dtypes, total))
        if create_graph is None:
            sources = [*arguments.variables, *captured]
            sources += [x for stage in stages for x in stage.captured.values()]
            values, grads = (_marked(tree, sources) for tree in (values, grads))
        return ((values, aux), grads) if has_aux else (values, grads)

    def call(params: PyTree, batch: PyTree) -> Any:
        with put_back_on_error(*encoders, loss), leave_inference_mode(record=True):
            return named_errors(lambda: run(params, batch))

    return call


def _refuse_transforms() -> None:
    if transforms() or torch.compiler.is_compiling():
        expected = "a call outside of torch.func's transforms and torch.compile"
        fix = "gradkit.func.value_and_grads of the whole batch there"
        text = message("func.staged_value_and_grads", expected, "one inside, which runs twice", fix)
        raise UnsupportedGraphError(text)


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

    loss: Callable[..., Any]
    arguments: int
    chunk_size: int | None
    has_aux: bool
    weights: PyTree

    def run(
        self, outputs: PyTree, params: PyTree, batch: PyTree, captured: list[Tensor]
    ) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        """Return the values, the aux, and the gradients with respect to outputs and params."""
        # What the losses depend on besides is added to `captured`.
        if self.chunk_size is None:
            return self._run_one(outputs, params, batch, captured)
        rows = Batch((outputs, batch) if self.arguments == 3 else (outputs,), "outputs")
        values, grads, aux, cotangents = None, None, [], []
        for chunk in rows.chunks(self.chunk_size):
            value, one_aux, cotangent, grad = self._run_one(chunk[0], params, chunk[-1], captured)
            values, grads = _sum(values, value), _sum(grads, grad)
            aux.append(one_aux)
            cotangents.append(cotangent)
        return values, tuple(aux), joined(cotangents, "outputs")[0], grads

    def _run_one(
        self, outputs: PyTree, params: PyTree, batch: PyTree, captured: list[Tensor]
    ) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        def loss(*args: Any) -> Any:
            returned = self.loss(*args)
            tensors = pytree.tensors(returned)
            innermost = [list(layers(tensor))[-1] for tensor in tensors]  # with the eager graph
            captured.extend(tensor for tensor in innermost if tensor.requires_grad)
            return returned

        differentiated = value_and_grads(
            loss,
            0 if self.arguments == 1 else (0, 1),
            has_aux=self.has_aux,
            weights=self.weights,
            create_graph=False,
        )
        result, grads = differentiated(*(outputs, params, batch)[: self.arguments])
        values, aux = result if self.has_aux else (result, None)
        cotangents, of_params = (grads, None) if self.arguments == 1 else grads
        return values, aux, cotangents, of_params


def _by_variable(grads: PyTree, arguments: Arguments) -> list[Tensor | None]:
    """Return the gradients of the loss by itself, which may not use the params, by variable."""
    if grads is None:
        return [None] * len(arguments.variables)
    return arguments.params.per_variable(pytree.flatten(grads)[0])


def _sum(total: PyTree, grads: PyTree) -> PyTree:
    """Return the sum of two trees, in the memory of the first where that is dense."""
    if total is None or grads is None:
        return grads if total is None else total
    into, spec = pytree.flatten(total)
    added, _ = pytree.flatten(grads)
    return pytree.unflatten(spec, list(map(_plus_, into, added)))


def _plus_(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None or a.layout != torch.strided:
        return add_leaves(a, b)
    return a.add_(b)


def _marked(tree: PyTree, sources: Iterable[object]) -> PyTree:
    """Return a tree whose derivative raises: it would silently be zero."""
    leaves, spec = pytree.flatten(tree)
    tensors = [x for x in sources if isinstance(x, Tensor) and x.requires_grad]
    if not tensors or not torch.is_grad_enabled():
        return tree
    return pytree.unflatten(spec, with_refused_derivatives(leaves, tensors, _NO_DERIVATIVE))
