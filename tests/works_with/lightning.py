"""A LightningModule with manual optimization: `minimize_` in its training step."""

import lightning
import torch
from torch import nn

import gradkit
from tests.works_with._oracles import tried

PIP = "lightning"


class Module(lightning.LightningModule):
    def __init__(self, ours):
        super().__init__()
        self.net, self.ours, self.automatic_optimization = nn.Linear(3, 1), ours, False

    def training_step(self, batch, index):
        loss, optimizer = (self.net(batch[0]) - batch[1]).square().mean(), self.optimizers()
        if self.ours:
            gradkit.minimize_(optimizer, loss)
        else:
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def tries():
    data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randn(12, 1))

    def fitted(ours):
        torch.manual_seed(0)
        module = Module(ours)
        options = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        lightning.Trainer(max_epochs=2, accelerator="cpu", **options).fit(
            module, torch.utils.data.DataLoader(data, batch_size=4)
        )
        return [p.detach() for p in module.parameters()]

    right = fitted(False)
    yield tried(
        "`minimize_` in training_step", right, lambda: fitted(False), lambda: fitted(True), 0.0
    )
