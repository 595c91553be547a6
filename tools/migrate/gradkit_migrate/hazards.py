"""What makes `.grad` matter to other code of a file, so that none of its loops is moved."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from gradkit_migrate.source import (
    Function,
    Node,
    Source,
    arguments,
    called,
    constant,
    dotted,
    last_name,
)

SEVERAL = "gradkit.distributed.value_and_grads(loss, model)"
WRAPPED = (
    "docs/with_accelerate.md and docs/with_lightning.md have such loops; in several processes "
    f"{SEVERAL}"
)
READ = "gradkit.write_grads_(model, grads) before the code that reads .grad"
GRAPHS = "move the loop without the captured graph first"
RENAME = "rename it, so that `import gradkit` can be added"
HOOKS = "see 'Which hooks run' in docs/moving_a_loop.md; gradkit.backward_(loss) runs all"
REENTRANT = "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
HOOK = re.compile(r"watch$|register_(?!(module_)?forward|state|load)\w*hook$")
SEVERAL_NAMES = {
    "DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "fully_shard",
    "DataParallel", "no_sync", "ZeroRedundancyOptimizer", "DistributedOptimizer", "deepspeed",
    "horovod", "hvd", "torch_xla", "parallelize_module", "distribute_tensor", "distribute_module",
    "ShardedGradScaler",
}  # fmt: skip
GRAPH_NAMES = {"CUDAGraph", "make_graphed_callables", "compiled_autograd"}
# Classes that wrap nothing as long as they are imported alone, and the methods that wrap.
WRAPPERS = {"Accelerator": "prepare", "Fabric": "setup"}
# Of a script that is started in several processes, whatever wraps its model.
PROCESSES = re.compile(
    r"distributed|(^|_)(ddp|fsdp|world_size|(local|global|get)_rank|all_reduce|reduce_dict|nccl)"
    r"(_|$)",
    re.IGNORECASE,
)
# `log_gradients`, `GradNorm`, and neither `gradual` nor `Adagrad`.
GRADIENT = re.compile(r"((?<![a-z])grad|Grad)(s|ient|ients)?(?![a-z])")
# These read no `.grad`. (`clip_grad_norm_` and `zero_grad` are lines of a loop.)
HARMLESS_GRAD_NAMES = {
    "no_grad", "enable_grad", "set_grad_enabled", "is_grad_enabled", "requires_grad_",
    "zero_grad", "clip_grad_norm_", "GradScaler", "gradcheck", "gradgradcheck",
    "value_and_grads", "per_loss_grads", "simultaneous_grads", "per_sample_grads",
    "mean_value_and_grads", "staged_value_and_grads", "check_grads", "autograd",
}  # fmt: skip
PURE_GRAD = {"torch.autograd.grad", "torch.func.grad", "torch.func.grad_and_value"}

Hazard = tuple[int, str, str]  # line, what was seen, what to do by hand


def first_hazard(source: Source) -> Hazard | None:
    """Return the first reason to leave every loop of a file, if there is one."""
    return min(_hazards(source), default=None)


def _hazards(source: Source) -> Iterator[Hazard]:
    for name in source.walk(source.module, cst.Name):
        line = source.line(name)
        yield from _of_name(source, name, line)
    for attribute in source.walk(source.module, cst.Attribute):
        if attribute.attr.value == "grad" and not source.full_names(attribute) & PURE_GRAD:
            yield source.line(attribute), f"{source.text(attribute)[:40]} is used", READ
    for string in source.walk(source.module, cst.SimpleString):
        line, text = source.line(string), string.evaluated_value
        if text == "grad":
            yield line, "'grad' is a string here: .grad may be read", READ
        elif text in {"WORLD_SIZE", "LOCAL_RANK"}:
            yield line, f"the program runs in several processes ({text})", SEVERAL
    for call in source.calls:
        yield from _of_call(source, call, source.line(call))


def _of_name(source: Source, name: cst.Name, line: int) -> Iterator[Hazard]:
    word, parent = name.value, source.parents[name]
    if HOOK.match(word):
        yield line, f"hooks run in the backward pass ({word})", HOOKS
    if word in SEVERAL_NAMES:
        yield line, f"the model is wrapped for several processes or devices ({word})", SEVERAL
    if word in GRAPH_NAMES:
        yield line, f"the step is captured or compiled with its backward pass ({word})", GRAPHS
    is_import = isinstance(parent, cst.ImportAlias)
    is_bound = isinstance(parent, cst.Param) or (source.is_stored(name) and not is_import)
    if word == "gradkit" and is_bound:
        yield line, "the name gradkit is used for something else", RENAME
    if PROCESSES.search(word) and not (isinstance(parent, cst.Arg) and parent.keyword is name):
        yield line, f"the program runs in several processes ({word})", SEVERAL
    last = {full.rpartition(".")[2] for full in source.full_names(name)}
    wraps = {WRAPPERS[one] for one in {word, *last} & WRAPPERS.keys()}
    if not wraps or source.is_stored(name):
        return
    used = [call for call in source.calls if last_name(call).startswith(tuple(wraps))]
    if used or not is_import:
        yield line, f"{word} may wrap the model and the optimizer", WRAPPED


def _of_call(source: Source, call: cst.Call, line: int) -> Iterator[Hazard]:
    name, full = last_name(call), " ".join(source.full_names(call.func))
    given = arguments(call)
    is_checkpoint = name in {"checkpoint", "checkpoint_sequential"} and "checkpoint." in full
    if is_checkpoint and constant(given.get("use_reentrant")) is not False:
        yield line, "checkpoint without use_reentrant=False", REENTRANT
    if name == "graph" and full.startswith("torch.cuda"):
        yield line, "the step is captured in a CUDA graph", GRAPHS
    reads = GRADIENT.search(name) and name not in HARMLESS_GRAD_NAMES
    ours = name in source.functions or name in source.classes  # whose code is read here, too
    if reads and not ours and full not in PURE_GRAD and not full.startswith("torch.optim."):
        yield line, f"{source.text(call.func)[:50]} may read or write .grad", READ
    if name == "clip_grad_norm_" and name in source.functions:
        yield line, f"{name} is defined here, and is not torch's", READ
    if name in {"compile", "script", "trace"} and full.startswith("torch."):
        compiled = dotted(call.args[0].value) if call.args else ""
        if compiled in source.functions:
            yield line, f"{compiled} is compiled", GRAPHS


# Parameters that are frozen once their optimizer is made: a phase may reach none of them.


def first_freezing(source: Source, made: list[Node]) -> Node | None:
    """Return the first place that freezes parameters which an optimizer may have already."""
    makers = source.callers(made)
    made = [*made, *(call for call in source.calls if called(call) in makers)]
    late = (node for node in _freezing(source) if _is_late(source, made, node, frozenset()))
    return min(late, key=source.at, default=None)


def _freezing(source: Source) -> Iterator[Node]:
    """Yield each place that may set requires_grad to False."""
    for node in source.walk(source.module, cst.Attribute):
        value = getattr(source.statement(node), "value", None)
        is_flag = node.attr.value == "requires_grad" and source.is_stored(node)
        if is_flag and constant(value) is not True:
            yield node
    for call in source.calls:
        given = list(arguments(call, "0", "1", "2").values())
        if last_name(call) == "requires_grad_" and given and constant(given[0]) is not True:
            yield call
        elif last_name(call) == "setattr" and len(given) == 3 and constant(given[2]) is not True:
            name = constant(given[1])
            yield from [call] if name == "requires_grad" or not isinstance(name, str) else []


def _is_late(source: Source, made: list[Node], node: Node, seen: frozenset[Function]) -> bool:
    """Return whether an optimizer may have been made before some code runs."""
    function = source.function(node)
    own = [one for one in made if source.function(one) is function]
    if own:
        loops = source.loops(node)
        return any(
            source.at(one) < source.at(node) or any(p in loops for p in source.loops(one))
            for one in own
        )
    if not isinstance(function, cst.FunctionDef) or function in seen:
        return isinstance(function, cst.Lambda)
    if function.name.value == "__init__":
        return False  # of the module, which its optimizer is made from later
    calls = [call for call in source.calls if last_name(call) == function.name.value]
    return not calls or any(_is_late(source, made, call, seen | {function}) for call in calls)
