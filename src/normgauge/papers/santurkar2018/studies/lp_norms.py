"""Fig. 5, 6, 9, 12, 13: l_p normalization against BN and none: training, smoothness, distributions."""

import math

from torch import nn

from normgauge.lab.runs.evaluate import evaluate
from normgauge.measure.landscape.landscape import landscape
from normgauge.papers.language import Record, Spec, register
from normgauge.papers.santurkar2018.studies import _setting as setting

MULTIPLES = {"vgg": (0.5, 2.0, 4.0), "dln": (0.01, 1.0, 30.0)}
#: The line search is taken at the paper's rates for all arms: equal steps are compared whatever rate an arm likes.
LOOK = {"vgg": 0.1, "dln": 1e-3}


@register("lp-norms")
def run(spec: Spec, record: Record) -> None:
    """Train; look along the gradient and at one layer's activations at spaced steps; record the end."""
    network, dataset = setting.prepare(spec)
    steps, model = int(spec["steps"]), str(spec["model"])
    history: dict[str, list[float]] = {"loss_range": [], "gradient_distance": [], "effective_beta": []}

    def watch(step: int, network: nn.Module) -> None:
        objective = setting.batch_objective(network, dataset, spec)
        view = landscape(objective, steps=[LOOK[model] * m for m in MULTIPLES[model]])
        extremes = (view.loss_variation, view.max_gradient_distance, view.max_effective_beta)
        for name, value in zip(history, extremes, strict=True):
            history[name].append(value)
            record(step, f"{name}_now", value)
        record(step, "loss", view.loss)
        setting.record_distribution(record, step, objective, histogram=step == steps)

    result = setting.follow(spec, network, dataset, watch)
    setting.record_medians(record, steps, history)
    size = int(spec["batch"])
    loss = evaluate(network, dataset, "train", statistics="batch", limit=size, batch=size).loss
    loss = loss if math.isfinite(loss) else math.inf
    record(steps, "train_loss", loss)
    score = -loss
    if model == "vgg":
        score = evaluate(network, dataset, batch=size, **setting.AS_TRAINED).accuracy
        record(steps, "train_accuracy", score)
        record(steps, "test_accuracy", evaluate(network, dataset).accuracy)
    record(steps, "score", score)
    result.whole()
