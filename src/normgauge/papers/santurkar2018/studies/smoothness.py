"""Fig. 4, 10, 11: loss and gradient along the gradient over training, with and without BN."""

import math
from statistics import fmean

from torch import nn

from normgauge.measure.landscape.landscape import Landscape, landscape
from normgauge.papers.language import Record, Spec, register
from normgauge.papers.santurkar2018.studies import _setting as setting

#: The paper's App. A.2.2: steps of [1/2, 4] times the rate for VGG, [1/100, 30] times for the linear network.
MULTIPLES = {"vgg": (0.5, 1.0, 2.0, 4.0), "dln": (0.01, 0.3, 1.0, 10.0, 30.0)}
SUMMARIES = ("loss_range", "gradient_distance", "effective_beta", "random_loss_range", "relative_distance")
EARLY = 0.1
MATCHED = {"vgg": 1.2, "dln": 0.5}  # training losses (of the first, for the linear network) at which arms are compared


@register("smoothness")
def run(spec: Spec, record: Record) -> None:
    """Train, and look along the gradient and one random direction of its length at spaced steps of training."""
    network, dataset = setting.prepare(spec)
    rate, steps = float(spec["lr"]), int(spec["steps"])
    multiples = MULTIPLES[spec["model"]]
    at = setting.spaced_steps(steps, int(spec["measures"]))
    history: dict[str, list[float]] = {name: [] for name in (*SUMMARIES, "early_gradient_distance")}
    losses: list[float] = []

    def watch(step: int, network: nn.Module) -> None:
        objective = setting.batch_objective(network, dataset, spec)
        view = landscape(objective, steps=[rate * m for m in multiples], random=1, seed=int(spec["seed"]))
        for name, value in zip(SUMMARIES, _summaries(view), strict=True):
            history[name].append(value)
            record(step, f"{name}_now", value)
        losses.append(view.loss)
        seen = {"loss": view.loss, "loss_low": view.min_loss, "loss_high": view.max_loss}
        for name, value in {**seen, "gradient_norm": view.gradient_norm}.items():
            record(step, name, value)
        if step <= EARLY * steps:
            history["early_gradient_distance"].append(view.max_gradient_distance)
        for multiple, distance in zip(multiples, view.gradient_distances, strict=True):
            record(step, "distance_at", distance, layer=f"{multiple:g}")

    result = setting.follow(spec, network, dataset, watch)
    setting.record_medians(record, steps, history)
    # the plain network sits on a plateau at first: compared where each arm has come as far down, and nowhere else
    level = MATCHED[spec["model"]] * (losses[0] if spec["model"] == "dln" else 1.0)
    there = next((k for k, loss in enumerate(losses) if loss <= level), None)
    for name in SUMMARIES[:3]:
        value = math.nan if there is None else history[name][there]
        record(steps, f"matched_{name}", value, status="skipped")
    early = [loss for step, loss in zip(at, losses, strict=False) if step <= EARLY * steps]
    record(steps, "early_loss_drop", 1 - early[-1] / early[0])
    record(steps, "train_loss", fmean(result.losses[-10:]))
    result.whole()


def _summaries(view: Landscape) -> tuple[float, ...]:
    """Return what `SUMMARIES` names, at one step of training."""
    distance = view.max_gradient_distance
    return (
        view.loss_variation,
        distance,
        view.max_effective_beta,
        fmean(other.loss_variation for other in view.random),
        distance / view.gradient_norm,
    )
