"""Results are owned: a gradient that a call returns shares memory with nothing else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import chain, compress, pairwise
from operator import add, attrgetter
from typing import Any

import torch
from torch import Tensor

from gradkit._compat import autograd
from gradkit._compat.transforms import detach_keep_tangent
from gradkit._compat.undoing import INSIDE

_nbytes = attrgetter("nbytes")


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two entries of a tensor may lie in one place in memory, as if expanded."""
    if tensor.is_contiguous():
        return False
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < end:
                return True
            end = stride * (size - 1) + end
    return False


def shared_by(written: Sequence[Tensor], read: Sequence[Tensor | None]) -> tuple[int, int] | None:
    """Return a tensor that is written, and another one in its memory; None if there is none."""
    # The two are indices into `written + read`; `read[i]` may be exactly `written[i]`.
    tensors = [*written, *(y for y in read if y is not None)]
    if _are_disjoint(tensors) or any(x.is_meta for x in tensors):  # meta tensors have no memory
        return None
    spans = [(*_span(x), index) for index, x in enumerate(written) if x.numel()]
    for index, (x, y) in enumerate(zip(written, read, strict=True)):
        if y is not None and y.numel() and not _is_same(x, y):
            spans.append((*_span(y), len(written) + index))
    last_end, last = [0, 0], [0, 0]  # the ends of what is written, and of what is read
    for start, end, index in sorted(spans):
        is_read = index >= len(written)
        for kind in (0,) if is_read else (0, 1):
            if start < last_end[kind]:
                first, second = sorted((index, last[kind]))
                return first, second
        if end > last_end[is_read]:
            last_end[is_read], last[is_read] = end, index
    return None


def _are_disjoint(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors are contiguous, and no two share memory; False if unsure."""
    # A Python loop over the leaves takes as long as their sum: `map` reads an attribute of all.
    if not all(map(Tensor.is_contiguous, tensors)):
        return False
    starts = list(map(Tensor.data_ptr, tensors))
    spans = sorted(zip(starts, map(add, starts, map(_nbytes, tensors)), strict=True))
    return all(end <= start for (_, end), (start, _) in pairwise(spans))


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a dense tensor, and the one after its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    last = sum(stride * (size - 1) for stride, size in pairs)
    return start, start + (last + 1) * tensor.element_size()


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes on, called so: in place, `out=`, and in lists."""
    tensors: list[Tensor] = []
    for index, name in written_arguments(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        values = value if isinstance(value, tuple | list) else (value,)
        tensors += [each for each in values if isinstance(each, Tensor)]
    return tensors


@cache
def written_arguments(func: Any) -> list[tuple[int, str]]:
    """Return the position and name of each argument that an operator writes to."""
    schema = autograd.operator_schema(func)
    # A higher-order operator, such as torch.cond, has none, and torch lets none write. To record a
    # stream writes on no entry of a tensor.
    if schema is None or schema.name == "aten::record_stream":
        return []
    missing = _MISSING_FROM_SCHEMA.get(func.overloadpacket.__name__, ())
    return [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.name in missing
        or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


# The schemas of these do not say that the running statistics are written to.
_MISSING_FROM_SCHEMA = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats",
     "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
    ("running_mean", "running_var"),
)  # fmt: skip


# A tensor of these types is one storage; a subclass may have several, or none.
PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})

_base = attrgetter("_base")
_is_cpu = attrgetter("is_cpu")
_TURNS = 11  # the thread of a device may let go in one: some microseconds each
_address, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous


def own(grads: list[Tensor], params: Sequence[Tensor], leading: tuple[int, ...] = ()) -> None:
    """Copy, in the list, each gradient that shares memory or has another layout than its param."""
    # `grads` have no graph, and only this list may refer to them. The layout is that which
    # `AccumulateGrad` gives: the strides of a dense parameter, else contiguous ones; in a dimension
    # of size 1 any stride is right. `leading`: the shape in front of that of the parameters.
    if leading and not all(map(_is_contiguous, params)):
        params = [_layout_of_rows(param, leading) for param in params]
        leading = ()
    for index in _not_owned(grads, params):
        like = _layout_of_rows(params[index], leading) if leading else params[index]
        grads[index] = copy_for(detach_keep_tangent(grads[index]), like)


def owned(
    grads: list[Tensor | None], params: Sequence[Tensor], leading: tuple[int, ...] = ()
) -> list[Tensor | None]:
    """Return gradients without a graph, each in memory of its own; None stays None."""
    # Nothing but `grads` may refer to them. If something has to be copied, the list is changed in
    # place, or emptied if it holds a None: use what is returned.
    if type(None) not in set(map(type, grads)):
        if not _are_owned(grads, params, _UNSHARED):  # type: ignore[arg-type]
            own(grads, params, leading)  # type: ignore[arg-type]
        return grads
    present = [grad for grad in grads if grad is not None]
    if _are_owned(present, params, _UNSHARED + 1):  # both lists refer to each
        return grads
    reached = [grad is not None for grad in grads]
    grads.clear()
    own(present, list(compress(params, reached)), leading)
    copies = iter(present)
    return [next(copies) if is_reached else None for is_reached in reached]


def owned_of_each(
    each: list[list[Tensor | None]], params: Sequence[Sequence[Tensor]]
) -> list[list[Tensor | None]]:
    """Return what `owned` does of the gradients of each of several passes, looked at together."""
    present = [grad for grads in each for grad in grads if grad is not None]
    every = chain.from_iterable(dict(zip(map(id, params), params, strict=True)).values())
    if _are_owned(present, every, _UNSHARED + 1):  # a list of a pass, and this one
        return each
    del present
    return [owned(grads, some) for grads, some in zip(each, params, strict=True)]


def _not_owned(grads: list[Tensor], params: Sequence[Tensor]) -> Sequence[int]:
    for _ in range(_TURNS):
        if _are_owned(grads, params, _UNSHARED):
            return ()
        references = list(map(sys.getrefcount, grads))
        if all(map(_is_cpu, grads)) or max(references) <= _UNSHARED:
            break
        # The thread of a device refers to what a pass gave until it gets the interpreter's lock.
        time.sleep(1e-6)
    try:
        return [
            index
            for index, grad in enumerate(grads)
            if references[index] != _UNSHARED
            or not are_alone_in_memory([grad])
            or not is_laid_out(grad, params[index])
        ]
    except _WITHOUT_STORAGE:
        return range(len(grads))  # always copied


# A sparse tensor, or a wrapper without a storage, raises one of these.
_WITHOUT_STORAGE = (RuntimeError, NotImplementedError, TypeError)


def _are_owned(grads: list[Tensor], params: Iterable[Tensor], unshared: int) -> bool:
    """Return whether contiguous gradients of contiguous params share no memory."""
    # A Python loop would double the time of a call: `map` reads one attribute of all leaves.
    # What is contiguous was not expanded, but along dimensions of size 1, where it does not matter.
    try:
        return (
            all(map(_is_contiguous, grads))
            and all(map(_is_contiguous, params))
            and not (0 in map(_address, grads) and any(map(autograd.is_zero_tensor, grads)))
            and set(map(sys.getrefcount, grads)) <= {unshared}  # only the caller's lists hold them
            and are_alone_in_memory(grads)
        )
    except _WITHOUT_STORAGE:
        return False


def is_laid_out(grad: Tensor, param: Tensor) -> bool:
    """Return whether a dense gradient has the strides of a first accumulation into `.grad`."""
    if grad.is_nested:
        return grad.is_contiguous()  # such a tensor has no strides
    # An expanded tensor, or a zero tensor without memory, cannot be changed in place.
    if 0 in grad.stride() or autograd.is_zero_tensor(grad):
        return False
    if param.layout != torch.strided or param.is_contiguous() or not _is_dense(param):
        return grad.is_contiguous()
    pairs = zip(param.shape, grad.stride(), param.stride(), strict=True)
    return all(ours == theirs for size, ours, theirs in pairs if size != 1)


def _is_dense(param: Tensor) -> bool:
    # empty_like keeps the strides of a tensor exactly when it is dense and does not overlap.
    return torch.empty_like(param, device="meta").stride() == param.stride()


def are_alone_in_memory(tensors: list[Tensor]) -> bool:
    """Return whether no other tensor has the storage of one, but a base nothing else refers to."""
    uses = list(map(autograd.storage_use_count, map(autograd.storage_address, tensors)))
    counts = set(uses)
    if counts == {_STORAGE_UNSHARED}:
        return True
    if not counts <= {_STORAGE_UNSHARED, _VIEW_UNSHARED}:
        return False
    bases = list(map(_base, compress(tensors, map(_VIEW_UNSHARED.__eq__, uses))))
    if type(None) in map(type, bases):
        return False  # not a view, but a result of detach(), which shares memory, too
    return set(map(autograd.tensor_use_count, bases)) == {_BASE_UNSHARED} and set(
        map(sys.getrefcount, bases)
    ) == {_BASE_UNREFERENCED}


def copy_for(grad: Tensor, param: Tensor) -> Tensor:
    """Return a copy of a gradient, and its graph, with the layout of a first accumulation."""
    plain = grad.layout == torch.strided and type(grad) is Tensor and not grad.requires_grad
    if not plain or grad.is_nested or is_laid_out(grad, param):
        return grad.clone()
    return empty_for(param, grad.dtype, device=grad.device).copy_(grad)


def empty_for(
    param: Tensor,
    dtype: torch.dtype,
    leading: tuple[int, ...] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Return an uninitialized dense gradient of shape `leading + param.shape`."""
    device = device or param.device
    if param.layout != torch.strided:
        return torch.empty(*leading, *param.shape, dtype=dtype, device=device)
    inner = param.stride()
    if not _is_dense(param):
        inner = torch.empty(param.shape, device="meta").stride()
    strides: list[int] = []
    step = param.numel()
    for size in reversed(leading):
        strides.insert(0, step)
        step *= size
    return torch.empty_strided(
        (*leading, *param.shape), (*strides, *inner), dtype=dtype, device=device
    )


def _layout_of_rows(param: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Return a meta tensor with the layout of stacked gradients of `param`."""
    return empty_for(param, param.dtype, leading, torch.device("meta"))


def zeros_for(param: Tensor, leading: tuple[int, ...] = ()) -> Tensor:
    """Return a dense zero gradient for `param`, in the dtype of its gradient."""
    if torch.compiler.is_compiling():  # a trace cannot read `grad_dtype`, or strides
        return torch.zeros((*leading, *param.shape), dtype=param.dtype, device=param.device)
    if type(param) not in PLAIN_TYPES or param.is_nested:
        zero = zeros_of(param, grad_dtype(param))
        if not leading:
            return zero
        count = torch.Size(leading).numel()
        rows = torch.stack([zero] * max(count, 1))  # torch stacks no empty list
        return (rows if count else rows[:0]).reshape(*leading, *param.shape)
    return empty_for(param, grad_dtype(param), leading).zero_()


def zeros_of(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros like a tensor; plain ones for a frozen one of a class that cannot make them."""
    try:
        return torch.zeros_like(tensor.detach(), dtype=dtype)
    except (RuntimeError, TypeError):  # a quantized weight knows few operations
        if tensor.requires_grad or type(tensor) in PLAIN_TYPES:
            raise
    return torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)


def grad_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of a gradient of `param`: `param.grad_dtype`, or `param.dtype`."""
    return (param.grad_dtype if param.grad_fn is None else None) or param.dtype


# The counts of a tensor that nothing else refers to, read in the same way as above.
_lone, _view = [torch.empty(2)], [torch.empty(2)[:1]]
_UNSHARED = next(map(sys.getrefcount, _lone))
_STORAGE_UNSHARED = next(map(autograd.storage_use_count, map(autograd.storage_address, _lone)))
_VIEW_UNSHARED = next(map(autograd.storage_use_count, map(autograd.storage_address, _view)))
_bases = list(map(_base, _view))
_BASE_UNSHARED = next(map(autograd.tensor_use_count, _bases))
_BASE_UNREFERENCED = next(map(sys.getrefcount, _bases))
del _lone, _view, _bases


def leave_inference_mode(*, record: bool = False) -> AbstractContextManager[object]:
    """Leave inference mode: a gradient made in it could not take part in autograd later [E6]."""
    # `record` has operations inside recorded, as a function that is differentiated needs it.
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return INSIDE
    return _left_inference_mode(record)


def without_inference(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, copied if of inference mode: autograd could not save those."""
    return [x.clone() if x.is_inference() else x for x in tensors]


@contextmanager
def _left_inference_mode(record: bool) -> Iterator[None]:
    with torch.inference_mode(False), nullcontext() if record else torch.no_grad(), INSIDE:
        yield
