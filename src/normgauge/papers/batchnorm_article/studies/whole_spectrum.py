"""S3 Smoothness, last paragraph: all eigenvalues of the Hessian with and without BN, at equal training loss."""

import math

import torch
from torch import nn

from normgauge.lab import data as datasets
from normgauge.objective import Objective
from normgauge.papers.language import Record, Spec, fit, register
from normgauge.papers.networks import relu_network

LEVELS = (0.5, 0.1)  # training losses at which arms are compared
CLASSES = 10  # as many eigenvalues stand out, by theory and in what others measured
LOOK = 5  # steps from look to look at the loss


@register("whole-spectrum")
def run(spec: Spec, record: Record) -> None:
    """Train to each level of the loss in turn, and take the whole spectrum there."""
    digits = datasets.load(spec["data"])
    count, width = int(spec["measured"]), int(spec["width"])
    sizes = (math.prod(digits.shape), width, width, digits.classes)
    network = relu_network(sizes, spec["norm"], int(spec["seed"]))
    batch = (digits.train[0][:count].double(), digits.train[1][:count])
    objective = Objective(network, nn.functional.cross_entropy, batch, mode="train")
    _record_spectrum(record, 0, objective, "start")
    waiting = list(LEVELS)

    def until(step: int, losses: object) -> bool:
        if step % LOOK == 0:
            loss = float(objective.loss())
            while waiting and loss <= waiting[0]:
                _record_spectrum(record, step, objective, f"loss {waiting.pop(0):g}")
        return not waiting

    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))
    data = (digits.train[0].double(), digits.train[1])
    done = fit(spec, network, data, optimizer, loss=nn.functional.cross_entropy, until=until).whole()
    record(len(done.losses), "steps", len(done.losses))


def _record_spectrum(record: Record, step: int, objective: Objective, when: str) -> None:
    """Record the largest eigenvalue, the root mean square of all but the outliers, their ratio, the negative share."""
    operator = objective.hessian()
    dense = operator.matmat(torch.eye(operator.shape[0], dtype=operator.dtype))
    values = torch.linalg.eigvalsh((dense + dense.T) / 2)
    top = float(values[-1])
    bulk = float(values[:-CLASSES].square().mean().sqrt())
    name = when.replace(" ", "_").replace(".", "_")
    negative = float((values < -1e-6 * top).double().mean())
    for kind, value in (("top", top), ("bulk", bulk), ("outliers", top / bulk), ("negative_share", negative)):
        record(step, f"{kind}_{name}", value)
    for place, value in enumerate(values.flip(0).tolist()):
        if place < 2 * CLASSES or place % 20 == 0:
            record(step, f"eigenvalue_{name}", math.log10(max(abs(value), 1e-12)), layer=f"{place / len(values):.4f}")
