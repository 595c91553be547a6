"""Loops that are left: what the program is, and what is said of it."""

from __future__ import annotations

SETUP = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
CLIP = "clip_grad_norm_(model.parameters(), 1.0)"
LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""


def between(line: str) -> str:
    """Return the loop with a line between backward and step."""
    return LOOP.replace("backward()\n", f"backward()\n    {line}\n")


def instead_of(line: str, other: str) -> str:
    assert line in LOOP
    return LOOP.replace(line, other)


# By name: what follows the setup, and what the reason says.
LEFT = {
    "accumulation under a condition": (
        """
for i, (x, y) in enumerate(loader):
    loss = cross_entropy(model(x), y) / 4
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        r"step\(\) and backward\(\) are in different blocks",
    ),
    "accumulation in an inner loop": (
        """
for x, y in loader:
    optimizer.zero_grad()
    for a, b in zip(x.chunk(4), y.chunk(4)):
        loss = cross_entropy(model(a), b) / 4
        loss.backward()
    optimizer.step()
""",
        r"in a loop that step\(\) is outside of: gradients may accumulate",
    ),
    "cleared once": (
        """
optimizer.zero_grad()
for x, y in loader:
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
""",
        r"no zero_grad\(\) that surely runs before",
    ),
    "cleared under a condition": (
        instead_of("optimizer.zero_grad()", "if y.sum() > 2: optimizer.zero_grad()"),
        r"no zero_grad\(\) that surely runs before",
    ),
    "cleared to zeros": (
        instead_of("zero_grad()", "zero_grad(set_to_none=False)"),
        r"a zero is not None",
    ),
    "cleared between": (between("optimizer.zero_grad()"), r"optimizer\.zero_grad\(\).*between"),
    "cleared after, perhaps": (
        """
for x, y in loader:
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if loss.item() < 1:
        continue
    optimizer.zero_grad()
""",
        r"may skip zero_grad",
    ),
    "cleared after, exceptions": (
        """
for x, y in loader:
    try:
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    except RuntimeError:
        pass
""",
        r"an exception may skip zero_grad",
    ),
    "cleared after, another before": (
        LOOP
        + """
for x, y in loader:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        r"several backward calls",
    ),
    "cleared after, another function's": (
        """
def pretrain():
    for x, y in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def train():
    for x, y in loader:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        r"a loop here does not begin with zero_grad\(\)",
    ),
    "another model is cleared": (
        instead_of("optimizer.zero_grad", "nn.Linear(1, 1).zero_grad"),
        r"no zero_grad",
    ),
    "several backward calls, a label written between": (
        """
label = torch.ones(4)
for x, y in loader:
    model.zero_grad()
    err_real = nn.functional.mse_loss(model(x), label)
    err_real.backward()
    label.fill_(0)
    err_fake = nn.functional.mse_loss(model(y), label)
    err_fake.backward()
    optimizer.step()
""",
        r"several backward calls before one step\(\) \(lines 14, 17\)",
    ),
    "a list of losses": (
        instead_of("loss.backward()", "[part.backward() for part in [loss]]"),
        r"part\.backward",
    ),
    "a helper runs backward, too": (
        "def penalty():\n    model.weight.norm().backward()\n\n"
        + instead_of("loss =", "penalty()\n    loss ="),
        r"penalty\(\) runs backward\(\) or step\(\) itself",
    ),
    "two optimizers, one backward": (
        "other = torch.optim.Adam(model.parameters())\n" + between("other.step()"),
        r"several steps with the gradients of one backward call \(lines 15, 16\)",
    ),
    "a second step after": (
        "other = torch.optim.Adam(model.parameters())\n" + LOOP + "    other.step()\n",
        r"several steps with the gradients of one backward call",
    ),
    "backward in a method": (
        """
class Pix:
    def backward_d(self):
        self.loss_d = self.net_d(self.fake).mean()
        self.loss_d.backward()

    def optimize_parameters(self):
        self.optimizer_d.zero_grad()
        self.backward_d()
        self.optimizer_d.step()
        self.optimizer_g.zero_grad()
        self.net_g(self.real).mean().backward()
        self.optimizer_g.step()
""",
        r"self\.optimizer_d\.step\(\) has no backward\(\) of its own here",
    ),
    "two players, one graph": (
        """
critic = nn.Linear(2, 1)
optimizer_d = torch.optim.Adam(critic.parameters())
for x, y in loader:
    optimizer.zero_grad()
    optimizer_d.zero_grad()
    loss = critic(model(x)).mean()
    loss.backward(retain_graph=True)
    (-loss).backward()
    optimizer.step()
    optimizer_d.step()
""",
        r"several backward calls",
    ),
    "create_graph": (instead_of("backward()", "backward(create_graph=True)"), r"has options"),
    "a cotangent": (instead_of("backward()", "backward(torch.ones(()))"), r"cotangent"),
    "a cotangent by name": (instead_of("backward()", "backward(gradient=None)"), r"has options"),
    "inputs": (instead_of("backward()", "backward(inputs=[model.weight])"), r"has options"),
    "torch.autograd.backward": (
        instead_of("loss.backward()", "torch.autograd.backward(loss)"),
        r"torch\.autograd\.backward",
    ),
    "accelerate": (
        instead_of("loss.backward()", "accelerator.backward(loss)"),
        r"another library's",
    ),
    "lightning": (
        """
class Module(nn.Module):
    def training_step(self, batch):
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(self(batch))
        opt.step()
""",
        r"another library's",
    ),
    "no backward here": (
        instead_of("loss.backward()", "run_backward(loss)"),
        r"without \.backward\(\) in this function",
    ),
    "prepared": (
        "model, optimizer = accelerator.prepare(model, optimizer)\n" + LOOP,
        r"optimizer is unpacked or changed.*may not be",
    ),
    "a closure": (
        """
lbfgs = torch.optim.LBFGS(model.parameters())
for x, y in loader:
    def closure():
        lbfgs.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss
    lbfgs.step(closure)
""",
        r"in a closure",
    ),
    "a closure from elsewhere": (
        "from theirs import evaluate\noptimizer.zero_grad()\noptimizer.step(evaluate)\n",
        r"takes a closure",
    ),
    "a closure as well": (LOOP + "optimizer.step(lambda: 1.0)\n", r"takes a closure"),
    "LBFGS": ("optimizer = torch.optim.LBFGS(model.parameters())\n" + LOOP, r"LBFGS.*may not be"),
    "a wrapper": (
        """
class NoamOpt:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


def train(model, model_opt):
    for x, y in loader:
        model_opt.zero_grad()
        cross_entropy(model(x), y).backward()
        model_opt.step()


model_opt = NoamOpt(optimizer)
""",
        r"model_opt is NoamOpt\(optimizer\)",
    ),
    "another library's optimizer": (
        "from lion import Lion\noptimizer = Lion(model.parameters())\n" + LOOP,
        r"optimizer is Lion",
    ),
    "annotated": (
        """
def train(optimizer: "Engine"):
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
""",
        r'annotated "Engine"',
    ),
    "unknown call between": (between("callbacks.after_backward()"), r"after_backward\(\).*between"),
    "the model is passed on between": (between("print(model)"), r"print\(model\).*between"),
    "the optimizer is passed on between": (between("print(optimizer)"), r"print\(optimizer\)"),
    "an early end between": (between("if loss.item() > 9: continue"), r"continue|if loss"),
    "a condition between": (
        between("if max_norm: clip_grad_norm_(model.parameters(), max_norm)"),
        r"if max_norm.*between",
    ),
    "yield between": (
        "def train():\n" + between("yield loss").replace("\n", "\n    "),
        r"yield loss.*between",
    ),
    "step under a condition": (
        instead_of("optimizer.step()", "if torch.isfinite(loss): optimizer.step()"),
        r"different blocks, and one may run without the other",
    ),
    "in a with": (
        instead_of("loss.backward()", "with record_function('b'): loss.backward()"),
        r"different blocks, and one may run without the other",
    ),
    "clipped by value": (
        between("nn.utils.clip_grad_value_(model.parameters(), 1.0)"),
        r"clip_grad_value_.*between",
    ),
    "clipped in another norm": (
        between("clip_grad_norm_(model.parameters(), 1.0, norm_type=1)"),
        r"has options",
    ),
    "clipped strictly": (
        between("clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)"),
        r"has options",
    ),
    "clipped by another library": (
        between("fabric.clip_grad_norm_(model.parameters(), 1.0)"),
        r"is not torch's",
    ),
    "more is clipped than stepped": (
        "optimizer = torch.optim.SGD(model.weight, lr=0.1)\n" + between(CLIP),
        r"may not be exactly what optimizer has",
    ),
    "less is clipped than stepped": (
        between("clip_grad_norm_(model.weight, 1.0)"),
        r"may not be exactly what optimizer has",
    ),
    "clipped, and nobody knows what is stepped": (
        """
def train(model, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
""",
        r"may not be exactly what optimizer has",
    ),
    "clipped, and made by another function": (
        """
class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(self):
        for x, y in loader:
            self.optimizer.zero_grad()
            cross_entropy(self.model(x), y).backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
""",
        r"may not be exactly what self\.optimizer has, because of line 13: `self\.optimizer = ",
    ),
    "a group is added": (
        "optimizer.add_param_group({'params': [torch.ones(2)]})\n" + between(CLIP),
        r"may not be exactly what optimizer has",
    ),
    "the model is another one by then": (
        "model = nn.Linear(3, 2)\n" + between(CLIP),
        r"may not be exactly what optimizer has",
    ),
    "a part of the model is another one by then": (
        "model.head = nn.Linear(3, 2)\n" + between(CLIP),
        r"may not be exactly what optimizer has",
    ),
    "the norm is used before the step": (
        between("norm = clip_grad_norm_(model.parameters(), 1.0)\n    print(norm)"),
        r"the norm.*is used before step",
    ),
    "the norm is part of an expression": (
        between("norms = [clip_grad_norm_(model.parameters(), 1.0)]"),
        r"the norm is used in",
    ),
    "the limit is a call": (
        between("clip_grad_norm_(model.parameters(), limit_of(model))"),
        r"max_norm is limit_of",
    ),
    "the limit changes": (
        between("clip_grad_norm_(model.parameters(), limit)\n    limit = 2.0"),
        r"what max_norm is computed from",
    ),
    "clipped twice": (
        between(
            "clip_grad_norm_(model.parameters(), 2)\n    clip_grad_norm_(model.parameters(), 1)"
        ),
        r"clip_grad_norm_\(model.parameters\(\), 1\).*between",
    ),
    "clipped after the step": (
        LOOP + "    clip_grad_norm_(model.parameters(), 1.0)\n",
        r"has no backward\(\) of its own here",
    ),
    "scaled gradients are clipped": (
        """
scaler = torch.amp.GradScaler("cpu")
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(model(x).sum()).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        r"scaled gradients are clipped",
    ),
    "unscaled after clipping": (
        """
scaler = torch.amp.GradScaler("cpu")
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(model(x).sum()).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
""",
        r"a scaler .*not used as usual",
    ),
    "scaled, and stepped without": (
        "scaler = torch.amp.GradScaler()\n"
        + instead_of("loss.backward", "scaler.scale(loss).backward"),
        r"a scaler .*not used as usual",
    ),
    "another scaler": (
        """
scaler = NativeScaler()
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
""",
        r"a scaler that is not torch's",
    ),
    ".grad is read": (LOOP + "    print(model.weight.grad)\n", r"model\.weight\.grad is used"),
    ".grad is read by name": (LOOP + "getattr(model.weight, 'grad')\n", r"'grad' is a string"),
    "another file reads gradients": (LOOP + "    log_gradients(model)\n", r"may read or write"),
    "watched": (
        "import wandb\nwandb.watch(model)\n" + LOOP,
        r"hooks run in the backward pass \(watch\)",
    ),
    "tensor hooks": ("model.weight.register_hook(print)\n" + LOOP, r"hooks.*register_hook"),
    "module hooks": ("model.register_full_backward_hook(print)\n" + LOOP, r"hooks"),
    "optimizer in backward": (
        "model.weight.register_post_accumulate_grad_hook(print)\n" + LOOP,
        r"register_post_accumulate_grad_hook",
    ),
    "DDP": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(model)\n" + LOOP,
        r"several processes",
    ),
    "FSDP": ("from torch.distributed.fsdp import fully_shard\n" + LOOP, r"several processes"),
    "distributed, wrapped elsewhere": (
        "def main(local_rank):\n    pass\n" + LOOP,
        r"several processes \(local_rank\)",
    ),
    "an Accelerator": (
        "from accelerate import Accelerator\naccelerator = Accelerator()\n" + LOOP,
        r"Accelerator may wrap the model and the optimizer \(line 10\)",
    ),
    "an Accelerator by another name": (
        "import accelerate\nfrom accelerate import Accelerator as Acc\nacc = Acc()\n" + LOOP,
        r"Acc may wrap the model and the optimizer \(line 11\)",
    ),
    "an Accelerator that comes from elsewhere": (
        "from accelerate import Accelerator\nmodel = theirs.prepare(model)\n" + LOOP,
        r"Accelerator may wrap the model and the optimizer \(line 9\)",
    ),
    "suppressed exceptions": (
        """
for x, y in loader:
    with contextlib.suppress(RuntimeError):
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        r"an exception may skip zero_grad",
    ),
    "reentrant checkpoint": (
        "from torch.utils.checkpoint import checkpoint\nh = checkpoint(model, 1)\n" + LOOP,
        r"checkpoint without use_reentrant=False",
    ),
    "a compiled step": (
        "@torch.compile\ndef step(x, y):" + "\n    ".join(LOOP.splitlines()),
        r"step is compiled",
    ),
    "a compiled step, later": (
        "def train():" + "\n    ".join(LOOP.splitlines()) + "\ntrain = torch.compile(train)\n",
        r"train is compiled",
    ),
    "the name is taken": (LOOP + "gradkit = None\n", r"name gradkit is used"),
    "the optimizer changes within": (
        instead_of("loss =", "optimizer = torch.optim.SGD(model.parameters(), lr=1)\n    loss ="),
        r"optimizer is assigned between",
    ),
    "leftover gradients": (
        LOOP + "def warm_up(loss):\n    loss.backward()\n",
        r"a loop here does not begin with zero_grad\(\)",
    ),
    "what another function accumulates": (
        """
def fit(model, batches):
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def accumulate(model, batches):
    for i, (x, y) in enumerate(batches):
        cross_entropy(model(x), y).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
""",
        r"a loop here does not begin with zero_grad\(\), and may add",
    ),
    "another loop of the function": (
        LOOP + "for x, y in loader:\n    model(x).sum().backward()\n",
        r"this function has more that is left \(line 16\)",
    ),
    "a list of parameters that grows after the optimizer was made": (
        """
params = [model.weight]
by_list = torch.optim.SGD(params, lr=0.1)
params.extend([model.bias])
for x, y in loader:
    by_list.zero_grad()
    cross_entropy(model(x), y).backward()
    clip_grad_norm_(params, 1.0)
    by_list.step()
""",
        r"may not be exactly what by_list has, because of line 12: `params\.extend",
    ),
    "two optimizers that are cleared after their steps": (
        """
head = nn.Linear(2, 2)
head_optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
def train(x, y):
    cross_entropy(head(model(x)), y).backward()
    optimizer.step()
    optimizer.zero_grad()
def train_head(x, y):
    cross_entropy(head(model(x).detach()), y).backward()
    head_optimizer.step()
    head_optimizer.zero_grad()
""",
        r"the backward\(\) for one may add to gradients of another",
    ),
    "a step of a function with the gradients of another": (
        """
head = nn.Linear(2, 2)
head_optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
def train(x, y):
    optimizer.zero_grad()
    cross_entropy(head(model(x)), y).backward()
    optimizer.step()
def train_both(x, y):
    train(x, y)
    head_optimizer.step()
""",
        r"head_optimizer\.step\(\) without \.backward\(\) in its function",
    ),
    **{
        f"another step, {name}": (
            "head = nn.Linear(2, 2)\n"
            "second = {'head': torch.optim.SGD(head.parameters(), lr=0.1)}\n"
            f"{before}\n" + LOOP.replace("model(x)", "head(model(x))") + f"    {line}\n",
            reason,
        )
        for name, before, line, reason in (
            ("in a dict", "", "second['head'].step()", "several steps"),
            ("in a loop", "", "for o in second.values(): o.step()", "several steps"),
            ("by another name", "o = second['head']", "o.step()", "several steps"),
            ("of an alias", "alias = optimizer", "alias.step()", "several steps"),
            ("bound", "go = optimizer.step", "go()", r"optimizer\.step is used without being"),
        )
    },
}
