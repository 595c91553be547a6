"""Training loops in the styles of tutorials and repositories, as programs that can be run.

Each defines `run()`, which returns the trained modules and what was logged. `device`, `batches` and
`new_model` are given (see `execute`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SIZE = 6


def execute(source: str | bytes, device: torch.device) -> tuple[list[Tensor], list[Any]]:
    """Run a program from a fixed seed; return all weights and buffers, and what was logged."""

    def new_model() -> nn.Module:
        layers = [nn.Linear(4, SIZE), nn.BatchNorm1d(SIZE), nn.Tanh(), nn.Dropout(0.2)]
        return nn.Sequential(*layers, nn.Linear(SIZE, 3)).to(device)

    torch.manual_seed(0)
    batches = [
        (torch.randn(5, 4, device=device), torch.randint(3, (5,), device=device)) for _ in range(4)
    ]
    namespace: dict[str, Any] = {
        "device": device,
        "batches": batches,
        "new_model": new_model,
        "__name__": "loop",
    }
    exec(compile(source, "loop.py", "exec"), namespace)
    modules, log = namespace["run"]()
    state = [value for module in modules for value in module.state_dict().values()]
    return state, [entry.item() if isinstance(entry, Tensor) else entry for entry in log]


# What is moved: by name, the program and some of the code that it becomes.
MOVED = {
    "arguments": (
        """
import argparse
import torch
import torch.nn.functional as F
import torch.optim as optim


def train(args, model, device, train_loader, optimizer, epoch, log):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.cross_entropy(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            log.append(loss.item())
            if args.dry_run:
                break


def run():
    args = argparse.Namespace(log_interval=2, dry_run=False)
    model, log = new_model(), []
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 3):
        train(args, model, device, batches, optimizer, epoch, log)
        scheduler.step()
    return [model], log
""",
        "gradkit.minimize_(optimizer, loss)",
    ),
    "zero_grad after step": (
        '''
"""A quick start."""
import torch
from torch import nn

def train(dataloader, model, loss_fn, optimizer, log):
    size = len(dataloader)
    model.train()
    for batch, (X, y) in enumerate(dataloader):
        X, y = X.to(device), y.to(device)

        # Compute prediction error
        pred = model(X)
        loss = loss_fn(pred, y)

        # Backpropagation
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        if batch % 2 == 0:
            loss, current = loss.item(), (batch + 1) * len(X)
            log.append((loss, current / size))

def run():
    model, log = new_model(), []
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9, weight_decay=0.1)
    for t in range(3):
        train(batches, model, loss_fn, optimizer, log)
    return [model], log
''',
        "# Backpropagation\n        gradkit.minimize_(optimizer, loss)",
    ),
    "phases": (
        """
import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim import lr_scheduler

def train_model(model, criterion, optimizer, scheduler, num_epochs=3):
    history = []
    for epoch in range(num_epochs):
        for phase in ['train', 'val']:
            if phase == 'train':
                model.train()
            else:
                model.eval()
            running_loss = 0.0
            running_corrects = 0
            for inputs, labels in batches:
                inputs = inputs.to(device)
                # zero the parameter gradients
                optimizer.zero_grad()

                # forward
                # track history if only in train
                with torch.set_grad_enabled(phase == 'train'):
                    outputs = model(inputs)
                    _, preds = torch.max(outputs, 1)
                    loss = criterion(outputs, labels)

                    # backward + optimize only if in training phase
                    if phase == 'train':
                        loss.backward()
                        optimizer.step()

                running_loss += loss.item() * inputs.size(0)
                running_corrects += torch.sum(preds == labels.data)
            if phase == 'train':
                scheduler.step()
            history.append(running_loss)
            history.append(running_corrects.double())
    return model, history

def run():
    model = new_model()
    for param in model[0].parameters():
        param.requires_grad = False
    optimizer_ft = optim.SGD(model[4].parameters(), lr=0.1, momentum=0.9)
    exp_lr_scheduler = lr_scheduler.StepLR(optimizer_ft, step_size=7, gamma=0.1)
    model, history = train_model(model, nn.CrossEntropyLoss(), optimizer_ft, exp_lr_scheduler)
    return [model], history
""",
        "                        gradkit.minimize_(optimizer, loss)",
    ),
    "recurrent, clipped": (
        """
import torch
from torch import nn

CLIP = 0.25

def repackage_hidden(h):
    return tuple(v.detach() for v in h)

def run():
    criterion = nn.CrossEntropyLoss()
    model = nn.LSTM(4, 3).to(device)
    opt = torch.optim.SGD(model.parameters(), lr=5.0)
    hidden, total_loss = None, 0.
    for data, targets in batches:
        model.zero_grad()
        if hidden is not None:
            hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()

        # `clip_grad_norm` helps prevent the exploding gradient problem in RNNs / LSTMs.
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        opt.step()
        total_loss += loss.item()
    return [model], [total_loss]
""",
        "problem in RNNs / LSTMs.\n        gradkit.minimize_(opt, loss, max_norm=CLIP)",
    ),
    "amp": (
        """
import torch
from torch.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_

def run():
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = GradScaler(device.type, init_scale=2.0**40, growth_interval=2)
    scales = []
    for epoch in range(6):
        for x, y in batches:
            optimizer.zero_grad(set_to_none=True)
            with autocast(device.type, dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(x).float(), y)
                loss = loss * 1e30
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # for the clipping
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    return [model], scales
""",
        "gradkit.minimize_(optimizer, loss, scaler=scaler, max_norm=1.0)",
    ),
    "amp or not": (
        """
import torch, contextlib
import torch.nn.functional as F

def train_one_epoch(model, criterion, optimizer, data_loader, scaler=None):
    for i, (image, target) in enumerate(data_loader):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=scaler is not None):
            output = model(image)
            loss = criterion(output.float(), target)

        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()

def run():
    models = []
    for amp in [False, True]:
        model = new_model()
        scaler = torch.amp.GradScaler(device.type) if amp else None
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
        for epoch in range(2):
            train_one_epoch(model, F.cross_entropy, optimizer, batches, scaler)
        models.append(model)
    return models, []
""",
        "gradkit.minimize_(optimizer, loss, scaler=scaler)",
    ),
    "on one line": (
        """import torch; import torch.nn.functional as F
def run():
    net = new_model(); opt = torch.optim.Adam(net.parameters(), 1e-2); log = []
    for x, y in batches: opt.zero_grad(); l = F.cross_entropy(net(x), y); l.backward(); opt.step()
    for x, y in batches:
        opt.zero_grad(); log += [2]
        (F.cross_entropy(net(x), y) + 0.1 * net(x).mean()).backward(); opt.step(); log.append(1)
    return [net], log
""",
        "l = F.cross_entropy(net(x), y); gradkit.minimize_(opt, l)",
    ),
    "two players": (
        """
import torch
from torch import nn, autograd
from torch.optim import Adam

def gradient_penalty(D, real, fake):
    mixed = (real + fake).requires_grad_()
    g, = autograd.grad(D(mixed).sum(), mixed, create_graph=True)
    return ((g.norm(2, dim=1) - 1) ** 2).mean()

def run():
    G = nn.Linear(2, 4).to(device)
    D = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    optG = Adam(G.parameters(), lr=1e-2, betas=(0.5, 0.9))
    optD = Adam(D.parameters(), lr=1e-2, betas=(0.5, 0.9))
    log = []
    for it, (real, _) in enumerate(batches * 2):
        z = torch.randn(5, 2, device=device)
        # train D
        optD.zero_grad()
        fake = G(z).detach()
        lossD = D(fake).mean() - D(real).mean() + 10 * gradient_penalty(D, real, fake)
        lossD.backward()
        optD.step()
        # train G
        if it % 2 == 0:
            optG.zero_grad()
            lossG = -D(G(z)).mean()
            lossG.backward()
            optG.step()
            log += [lossD.item(), lossG.item()]
    return [G, D], log
""",
        "gradkit.minimize_(optG, lossG)",
    ),
    "globals": (
        """
import torch
import torch.nn.functional as F

model = new_model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
eps = 1e-8

def select(x):
    return torch.distributions.Categorical(F.softmax(model(x), -1))

def finish_episode(rewards, log_probs):
    returns = torch.tensor(rewards, device=device)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    policy_loss = [-p * R for p, R in zip(log_probs, returns)]
    optimizer.zero_grad()
    policy_loss = torch.stack(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    return policy_loss.item()

def run():
    log = []
    for x, y in batches:
        dist = select(x)
        actions = dist.sample()
        log.append(finish_episode((actions == y).float().tolist(), list(dist.log_prob(actions))))
    return [model], log
""",
        "gradkit.minimize_(optimizer, policy_loss)",
    ),
    "warm-up and logging between": (
        """
import math
import torch
from torch.nn import functional as F

def get_lr(it):
    return 0.1 * (it + 1) if it < 3 else 0.3 * math.cos(it / 10)

def run():
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.9)
    losses, grads = [], {'used': 'for something else'}
    for it, (x, y) in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        if it % 2 == 0:
            print(f"iter {it}: loss {loss.item():.4f}")
        lr = 0.1 * (it + 1)
        for group in optimizer.param_groups:
            group['lr'] = lr
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), lr)
        optimizer.step()
        losses.append(grad_norm.item())
    return [model], losses + list(grads)
""",
        "grad_norm = gradkit.step_(optimizer, model, step_grads, max_norm=lr)",
    ),
    "lists of parameters": (
        """
import itertools
import torch

enc, dec = torch.nn.Linear(4, 2).to(device), torch.nn.Linear(2, 4).to(device)
params = list(itertools.chain(dec.parameters(), enc.parameters()))
optimizer = torch.optim.Adam(params, lr=0.1)
step = 0
while step < 4:
    x, _ = batches[step]
    loss = (dec(enc(x)) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    torch.nn.utils.clip_grad_norm_(params, 0.1)
    optimizer.step()
    step += 1
del x

def run():
    return [enc, dec], [loss.item()]
""",
        "_, grads = gradkit.value_and_grads(loss, optimizer, retain_graph=True)",
    ),
    "exceptions and skips": (
        """
import os
import torch
try:
    import no_such_package_of_theirs
except ImportError:
    no_such_package_of_theirs = None

os.environ.setdefault("A", "b")
from torch.nn.functional import cross_entropy

def run():
    net, skipped = new_model(), 0
    optimizer = torch.optim.NAdam(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    for i, (x, y) in enumerate(batches * 2):
        optimizer.zero_grad()
        try:
            loss = cross_entropy(net(x), y)
            if i == 3:
                skipped += 1
                continue
            loss.backward()
            optimizer.step()
            scheduler.step()
        except RuntimeError as e:
            if "out of memory" not in str(e):
                raise
    return [net], [skipped]
""",
        "import os\nimport torch\nimport gradkit\n\ntry:",
    ),
    "a factory of optimizers": (
        """
import inspect
import torch
import torch.nn as nn

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.body(x).relu()), y)

    def configure_optimizers(self, lr):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        nodecay = [p for p in self.parameters() if p.dim() < 2]
        groups = [{'params': decay, 'weight_decay': 0.1}, {'params': nodecay, 'weight_decay': 0.0}]
        return torch.optim.AdamW(groups, lr=lr)

def run():
    model = GPT().to(device)
    optimizer = model.configure_optimizers(0.01)
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        # flush the gradients as soon as we can, no need for this memory anymore
        optimizer.zero_grad(set_to_none=True)
    return [model], [loss.item()]
""",
        "gradkit.minimize_(optimizer, loss)\n    return",
    ),
}
