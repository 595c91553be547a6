"""Programs of two processes, which end with an entry of errors_processes.md that has no block."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

_PREFACE = """
import datetime, os, sys, torch, gradkit
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
rank = int(os.environ["RANK"])
minute = datetime.timedelta(minutes=1)
file = "file://" + sys.argv[1]
dist.init_process_group("gloo", file, minute, rank=rank, world_size=2)
w, b = torch.ones(2), torch.ones(1)
"""

ENDING: dict[str, str] = {
    "`Connection closed by peer` or `Connection reset by peer`": """
        if rank == 1:
            os._exit(1)
        gradkit.distributed.all_reduce(w)
    """,
    "`Timed out waiting`": """
        hasty = dist.new_group(timeout=datetime.timedelta(seconds=1))
        if rank == 0:
            gradkit.distributed.all_reduce(w, group=hasty)
        dist.barrier()
    """,
    "`every rank of the group to take part`": """
        gradkit.distributed.all_reduce(w if rank == 0 else "no tensor")
    """,
    "`expected a leaf, which rank 0 has`": """
        gradkit.distributed.all_reduce({"w": w, "b": b if rank == 0 else None})  # as the page says
        gradkit.distributed.all_reduce({"w": w, "b": b} if rank == 0 else {"w": w})
    """,
    "`the passes since the last call on rank 1`": """
        mesh, x = init_device_mesh("cpu", (2,)), torch.ones(3, 2)
        call, params, buffers = gradkit.distributed.make_functional(torch.nn.LayerNorm(2), mesh)
        out, _ = call(params, buffers, x)
        for name in ("weight", "bias") if rank == 0 else ("bias", "weight"):
            gradkit.value_and_grads(out.sum(), params[name], retain_graph=True)
        call(params, buffers, x)
    """,
    "`in the call of gradkit.distributed.make_functional`": """
        class FailsOnOneRank(torch.nn.Linear):
            def forward(self, x):
                if rank == 1:
                    raise ValueError("no such sample")
                return super().forward(x)

        mesh = init_device_mesh("cpu", (2,))
        model = torch.nn.Sequential(FailsOnOneRank(2, 2), torch.nn.Linear(2, 2))
        call, params, buffers = gradkit.distributed.make_functional(model, mesh)
        call(params, buffers, torch.ones(3, 2))
    """,
}


def last_words(script: str, folder: Path) -> str:
    """Return what the first of two ranks writes that run a script and fail."""
    lines = _PREFACE + dedent(script) + "\ndist.destroy_process_group()"
    command = [sys.executable, "-c", lines, str(folder / "rendezvous")]
    ranks = [
        subprocess.Popen(
            command, env=os.environ | {"RANK": rank}, stderr=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    first, _ = [rank.communicate()[1] for rank in ranks]
    assert ranks[0].returncode
    return first
