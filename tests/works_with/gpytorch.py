"""An exact GP's marginal likelihood by the hyper-parameters and inputs, with Cholesky; a variational one."""

import gpytorch
import torch

from tests.works_with._oracles import in_float64, of_function, of_module

PIP = "gpytorch"
NOTE = "second derivatives by the inputs: a kernel written out"
Y = torch.linspace(-1, 1, 6, dtype=torch.float64).sin()


class Exact(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def make():
    with in_float64():
        x = torch.linspace(0, 1, 6)
        model = Exact(x, Y, gpytorch.likelihoods.GaussianLikelihood())
        return model.double().train()


def loss(model, _):
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    return -mll(model(*model.train_inputs), model.train_targets)


def by_inputs(kernel, fast):
    def fn(x):
        with (
            gpytorch.settings.fast_computations(fast, fast, fast),
            gpytorch.settings.cholesky_jitter(double_value=1e-8),
        ):
            cov = kernel(x).add_diagonal(torch.tensor(0.1, dtype=x.dtype))
            normal = gpytorch.distributions.MultivariateNormal(
                torch.zeros(len(x), dtype=x.dtype), cov
            )
            return normal.log_prob(Y).sin()

    return fn


class Sparse(gpytorch.models.ApproximateGP):
    def __init__(self):
        z = torch.linspace(0, 1, 3)[:, None]
        q = gpytorch.variational.CholeskyVariationalDistribution(3)
        super().__init__(gpytorch.variational.VariationalStrategy(self, z, q))
        self.mean_module, self.covar_module = (
            gpytorch.means.ConstantMean(),
            gpytorch.kernels.MaternKernel(nu=2.5),
        )

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def sparse():
    with in_float64():
        model = Sparse()
        model.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        return model.double().train()


def elbo(model, x, y):
    return -gpytorch.mlls.VariationalELBO(model.likelihood, model, num_data=6)(model(x), y)


def tries():
    x = torch.linspace(0, 1, 6, dtype=torch.float64)[:, None] + 0.03 * torch.randn(
        6, 1, dtype=torch.float64
    )
    yield from of_module(make, (x,), loss, "exact: ", "steps gradient hvp functional", tol=1e-4)
    yield from of_module(
        sparse, (x, Y), elbo, "variational: ", "steps gradient samples hvp functional", tol=1e-4
    )
    kernels = gpytorch.kernels
    for fast in (False, True):
        yield from of_function(
            by_inputs(kernels.RBFKernel().double(), fast),
            x,
            f"RBF by the inputs, fast={fast}: ",
            tol=1e-3,
        )
    yield from of_function(
        by_inputs(kernels.MaternKernel(nu=2.5).double(), False),
        x,
        "Matern by the inputs: ",
        tol=1e-3,
    )
    x2 = torch.randn(6, 2, dtype=torch.float64)
    yield from of_function(
        by_inputs(kernels.RBFKernel(ard_num_dims=2).double(), False),
        x2,
        "RBF, two dimensions: ",
        tol=1e-3,
    )
    frozen = kernels.MaternKernel(nu=2.5, ard_num_dims=2).double().requires_grad_(False)
    yield from of_function(
        by_inputs(frozen, False), x2, "Matern, two dimensions, frozen: ", tol=1e-3
    )
