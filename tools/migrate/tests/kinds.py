"""Loops of other kinds: reinforcement learning, diffusion, distillation, forces, sequences.

Each is a program as those of `loops.py`, with some of the code that it becomes.
"""

from __future__ import annotations

# What is moved: by name, the program and some of the code that it becomes.
MOVED_KINDS = {
    "diffusion": (
        """
import torch
import torch.nn.functional as F

def run():
    layers = [torch.nn.Linear(5, 8), torch.nn.SiLU(), torch.nn.Linear(8, 4)]
    net = torch.nn.Sequential(*layers).to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.2, 10, device=device), 0)
    log = []
    for x, _ in batches:
        t = torch.randint(10, (len(x),), device=device)
        noise = torch.randn_like(x)
        keep = alphas[t][:, None]
        noisy = keep.sqrt() * x + (1 - keep).sqrt() * noise
        predicted = net(torch.cat([noisy, t[:, None] / 10], 1))
        loss = F.mse_loss(predicted, noise)
        opt.zero_grad()
        loss.backward()
        opt.step()
        log.append(loss.item())
    return [net], log
""",
        "gradkit.minimize_(opt, loss)",
    ),
    "distillation": (
        """
import torch
import torch.nn.functional as F

def run():
    teacher, student = new_model().eval(), new_model()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches:
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 2.0, dim=1)
        out = student(x)
        kd = F.kl_div(F.log_softmax(out / 2.0, dim=1), soft, reduction="batchmean") * 4.0
        loss = 0.5 * F.cross_entropy(out, y) + 0.5 * kd
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [teacher, student], [loss.item()]
""",
        "gradkit.minimize_(optimizer, loss)",
    ),
    "value learning": (
        """
import copy
import torch

def run():
    q = new_model()
    target = copy.deepcopy(q)
    optimizer = torch.optim.RMSprop(q.parameters(), lr=1e-2)
    for step, (state, action) in enumerate(batches):
        reward, following = state.sum(1), state.roll(1, 0)
        with torch.no_grad():
            wanted = reward + 0.9 * target(following).max(1).values
        value = q(state).gather(1, action[:, None])[:, 0]
        loss = torch.nn.functional.smooth_l1_loss(value, wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        optimizer.step()
        if step % 2 == 0:
            target.load_state_dict(q.state_dict())
    return [q, target], [loss.item()]
""",
        "gradkit.minimize_(optimizer, loss, max_norm=10.0)",
    ),
    "policy with a clipped ratio": (
        """
import torch

def run():
    policy = new_model()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for state, action in batches:
        advantage = state.mean(1)
        with torch.no_grad():
            old = torch.distributions.Categorical(logits=policy(state)).log_prob(action)
        for _ in range(2):
            dist = torch.distributions.Categorical(logits=policy(state))
            ratio = (dist.log_prob(action) - old).exp()
            clipped = ratio.clamp(0.8, 1.2) * advantage
            loss = -torch.min(ratio * advantage, clipped).mean() - 0.01 * dist.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [policy], [loss.item()]
""",
        "gradkit.minimize_(optimizer, loss)",
    ),
    "energies and forces": (
        """
import torch

def run():
    layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
    net = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for x, y in batches:
        positions = x.clone().requires_grad_()
        energy = net(positions)[:, 0]
        forces = -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
        loss = (energy - y).square().mean() + 0.1 * forces.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [net], [loss.item()]
""",
        "gradkit.minimize_(optimizer, loss)",
    ),
    "through time, cut": (
        """
import torch

def run():
    cell, head = torch.nn.GRUCell(4, 6).to(device), torch.nn.Linear(6, 3).to(device)
    model = torch.nn.ModuleList([cell, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torch.zeros(5, 6, device=device)
    for x, y in batches:
        state = state.detach()
        for _ in range(3):
            state = cell(x, state)
        loss = torch.nn.functional.cross_entropy(head(state), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [model], [loss.item()]
""",
        "gradkit.minimize_(optimizer, loss)",
    ),
    "variational": (
        """
import torch

def run():
    encoder = torch.nn.Linear(4, 4).to(device)
    decoder = torch.nn.Linear(2, 4).to(device)
    model = torch.nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    total = 0.0
    for x, _ in batches:
        optimizer.zero_grad()
        mean, log_var = encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum()
        loss = (decoder(z) - x).square().sum() + kl
        loss.backward()
        total += loss.item()
        optimizer.step()
    return [model], [total]
""",
        "gradkit.value_and_grads(loss, optimizer)",
    ),
    "contrastive": (
        """
import torch
import torch.nn.functional as F

def run():
    encoder = new_model()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    for x, _ in batches:
        first, second = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
        a, b = F.normalize(encoder(first), dim=1), F.normalize(encoder(second), dim=1)
        loss = F.cross_entropy(a @ b.T / 0.1, torch.arange(len(x), device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return [encoder], [loss.item(), *scheduler.get_last_lr()]
""",
        "gradkit.minimize_(optimizer, loss)",
    ),
    "a slow copy": (
        """
import copy
import torch

def run():
    online = new_model()
    slow = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-2)
    for x, y in batches:
        with torch.no_grad():
            wanted = slow(x)
        out = online(x)
        loss = (out - wanted).square().mean() + torch.nn.functional.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(slow.parameters(), online.parameters()):
                a.lerp_(b, 0.1)
    return [online, slow], [loss.item()]
""",
        "gradkit.minimize_(optimizer, loss)",
    ),
}
