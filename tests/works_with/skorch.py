"""A NeuralNet whose `train_step_single` and `train_step` are `minimize_`."""

import numpy as np
import skorch
import torch
from torch import nn

import gradkit
from tests.works_with._oracles import tried

PIP = "skorch"


class Ours(skorch.NeuralNetRegressor):
    def train_step(self, batch, **fit_params):
        x, y = batch
        self._set_training(True)
        y_pred = self.infer(x)
        return {
            "loss": gradkit.minimize_(self.optimizer_, self.get_loss(y_pred, y)),
            "y_pred": y_pred,
        }


def tries():
    x, y = np.random.randn(12, 3).astype("float32"), np.random.randn(12, 1).astype("float32")

    def fitted(cls):
        torch.manual_seed(0)
        net = cls(
            nn.Linear,
            module__in_features=3,
            module__out_features=1,
            max_epochs=3,
            lr=0.1,
            verbose=0,
            train_split=None,
        )
        net.fit(x, y)
        return [p.detach() for p in net.module_.parameters()]

    base = skorch.NeuralNetRegressor
    yield tried(
        "`minimize_` in train_step", fitted(base), lambda: fitted(base), lambda: fitted(Ours), 0.0
    )
