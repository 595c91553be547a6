"""What a step frees, the next one takes: no page of it is faulted in again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

# Of each step, by number: the page faults that it took.
STEPS = """
import resource
import torch
import gradkit

torch.set_num_threads(1)
width = 512
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers).to("{device}")
params, x = list(model.parameters()), torch.randn(64, width, device="{device}")
optimizer = torch.optim.SGD(params, lr=1e-3)


def steps():
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        _, grads = gradkit.value_and_grads(model(x).square().mean(), params)
        gradkit.step_(optimizer, params, grads)
        del grads
        yield resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


print(*steps())
"""


@pytest.mark.processes
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is not that of glibc")
def test_steps_fault_nothing_in(device: torch.device) -> None:
    # The memory of the first steps is new; a process beside this one may take pages of a later one.
    code = STEPS.format(device=device)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    later = sorted(map(int, done.stdout.split()[5:]))
    assert later[len(later) // 2] < 50
