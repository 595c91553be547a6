"""What makes `.grad` matter to other code of a file, so that none of its loops is moved."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gradkit._migrate.program import FUNCTIONS, Program, dotted, last_name

HOOKS = "hooks run in the backward pass"
SEVERAL = "the model is wrapped for several processes or devices"
BY_HAND_HOOKS = "see 'Which hooks run' in docs/moving_a_loop.md; gradkit.backward_(loss) runs all"
BY_HAND_GRAD = "gradkit.write_grads_(model, grads) before the code that reads .grad"
BY_HAND_SEVERAL = "gradkit.distributed.value_and_grads(loss, model)"
BY_HAND_WRAPPED = (
    "docs/with_accelerate.md and docs/with_lightning.md have such loops; in several processes "
    "gradkit.distributed.value_and_grads(loss, model)"
)
BY_HAND_CHECKPOINT = "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
BY_HAND_GRAPHS = "move the loop without the captured graph first"
BY_HAND_NAME = "rename it, so that `import gradkit` can be added"
HOOK_NAMES = {
    "register_hook", "register_full_backward_hook", "register_full_backward_pre_hook",
    "register_backward_hook", "register_module_full_backward_hook", "register_multi_grad_hook",
    "register_module_full_backward_pre_hook", "register_module_backward_hook",
    "register_post_accumulate_grad_hook", "register_step_pre_hook", "register_step_post_hook",
    "register_optimizer_step_pre_hook", "register_optimizer_step_post_hook", "watch",
}  # fmt: skip
SEVERAL_NAMES = {
    "DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "fully_shard",
    "DataParallel", "no_sync", "ZeroRedundancyOptimizer", "DistributedOptimizer", "deepspeed",
    "horovod", "hvd", "torch_xla", "parallelize_module", "distribute_tensor", "distribute_module",
    "ShardedGradScaler",
}  # fmt: skip
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
GRAPH_NAMES = {"CUDAGraph", "make_graphed_callables", "compiled_autograd"}
# These read no `.grad`. (`clip_grad_norm_` and `zero_grad` are lines of a loop.)
HARMLESS_GRAD_NAMES = {
    "no_grad", "enable_grad", "set_grad_enabled", "is_grad_enabled", "requires_grad_",
    "zero_grad", "clip_grad_norm_", "GradScaler", "gradcheck", "gradgradcheck",
    "value_and_grads", "per_loss_grads", "simultaneous_grads", "per_sample_grads",
    "mean_value_and_grads", "staged_value_and_grads", "check_grads", "autograd",
}  # fmt: skip
PURE_GRAD = {"torch.autograd.grad", "torch.func.grad", "torch.func.grad_and_value"}

Hazard = tuple[int, str, str]  # line, what was seen, what to do by hand


def first_hazard(program: Program) -> Hazard | None:
    """Return the first reason to leave every loop of a file, if there is one."""
    return min(_hazards(program), default=None)


def _hazards(program: Program) -> Iterator[Hazard]:
    for node in ast.walk(program.tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Attribute | ast.Name):
            yield from _of_name(program, node, line)
        elif isinstance(node, ast.alias):
            yield from _of_words({*node.name.split("."), node.asname or ""}, line)
            yield from _of_wrapper(program, node, line)
        elif isinstance(node, ast.arg):
            yield from _of_words({node.arg}, line)
        elif isinstance(node, ast.Constant) and node.value == "grad":
            yield line, "'grad' is a string here: .grad may be read", BY_HAND_GRAD
        elif isinstance(node, ast.Constant) and node.value in {"WORLD_SIZE", "LOCAL_RANK"}:
            yield from _of_words({node.value}, line)
        elif isinstance(node, ast.Call):
            yield from _of_call(program, node, line)
        if "gradkit" in _bound_names(node):
            yield line, "the name gradkit is used for something else", BY_HAND_NAME


def _of_name(program: Program, node: ast.Attribute | ast.Name, line: int) -> Iterator[Hazard]:
    name = node.attr if isinstance(node, ast.Attribute) else node.id
    is_function = program.qualified(node) in PURE_GRAD
    if isinstance(node, ast.Attribute) and name == "grad" and not is_function:
        yield line, f"{ast.unparse(node)[:40]} is used", BY_HAND_GRAD
    yield from _of_words({name}, line)
    wrapper = program.qualified(node).rpartition(".")[2]
    if isinstance(node.ctx, ast.Load) and {name, wrapper} & WRAPPERS.keys():
        yield line, f"{name} may wrap the model and the optimizer", BY_HAND_WRAPPED


def _of_wrapper(program: Program, node: ast.alias, line: int) -> Iterator[Hazard]:
    """Yield an imported class that wraps models, if one of its methods is called, too."""
    method = WRAPPERS.get(node.name.rpartition(".")[2])
    calls: list[ast.Call] = program.of_type(ast.Call) if method else []
    if method and any(last_name(call).startswith(method) for call in calls):
        yield line, f"{node.name} may wrap the model and the optimizer", BY_HAND_WRAPPED


def _of_words(words: set[str], line: int) -> Iterator[Hazard]:
    for names, text, by_hand in (
        (HOOK_NAMES, HOOKS, BY_HAND_HOOKS),
        (SEVERAL_NAMES, SEVERAL, BY_HAND_SEVERAL),
        (GRAPH_NAMES, "the step is captured or compiled with its backward pass", BY_HAND_GRAPHS),
    ):
        for word in sorted(words & names):
            yield line, f"{text} ({word})", by_hand
    for word in sorted(filter(PROCESSES.search, words)):
        yield line, f"the program runs in several processes ({word})", BY_HAND_SEVERAL


def _of_call(program: Program, call: ast.Call, line: int) -> Iterator[Hazard]:
    name, full = last_name(call), program.qualified(call.func)
    options = {k.arg: ast.unparse(k.value) for k in call.keywords}
    is_checkpoint = name in {"checkpoint", "checkpoint_sequential"} and "checkpoint." in full
    if is_checkpoint and options.get("use_reentrant") != "False":
        yield line, "checkpoint without use_reentrant=False", BY_HAND_CHECKPOINT
    if name == "graph" and full.startswith("torch.cuda"):
        yield line, "the step is captured in a CUDA graph", BY_HAND_GRAPHS
    reads = GRADIENT.search(name) and name not in HARMLESS_GRAD_NAMES
    ours = name in program.functions or name in program.classes  # whose code is read here, too
    if reads and not ours and full not in PURE_GRAD and not full.startswith("torch.optim."):
        yield line, f"{ast.unparse(call.func)[:50]} may read or write .grad", BY_HAND_GRAD
    if name in {"clip_grad_norm_"} and name in program.functions:
        yield line, f"{name} is defined here, and is not torch's", BY_HAND_GRAD
    if name in {"compile", "script", "trace"} and full.startswith("torch."):
        for part in call.args[:1]:
            if dotted(part) in program.functions:
                yield line, f"{dotted(part)} is compiled", BY_HAND_GRAPHS


def _bound_names(node: ast.AST) -> set[str]:
    """Return the names that a node binds, other than by an import of gradkit."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return {node.id}
    if isinstance(node, ast.alias):
        return {node.asname or node.name} - ({"gradkit"} if node.name == "gradkit" else set())
    if isinstance(node, ast.arg):
        return {node.arg}
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not isinstance(node, ast.Lambda):
        return {node.name}
    return set()
