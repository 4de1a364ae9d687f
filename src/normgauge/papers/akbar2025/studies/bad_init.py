"""S0 Experiment 4 and S3: training from bad weights, the spread over initializations, and (c W, c^2 eta)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from normgauge.lab.data import Dataset
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.nn import init
from normgauge.papers.akbar2025.studies._networks import dataset, hidden_layers, relu_network
from normgauge.papers.court import EACH, Contrast, empirical
from normgauge.papers.experiment import Experiment, Record
from normgauge.papers.figures import Figure
from normgauge.papers.studies import register
from normgauge.records import Spec
from normgauge.theory.norm_growth import equivalent_rate

NORMS = ("none", "batch")
SCALES = {"small": 0.1, "large": 10.0}  # on every weight of He's draw: 10^5 on the output of the plain network
SCHEMES = ("he", "glorot", "orthogonal", "lsuv")
GAINS = (0.1, 1.0, 10.0)
WIDTH, DEPTH = 32, 5
TINY = 1e-30  # an eps that counts for nothing; torch refuses 0


def run(spec: Spec, record: Record) -> None:
    """Train from scaled weights (`scale`), from a scheme times a gain (`init`), or two equivalent runs (`factor`)."""
    digits = dataset(spec["data"])
    if "factor" in spec:
        _record_equivalence(spec, record, digits)
        return
    network = _network(spec["norm"], digits, int(spec["seed"]), torch.float32)
    if "scale" in spec:
        _scale(network, SCALES[spec["scale"]])
    else:
        _initialize(network, spec["init"], digits, int(spec["seed"]))
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))
    steps = int(spec["steps"])
    course = train(network, digits, optimizer, steps=steps, batch=int(spec["batch"]), seed=int(spec["seed"]))
    for step in range(0, len(course.losses), max(1, steps // 25)):
        record(step, "loss", course.losses[step])
    # That a network cannot be trained is what is measured here: one that is no longer finite decides for the first
    # class, and its accuracy is that of a constant.
    for split in ("train", "validation"):
        record(steps, f"{split}_accuracy", evaluate(network, digits, split).accuracy)
    record(steps, "diverged", float(course.diverged))


def _network(norm: str, digits: Dataset, seed: int, dtype: torch.dtype) -> nn.Module:
    sizes = (math.prod(digits.shape), *[WIDTH] * (DEPTH - 1), digits.classes)
    return relu_network(sizes, norm, seed, dtype=dtype)


def _scale(network: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(factor)


def _initialize(network: nn.Module, words: str, digits: Dataset, seed: int) -> None:
    """Draw the weights anew as `scheme x gain` says."""
    scheme, gain = words.split(" x ")
    size = float(gain)
    draws: dict[str, Callable[[], nn.Module]] = {
        "he": lambda: init.he(network, gain=math.sqrt(2.0) * size, seed=seed),
        "glorot": lambda: init.glorot(network, gain=size, seed=seed),
        "orthogonal": lambda: init.orthogonal(network, gain=size, seed=seed),
        "lsuv": lambda: init.lsuv(network, digits.train[0][:256], gain=size, seed=seed),
    }
    draws[scheme]()


def _record_equivalence(spec: Spec, record: Record, digits: Dataset) -> None:
    """Record the largest relative difference of losses between (W, eta) and (c W, c^2 eta), and (c W, eta)."""
    factor, rate = float(spec["factor"]), float(spec["lr"])
    for name, eps in (("", TINY), ("_default_eps", None)):
        plain = _losses(spec, digits, 1.0, rate, eps)
        matched = _losses(spec, digits, factor, equivalent_rate(rate, factor), eps)
        record(int(spec["steps"]), f"equivalence_gap{name}", float(((matched - plain) / plain).abs().max()))
        if eps is not None:
            unmatched = _losses(spec, digits, factor, rate, eps)
            record(int(spec["steps"]), "unmatched_gap", float(((unmatched - plain) / plain).abs().max()))


def _losses(spec: Spec, digits: Dataset, factor: float, rate: float, eps: float | None) -> Tensor:
    """Return the losses of training with the normalized layers' weights times a factor at their own rate."""
    network = _network(spec["norm"], digits, int(spec["seed"]), torch.float64)
    weights = [layer.layer.weight for layer in hidden_layers(network)]
    for layer in hidden_layers(network):
        if eps is not None:
            layer.norm.eps = eps  # type: ignore[assignment]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(factor)  # type: ignore[operator]
    rest = [value for value in network.parameters() if not any(value is weight for weight in weights)]
    groups = [{"params": weights, "lr": rate}, {"params": rest, "lr": float(spec["lr"])}]
    optimizer = torch.optim.SGD(groups)
    steps = int(spec["steps"])
    course = train(
        network,
        (digits.train[0].double(), digits.train[1]),
        optimizer,
        steps=steps,
        batch=int(spec["batch"]),
        seed=int(spec["seed"]),
        loss=digits.loss,
        ceiling=math.inf,
    )
    return torch.tensor([*course.losses, *[math.nan] * (steps - len(course.losses))], dtype=torch.float64)


RATES = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0)  # wide enough that no arm is best at an edge


def _parts(seeds: int, steps: int, rates: Sequence[float], gains: Sequence[float], few: Sequence[float]) -> list[Study]:
    fixed = {"data": "digits", "steps": steps, "batch": 128}
    ask = "Does BN make training robust against bad weights?"
    schemes = [f"{scheme} x {gain:g}" for scheme in SCHEMES for gain in gains]
    arms = {"norm": list(NORMS)}
    return [
        Study(
            "bad-init",
            ask,
            scientific={**arms, "scale": list(SCALES)},
            nuisance={"lr": list(rates)},
            fixed=fixed,
            seeds=seeds,
            tuning_seeds=min(seeds, 2),
        ),
        Study("bad-init", ask, scientific={**arms, "init": schemes, "lr": list(few)}, fixed=fixed, seeds=seeds),
        Study(
            "bad-init",
            ask,
            scientific={"norm": ["batch"], "factor": [0.1, 10.0]},
            fixed={**fixed, "lr": 0.1, "steps": min(steps, 30)},
            seeds=seeds,
        ),
    ]


empirical(
    "S0-init",
    place="Experiment 4, sec 9.1",
    printed="a 5-layer ReLU net from far too large or small weights trains with BN and not without",
    study="bad-init",
    contrasts=(Contrast("train_accuracy", {"norm": "batch"}, {"norm": "none"}, least=0.1, at={"scale": EACH}),),
    control="the same network without BN from the same weights and batches, each arm at its own tuned rate; no "
    "mechanism is claimed",
    note="That it proceeds equally from both is S0-efflr.",
)

empirical(
    "S3-init",
    place="Internal covariate shift, benefits",
    printed="the network becomes more robust to different initialization schemes and learning rates while using batch "
    "normalization",
    study="bad-init",
    contrasts=(
        Contrast("train_accuracy", {"norm": "none"}, {"norm": "batch"}, least=0.02, spread="init", over=("lr",)),
        Contrast("train_accuracy", {"norm": "none"}, {"norm": "batch"}, least=0.02, spread="lr", over=("init",)),
    ),
    control="the same network without BN from the same weights and batches at the same schemes and rates",
    cite=("batchnorm_article", "ioffe2015"),
)

register(
    Experiment(
        name="bad-init",
        papers=("S0", "S3"),
        place="Akbar 2025 Experiment 4, sec. 9.1; the encyclopedia article, benefits",
        question="Does BN train from far too large or small weights, whatever the scheme, and why?",
        finding="A 5-layer ReLU network with far too large or small weights trains with BN and fails without; with BN "
        "training is robust to the initialization scheme and the learning rate.",
        proxy="The paper gives no data or scales. Ours: 64-32-32-32-32-10 on the 8x8 digits, He's weights times 0.1 "
        "and 10 (rate tuned per arm), four schemes times gains 0.1, 1, 10 at three rates, SGD with batches of 128. "
        "The grid of tuned rates was widened after a first run had the plain network best at its edge; the choice "
        "stayed. A run that diverges counts with the accuracy of the network it leaves.",
        sizes={
            "smoke": _parts(3, 8, (0.1,), (1.0,), (0.1, 1.0)),
            "small": _parts(4, 150, RATES, GAINS, (0.01, 0.1, 1.0)),
            "paper": _parts(5, 2000, RATES, GAINS, (0.01, 0.1, 1.0)),
        },
        run=run,
        figures=(
            Figure(
                "scales",
                "Training accuracy from He's weights times 0.1 and 10, each arm at its best rate.",
                "train_accuracy",
                x="scale",
                where={"scale": ("small", "large")},
                kind="bars",
                y_title="training accuracy",
            ),
            Figure(
                "rates",
                "Training accuracy against the rate, over schemes and gains.",
                "train_accuracy",
                x="lr",
                where={"init": EACH},
                y_title="training accuracy",
                x_scale="log",
                y_scale="linear",
            ),
        ),
        choose_by="validation_accuracy",
        minutes={"small": 0.6},
        cite=("akbar2025", "batchnorm_article", "he2015", "glorot2010", "saxe2014", "mishkin2016"),
    )
)
