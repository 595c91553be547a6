"""The rooms keep to themselves: what is done in one place is done nowhere else, read by `ast`."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import gradkit
from tests import house

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gradkit"
TOOLS = ROOT / "tools"
RUN_TORCH = [TOOLS / "doctor" / "gradkit_doctor", TOOLS / "parity" / "gradkit_parity"]
TESTS = sorted(ROOT.glob("tests/**/test_*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef

# What stands for a term of the field's, and is none itself. (`target` is one in a user's program.)
FORBIDDEN = {
    "target", "wanted", "found", "live", "further", "brought", "told", "place",
    "Found", "Share", "Kept", "Work", "Offer", "Reads", "Watch", "Trap", "Judge", "Lab", "Ran",
    "spread", "matching_leaves", "open_up", "settle", "came_to", "one_for_all",
    "_chance", "_held", "_keeping", "_ways", "_stack", "_uncompiled", "_lifetime", "_rows",
}  # fmt: skip
# Arguments of functions of torch's that stand for them.
NAMES_OF_TORCH = {("traced_operations", "target")}
ENGINE = {"torch.autograd.grad", "torch.autograd.backward"}
ENGINE_PRIVATE = {"_autograd_grad", "_engine_run_backward", "run_backward"}

pytestmark = pytest.mark.xdist_group("house")  # one process parses the package


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def sources() -> dict[Path, ast.Module]:
    return {path: parsed(path) for folder in (PACKAGE, *RUN_TORCH) for path in folder.rglob("*.py")}


def room(path: Path) -> str:
    """Return the folder of the package that a file is in; a file beside the folders is its own."""
    return inside(path).parts[0]


def inside(path: Path) -> Path:
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else TOOLS)


def at(path: Path, node: ast.stmt | ast.expr, text: str) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}: {text}"


def listed(lines: list[str]) -> str:
    return "\n".join(sorted(set(lines)))


def torch_names(tree: ast.Module) -> dict[str, str]:
    """Return what each name that a file imports from torch stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                full = alias.name if alias.asname else alias.name.split(".")[0]
                names[alias.asname or full] = full
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: full for name, full in names.items() if full.split(".")[0] == "torch"}


def dotted(node: ast.expr) -> str | None:
    """Return `a.b.c` for such a chain, and None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return None


def used_of_torch(path: Path) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yield every name of torch that a file imports or uses, in full."""
    names = torch_names(sources()[path])
    for node in ast.walk(sources()[path]):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names if alias.name[:5] == "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Name | ast.Attribute) and (text := dotted(node)):
            first, _, rest = text.partition(".")
            if first in names:
                yield node, f"{names[first]}.{rest}" if rest else names[first]


def test_torch_s_engine_is_called_in_one_room(device: torch.device) -> None:
    broken = []
    for path, tree in sources().items():
        if room(path) in {"_autograd", "doctor"}:  # the second are programs of users
            continue
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        used = {id(node): name for node, name in used_of_torch(path)}
        broken += [at(path, node, used[id(node)]) for node in calls if used.get(id(node)) in ENGINE]
        for called in calls:
            last = getattr(called, "id", getattr(called, "attr", ""))
            if last in ENGINE_PRIVATE and room(path) != "_compat":
                broken.append(at(path, called, last))
            if isinstance(called, ast.Attribute) and last == "backward" and not is_ours(called):
                broken.append(at(path, called, ".backward("))
    assert not broken, listed(broken)


def is_ours(called: ast.Attribute) -> bool:
    """Return whether `.backward` is a method of gradkit's own: of a runner, say."""
    owner: ast.expr = called.value
    while isinstance(owner, ast.Attribute | ast.Call):
        owner = owner.value if isinstance(owner, ast.Attribute) else owner.func
    return isinstance(owner, ast.Name) and owner.id in {"self", "ctx", "reference", "PassRunner"}


def assigned(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    return node.targets if isinstance(node, ast.Delete) else []


def test_dot_grad_is_written_in_one_room(device: torch.device) -> None:
    broken = [
        at(path, part, ".grad =")
        for path, tree in sources().items()
        if room(path) not in {"_state", "doctor"}
        for node in ast.walk(tree)
        for target in assigned(node)
        for part in ast.walk(target)
        if isinstance(part, ast.Attribute) and part.attr == "grad" and not is_read(part)
    ]
    assert not broken, listed(broken)


def is_read(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Load)


def test_optree_is_imported_in_one_file(device: torch.device) -> None:
    broken = []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            if any(module.split(".")[0] == "optree" for module in modules):
                broken.append(inside(path).as_posix())
    assert set(broken) == {"_core/pytree.py"}


def is_private(component: str) -> bool:
    public = component.startswith(("__", "_foreach_"))
    return component.startswith("_") and not public


def test_what_modes_run_is_left_uncompiled(device: torch.device) -> None:
    """tests/func/test_compile.py has what torch.compile would make of it."""
    broken = [
        at(path, node, node.name)
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name in {"__torch_function__", "__torch_dispatch__"}
        and "leave_uncompiled" not in map(ast.unparse, node.decorator_list)
    ]
    assert not broken, listed(broken)


def test_private_names_of_torch_are_used_in_one_room(device: torch.device) -> None:
    broken = [
        at(path, node, name)
        for path in sources()
        if room(path) != "_compat"
        for node, name in used_of_torch(path)
        if any(map(is_private, name.split(".")))
    ]
    assert not broken, listed(broken)


def test_private_attributes_of_nodes_are_read_in_one_file(device: torch.device) -> None:
    private = ("_saved_", "_raw_saved_", "_input_metadata")
    broken = []
    for path, tree in sources().items():
        if inside(path).as_posix() == "_compat/nodes.py":
            continue
        for node in ast.walk(tree):
            name = node.value if isinstance(node, ast.Constant) else getattr(node, "attr", None)
            is_private_one = str(name).startswith(private) and "_tensors_hooks" not in str(name)
            if isinstance(node, ast.expr) and is_private_one:
                broken.append(at(path, node, str(name)))
    assert not broken, listed(broken)


def test_private_attributes_of_tensors_are_read_in_one_room(device: torch.device) -> None:
    """But those of views and versions, which torch's documents name."""
    private = {
        "_backward_hooks", "_post_accumulate_grad_hooks", "_cdata", "_forward_cls", "_backward_cls",
        "_schema", "_is_zerotensor", "_use_count", "_will_engine_execute_node",
    }  # fmt: skip
    broken = [
        at(path, node, node.attr)
        for path, tree in sources().items()
        if room(path) != "_compat"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in private
    ]
    assert not broken, listed(broken)


def test_the_package_is_within_its_budget(device: torch.device) -> None:
    """`python -m tests.house` prints the table."""
    total = house.total()
    assert total["files"] <= house.FILES
    assert total["lines"] <= house.LINES


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="counted on torch 2.13")
def test_a_call_opens_few_functions(device: torch.device) -> None:
    """`python -m tests.house` prints this table, too."""
    most = {name: [functions, files] for name, (_, functions, files) in house.CALLS.items()}
    counts = house.run_alone()
    more = {name: n for name, n in counts.items() if n[0] > most[name][0] or n[1] > most[name][1]}
    assert not more, f"{more}, at most {most}"


def test_a_file_is_neither_long_nor_short_without_a_reason(device: torch.device) -> None:
    files = [*PACKAGE.rglob("*.py"), *TOOLS.glob("*/gradkit_*/**/*.py")]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    long = {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > house.LONGEST}
    assert long == {}
    short = [p for p, n in lengths.items() if n < house.SHORT and not p.name.startswith("__")]
    # A reason takes a sentence after the line that says what the file is.
    unreasoned = [str(p.relative_to(ROOT)) for p in short if "\n\n" not in docstring_of(p)]
    assert unreasoned == []


def docstring_of(path: Path) -> str:
    return ast.get_docstring(parsed(path)) or ""


def public_objects() -> set[tuple[str, str]]:
    """Return the module and the name of every function and class that users import."""
    modules = [gradkit, *(getattr(gradkit, name) for name in gradkit.__all__)]
    objects = [
        getattr(module, name)
        for module in modules
        if inspect.ismodule(module)
        for name in module.__all__
    ]
    return {
        (value.__module__, value.__qualname__)
        for value in objects
        if inspect.isfunction(value) or inspect.isclass(value)
    }


def functions(body: list[ast.stmt], inside: tuple[str, ...] = ()) -> Iterator[tuple[str, Function]]:
    """Yield every function, and its name with that of the class or function around it."""
    for node in body:
        if isinstance(node, ast.ClassDef | Function):
            name = (*inside, node.name)
            if isinstance(node, Function):
                yield ".".join(name), node
            yield from functions(node.body, name)


def is_public(path: Path, name: str, public: set[tuple[str, str]]) -> bool:
    parts = path.with_suffix("").relative_to(ROOT).parts
    module = ".".join(parts[2:] if path.is_relative_to(TOOLS) else parts).removesuffix(".__init__")
    owner, _, last = name.rpartition(".")
    if last.startswith("_") and not last.startswith("__"):
        return False
    hidden = any(part.startswith("_") and part != "__main__" for part in module.split("."))
    hidden |= path.is_relative_to(TOOLS)
    return not hidden or (module, name) in public or (module, owner) in public


def test_private_functions_are_documented_in_a_line(device: torch.device) -> None:
    public = public_objects()
    broken = [
        at(path, node, name)
        for path, tree in sources().items()
        for name, node in functions(tree.body)
        if not is_public(path, name, public) and "\nArgs:\n" in (ast.get_docstring(node) or "")
    ]
    assert not broken, listed(broken)


def test_a_comment_has_a_subject(device: torch.device) -> None:
    """A pronoun stands for something else: the first word of a block says what it is about."""
    bare = re.compile(
        r"(It|They|Its|Their|(This|That|These|Those|What) (is|are|was|were|has|have|may|does|do)) "
    )
    broken = []
    for path in sources():
        lines = ["", *path.read_text(encoding="utf-8").splitlines()]
        for before, line in pairwise(map(str.lstrip, lines)):
            text = line.removeprefix("# ")
            if text != line and not before.startswith("#") and bare.match(text):
                broken.append(f"{path.relative_to(ROOT)}: {text}")
    assert not broken, listed(broken)


def members() -> set[str]:
    """Return `A.b` for all that the classes of the package define or assign."""
    classes = (n for tree in sources().values() for n in ast.walk(tree))
    found = set()
    for one in (n for n in classes if isinstance(n, ast.ClassDef)):
        for node in ast.walk(one):
            name = getattr(node, "name", getattr(node, "attr", getattr(node, "id", None)))
            found.add(f"{one.name}.{name}")
    return found


def test_contributing_names_what_is_there(device: torch.device) -> None:
    prose = re.sub(
        r"```.*?```", "", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.S
    )
    folders = "benchmarks", "examples", "gpu", "release", "tests", "tools"
    every = (path for name in folders for path in (ROOT / name).rglob("*"))
    others = [*ROOT.glob("*"), *every, *sources()]
    read = [x for x in others if x.suffix in {".py", ".md", ".toml"} or x.name == "Makefile"]
    text = "\n".join(x.read_text(encoding="utf-8") for x in read if x.name != "CONTRIBUTING.md")
    words, classes = set(re.findall(r"\w+", text)), {name.partition(".")[0] for name in members()}
    broken = []
    for name in dict.fromkeys(re.findall(r"`([\w./*-]+)`", prose)):
        if name.partition(".")[0] in classes and "." in name:
            is_there = name in members()
        elif "/" in name or name.endswith((".py", ".md")):
            roots = ROOT, PACKAGE, TOOLS
            is_there = any(any(x.glob(name.rstrip("/"))) for x in roots) or name in text
        else:
            is_there = words.issuperset(re.findall(r"\w+", name))
        if not is_there and name not in {"COMMIT", "v1.2.3"}:  # which stand for others
            broken.append(name)
    assert not broken, listed(broken)


def test_facts_of_torch_are_in_the_table(device: torch.device) -> None:
    table = (ROOT / "tests/torch_facts.md").read_text(encoding="utf-8")
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources())
    cited = {
        fact
        for every in re.findall(r"\[([A-Z]\d+(?:, [A-Z]\d+)*)\]", code)
        for fact in every.split(", ")
    }
    assert cited
    assert cited <= set(re.findall(r"\b[A-Z]\d+\b", table))


def test_names_are_the_field_s(device: torch.device) -> None:
    broken = []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "name", None)))
            if isinstance(node, ast.arg):
                name = node.arg
            if name == "target" and (room(path) == "doctor" or path.name == "dynamo.py"):
                continue  # of a statement, and of a node of torch.fx
            if (path.stem, name) in NAMES_OF_TORCH:
                continue
            if name in FORBIDDEN and isinstance(node, ast.stmt | ast.expr | ast.arg):
                broken.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not broken, listed(broken)


def test_tests_stand_in_the_rooms_that_they_try(device: torch.device) -> None:
    rooms = {path.stem.strip("_") for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in TESTS}
    beside = {
        "docs",
        "benchmarks",
        "silently_wrong",
        "gpu",
        "cuda",
        "accelerator",
        "sweep",
        "fuzz",
        "transformers",
    }
    beside |= {"doctor", "test_public.py", "test_house.py", "test_release.py"}
    assert folders - rooms - beside == set()


def takes_device(tree: ast.Module, node: Function) -> bool:
    named = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    marks = [part for part in tree.body if isinstance(part, ast.Assign)]
    of_module = "usefixtures('device')" in " ".join(map(ast.unparse, marks))
    return of_module or bool(named & fixtures_with_device(tree))


def fixtures_with_device(tree: ast.Module) -> set[str]:
    """Return the arguments that bring a device: itself, and the fixtures of a file that take it."""
    names = {"device"}
    for node in tree.body:
        if isinstance(node, Function) and {a.arg for a in node.args.args} & names:
            names.add(node.name)
    return names


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_every_test_takes_the_device(device: torch.device, path: Path) -> None:
    tree = parsed(path)
    without = [
        node.name
        for node in tree.body
        if isinstance(node, Function) and not takes_device(tree, node)
        if node.name.startswith("test_")
    ]
    assert without == []
