"""Tables 1 and 2: clean accuracy, Gaussian noise and BIM over normalizers and weight decay; does the norm matter?"""

from typing import Any

import torch

from normgauge.lab.models.normalized import direction_weight, joint_norm, normalized_layers
from normgauge.measure.decisions.robustness import robustness
from normgauge.papers.language import Record, Spec, build, fit, record_accuracies, register


@register("robustness")
def run(spec: Spec, record: Record) -> None:
    """Train with decay on some of the weights, then attack."""
    (network, dataset), seed, steps = build(spec), int(spec["seed"]), int(spec["steps"])
    invariant = {id(direction_weight(part)) for part in normalized_layers(network)}
    held = [(id(p) in invariant) for p in network.parameters()]
    on = {"invariant": (True,), "rest": (False,), True: (True, False), False: ()}[spec["decayed"]]
    groups: list[dict[str, Any]] = []
    for kind in (True, False):
        own = [p for p, inside in zip(network.parameters(), held, strict=True) if inside is kind]
        groups += [{"params": own, "weight_decay": float(spec["decay"]) if kind in on else 0.0}] if own else []
    optimizer = torch.optim.SGD(groups, lr=float(spec["lr"]), momentum=0.9)
    fit(spec, network, dataset, optimizer).whole()
    network.eval()
    record(steps, "weight_norm", joint_norm([direction_weight(part) for part in normalized_layers(network)]))
    record_accuracies(record, steps, network, dataset, "train")
    batch = (dataset.test[0][: int(spec["attacked"])], dataset.test[1][: int(spec["attacked"])])
    noisy = robustness(network, batch, attack="gaussian", radius=float(spec["noise"]), seed=seed)
    record(steps, "clean_accuracy", noisy.clean)
    record(steps, "noise_accuracy", noisy.accuracy, kind="unbiased")
    count, radius = int(spec["attack_steps"]), float(spec["radius"])
    attacked = robustness(network, batch, attack="bim", radius=radius, iterations=count, step=2 / count)
    record(steps, "bim_accuracy", attacked.accuracy, kind="upper")
