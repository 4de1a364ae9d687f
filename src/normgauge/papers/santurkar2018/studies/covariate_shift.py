"""Fig. 3: how much a layer's gradient turns when the layers before it have moved, with and without BN."""

from statistics import fmean

from torch import nn

from normgauge.measure.signal.covariate_shift import covariate_shift
from normgauge.papers.language import Record, Spec, register
from normgauge.papers.santurkar2018.studies._setting import batch_objective, follow, layer_groups, prepare

# The same measurement for a tenth of the step: it tells whether the step or the network makes the gradients turn.
SHARES = {"": 1.0, "_tenth": 0.1}


@register("covariate-shift")
def run(spec: Spec, record: Record) -> None:
    """Train, and measure S1's Definition 2.1 for one SGD step at spaced steps of training."""
    network, dataset = prepare(spec)
    rate = float(spec["lr"])
    history: dict[str, list[float]] = {}

    def watch(step: int, network: nn.Module) -> None:
        objective = batch_objective(network, dataset, spec)
        record(step, "loss", float(objective.loss()))
        for suffix, share in SHARES.items():
            layers = covariate_shift(objective, share * rate, groups=layer_groups(network)).layers
            later = [entry for entry in layers[1:] if entry.status == "ok"]  # nothing moves before the first layer
            if not later:
                continue
            values = {name: fmean(getattr(entry, name) for entry in later) for name in ("cosine", "l2")}
            values["relative_l2"] = fmean(entry.l2 / entry.gradient_norm for entry in later)
            for name, value in values.items():
                history.setdefault(name + suffix, []).append(value)
                record(step, f"{name}{suffix}_now", value)
            if not suffix:
                for entry in later:
                    record(step, "layer_cosine", entry.cosine, layer=entry.layer)
                    record(step, "layer_l2", entry.l2, layer=entry.layer)

    steps = int(spec["steps"])
    result = follow(spec, network, dataset, watch)
    for name, values in history.items():
        record(steps, name, fmean(values))
    record(steps, "train_loss", fmean(result.losses[-10:]))
    result.whole()
