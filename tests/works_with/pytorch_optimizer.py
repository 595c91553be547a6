"""Each optimizer that it lists, as far as the plain loop can step it: four steps."""

from pytorch_optimizer import get_supported_optimizers, load_optimizer

from tests.works_with._oracles import of_each_optimizer

PIP = "pytorch-optimizer"


def tries():
    makers = {}
    for name in sorted(get_supported_optimizers()):
        cls = load_optimizer(name)
        makers[name] = lambda params, cls=cls: cls(params, lr=1e-2)
    yield from of_each_optimizer(makers)
