#!/usr/bin/env bash
# vector-quantize-pytorch 1.32.0 inside the checkpoint of torch 2.13.0: the gradient is that of another codebook.
#
# VectorQuantize in training mode moves its codebook (an exponential moving average) in each forward pass. A
# non-reentrant checkpoint runs the forward pass again during backward(): inputs are assigned to codes that have moved
# since, so that the gradient of the commitment loss does not belong to the loss that was computed, and the codebook
# moves twice a step. Shapes agree, so the checkpoint raises nothing.
#
# Seen (decay=0.5, 8 codes of 4 numbers): equal losses, a gradient of the input that is off by more than a tenth of its
# norm, and another codebook after the step.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 \
	vector-quantize-pytorch==1.32.0 einx==0.4.3 einops==0.8.2
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch.utils.checkpoint import checkpoint
from vector_quantize_pytorch import VectorQuantize


def step(checkpointed):
    torch.manual_seed(0)
    quantizer = VectorQuantize(dim=4, codebook_size=8, decay=0.5)
    x = torch.randn(1, 16, 4, requires_grad=True)

    def run(x):
        out, _, commitment = quantizer(x)
        return out.square().sum() + commitment.sum()

    loss = checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)
    loss.backward()
    return loss.item(), x.grad, quantizer.codebook.clone()


(loss, grad, codes), (again, other, moved) = step(False), step(True)
off = ((other - grad).norm() / grad.norm()).item()
print(f"equal losses {loss == again}, gradient off by {off:.3f} of its norm, equal codebooks {torch.equal(codes, moved)}")
assert loss == again and off > 0.1 and not torch.equal(codes, moved)
PYTHON
