"""The clipped PPO loss of an actor and a critic, computed from data that was collected."""

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss

from tests.works_with._oracles import of_module

PIP = "torchrl"


def make():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), in_keys=["observation"]
    )
    return ClipPPOLoss(actor, critic, entropy_coeff=0.0).double()


def loss(module, observation, action, log_prob, advantage, target):
    names = {
        "observation": observation,
        "action": action.tanh() * 0.9,
        "action_log_prob": log_prob,
        "sample_log_prob": log_prob,
        "advantage": advantage,
        "value_target": target,
    }
    out = module(TensorDict(names, batch_size=observation.shape[:1]))
    return out["loss_objective"] + out["loss_critic"]


def tries():
    draw = lambda *shape: torch.randn(4, *shape, dtype=torch.float64)
    yield from of_module(
        make,
        (draw(3), draw(1), draw(), draw(1), draw(1)),
        loss,
        "",
        "steps gradient hvp functional",
    )
