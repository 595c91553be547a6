"""`CvxpyLayer`: a small quadratic program, by its parameter."""

import cvxpy
import torch
from cvxpylayers.torch import CvxpyLayer

from tests.works_with._oracles import of_function

PIP = "cvxpylayers"


def tries():
    torch.manual_seed(0)
    x, b = cvxpy.Variable(3), cvxpy.Parameter(3)
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(x - b) + cvxpy.norm1(x)), [x >= -0.5])
    layer = CvxpyLayer(problem, parameters=[b], variables=[x])
    b0 = torch.tensor([1.4, -2.0, 0.9], dtype=torch.float64)
    yield from of_function(lambda b: layer(b)[0].exp().sum(), b0, tol=1e-3, eps=1e-4)
