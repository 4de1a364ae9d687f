"""A handful of numbers of every public instrument, optimizer and normalizer.

Exact quantities in float64 hold to 1e-6, which leaves room for another order of summation. Eigenvalues are searched to
a residual of 1e-8, since 1e-3 leaves the stop to rounding. `elsewhere` marks what hangs on torch's random streams.
"""

from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from golden.nets import batch, block, conv, deep, filled, labels, mlp, numbers, objective, without_bias
from golden.pins import FLOOR, Subject
from normgauge.theory import mean_field

INSTRUMENTS = Subject("instruments")
pin = INSTRUMENTS.pin
MODELS = {"mlp": mlp, "conv": conv, "block": block}


def rows(result, *columns, by):
    """Return columns of a result's table under the name each row has in column `by`."""
    table = result.frame().to_dict("records")
    return {row[by]: {column: row[column] for column in columns} for row in table}


def fields(item, *names):
    return {name: getattr(item, name) for name in names}


def of_models(measure, *makes, mode="train"):
    return {make.__name__: measure(objective(make, mode)) for make in makes or MODELS.values()}


@cache
def known_symmetries(make):
    """Discover once what several instruments are told."""
    return ng.symmetries(objective(make))


@pin("Objective")
def _():
    def one(o):
        vector = o.unflatten(numbers(o.dimension, seed=9))
        slope = o.gradient()
        return {
            "loss": o.loss(),
            "gradient": {name: slope[name] for name in list(slope)[:2]},
            "hessian_product": o.flatten(o.hessian() @ vector),
            "gauss_newton_product": o.flatten(o.gauss_newton() @ vector),
            "empirical_fisher_product": o.flatten(o.empirical_fisher() @ vector),
        }

    return {mode: of_models(one, mode=mode) for mode in ("train", "eval")}


@pin("symmetries")
def _():
    def one(make):
        o, found = objective(make), known_symmetries(make)
        kinds = [generator.kind for generator in found.generators]
        canonical = o.flatten(found.canonical(o.parameters))
        moved = o.flatten(found.project(o.unflatten(numbers(o.dimension, seed=9))))
        return {
            "dimension": found.dimension,
            "kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "statuses": sorted({generator.status for generator in found.generators}),
            "canonical": canonical,
            "projected": moved,
        }

    return {name: one(make) for name, make in MODELS.items()}


@pin("param_groups")
def _():
    options = {"lr": 0.1, "weight_decay": 0.5}

    def one(make):
        groups = ng.param_groups(objective(make), options, geometry=True, symmetries=known_symmetries(make))
        return {
            group["name"]: {"tensors": len(group["params"]), "decay": group["weight_decay"], "on": group["geometry"]}
            for group in groups
        }

    return {name: one(make) for name, make in MODELS.items()}


@pin("spectrum")
def _():
    def one(make):
        o, told = objective(make), {"quotient": known_symmetries(make)}
        bottom = {"hessian": 1, "gauss_newton": 0, "empirical_fisher": 0, "quotient": 1}  # others end at zero
        found = {
            of: ng.spectrum(o, top=2, bottom=count, of=of, tol=1e-8, symmetries=told.get(of))
            for of, count in bottom.items()
        }
        return {of: fields(item, "top", "bottom", "status", "dimension") for of, item in found.items()}

    return {"mlp": one(mlp), "conv": one(conv)}


@pin("spectrum of a transformer block")
def _():
    return fields(ng.spectrum(objective(block), top=2, bottom=1, tol=1e-8), "top", "bottom", "status")


@pin("quotient_spectrum")
def _():
    found = ng.quotient_spectrum(objective(mlp), top=2, tol=1e-8)
    return fields(found, "top", "blocks", "sharpness", "negatives", "gauge")


@pin("layer_spectra")
def _():
    def one(o):
        return {name: found.top for name, found in ng.layer_spectra(o, tol=1e-8).spectra.items()}

    return of_models(one)


# Two probes: on another stream moments and peak moved by up to 0.3.
@pin("density", elsewhere=0.5)
def _():
    found = ng.density(objective(mlp), probes=2, iterations=20, width=0.05, points=11)
    return {"moments": found.moments, "peak": max(found.values), "share": found.share(0.0)}


# Stopped at a standard error of 5 %; three of them, twice.
@pin("trace", elsewhere=0.3)
def _():
    return {
        of: fields(ng.trace(objective(mlp), of=of, relative_error=0.05), "value", "status")
        for of in ("gauss_newton", "empirical_fisher")
    }


@pin("landscape")
def _():
    def one(o):
        found = ng.landscape(o, steps=[0.05, 0.2, 0.8])
        return fields(found, "loss", "gradient_norm", "losses", "gradient_distances", "effective_beta")

    return of_models(one)


@pin("landscape along random directions", elsewhere=1.0)
def _():
    return {
        view.direction: fields(view, "losses", "effective_beta")
        for view in ng.landscape(objective(mlp), steps=[0.2], random=2, seed=3).random
    }


@pin("landscape_bands")
def _():
    o = objective(mlp)
    views = {step: ng.landscape(o.at(o.flatten(o.parameters) * (1 + step)), steps=[0.1, 0.5]) for step in (0, 1)}
    return rows(ng.landscape_bands(views), "max_loss", "min_loss", "max_effective_beta", by="step")


@pin("loss_surface")
def _():
    o = objective(conv)
    axes = [o.unflatten(numbers(o.dimension, seed=seed)) for seed in (1, 2)]
    path = [o.unflatten(0.1 * k * numbers(o.dimension, seed=3 + k)) for k in range(4)]
    given = ng.loss_surface(o, directions=axes, span=0.5, points=3)
    pca = ng.loss_surface(o, directions="pca", points=3, paths=[path])
    return {"given": fields(given, "grid", "losses"), "pca": {"losses": sorted(sum(pca.losses, ()))}}


@pin("loss_surface along random filters", elsewhere=1.0)
def _():
    return fields(ng.loss_surface(objective(conv), points=3, seed=1), "losses")


@pin("covariate_shift")
def _():
    def one(o):
        found = ng.covariate_shift(o, 0.3)
        names = "l2", "cosine", "gradient_norm", "mean_change", "variance_change"
        return {layer.layer: fields(layer, *names) for layer in found.layers}

    return of_models(one)


@pin("activations")
def _():
    found = ng.activations(objective(mlp), layers="3", units=3)  # all units: no choice is left
    return {f"{layer}/{unit}": values for (layer, unit), values in sorted(found.values.items())}


@pin("activation_history")
def _():
    o = objective(mlp)
    views = {k: ng.activations(o.at(o.flatten(o.parameters) * (1 + k)), layers="3", units=3) for k in (0, 10)}
    history = ng.activation_history(views, bins=3)
    return {
        "steps": history.steps,
        "counts": {f"{layer}/{unit}": counts for (layer, unit), counts in sorted(history.counts.items())},
        "edges": {f"{layer}/{unit}": edges for (layer, unit), edges in sorted(history.edges.items())},
    }


@pin("signal_propagation")
def _():
    def one(o):
        found = ng.signal_propagation(o)
        names = "mean", "variance", "pre_variance", "dead", "saturated", "gradient", "weight_gradient"
        layers = {layer.layer: fields(layer, *names) for layer in found.layers}
        return {**fields(found, "growth", "growth_low", "growth_high"), "layers": layers}

    asked = ng.signal_propagation(objective(deep), theory=True)
    assert asked.theory is not None and not asked.withheld
    asked_of = objective(deep)
    size = asked_of.weight(next(iter(asked_of.batches()))[1])
    predicted = mean_field.batchnorm_layer("tanh", size).square_growth
    return {**of_models(one), "deep": {**fields(asked, "growth"), "predicted": predicted}}


@pin("weight_dynamics")
def _():
    def one(o):
        names = "scale_invariant", "norm", "next_norm", "gradient", "radial", "effective_rate", "angle"
        names += "equilibrium_norm", "equilibrium_angle", "heading"
        optimizer = torch.optim.SGD(o.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        found = ng.weight_dynamics(o, optimizer)
        moving = [item for item in found.blocks if item.gradient > FLOOR]  # a bias before BatchNorm gets rounding
        return {"+".join(item.parameters): fields(item, *names) for item in moving}

    return of_models(one, mlp, conv)


# The adaptive steps are chosen by an error estimate; drift is integration error, held by its own tests.
@pin("gradient_flow")
def _():
    o = objective(deep)
    fixed = ng.gradient_flow(
        o, 0.5, integrator="runge_kutta", iterations=10, rates=[0.25], symmetries=known_symmetries(deep)
    )
    return {
        "losses": fixed.losses[::5],
        "distance": fixed.distances,
        "conserved": [fields(item, "name", "kind", "count", "start", "discrete") for item in fixed.conserved],
    }


@pin("gradient_flow, adaptive", rel=1e-5)
def _():
    found = ng.gradient_flow(objective(deep), 0.5, symmetries=known_symmetries(deep))
    return {"loss": found.losses[-1], "end": objective(deep).flatten(found.parameters), "status": found.status}


@pin("operator_norm")
def _():
    layers = {
        "linear": (nn.Linear(4, 6), None),
        "batch": (nn.BatchNorm1d(6).eval(), None),
        "conv": (nn.Conv2d(2, 3, 3, padding=1), (2, 5, 5)),
        "strided": (nn.Conv2d(2, 3, 3, stride=2), (2, 7, 7)),
        "transposed": (nn.ConvTranspose1d(2, 3, 3), (2, 6)),
        "folded": (nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)).eval(), (2, 5, 5)),
    }
    found = {name: ng.operator_norm(filled(layer), shape) for name, (layer, shape) in layers.items()}
    return {name: fields(item, "lower", "upper", "reshaped", "method") for name, item in found.items()}


@pin("lipschitz, upper")
def _():
    names = "log10_upper", "log10_at_data", "log10_on_ball", "log10_global", "normalizers_share"
    found = {name: ng.lipschitz(make().eval(), batch(make)[0], radius=0.1) for name, make in MODELS.items()}
    return {name: fields(item, *names) for name, item in found.items()}


# Without climbs the lower end is the steepest datum, which no random number touches.
@pin("lipschitz, lower")
def _():
    found = {name: ng.lipschitz(make().eval(), batch(make)[0], climbs=0) for name, make in MODELS.items()}
    return {name: {**fields(item, "lower"), "per_datum": item.per_datum} for name, item in found.items()}


@pin("lipschitz, climbed", elsewhere=0.1)
def _():
    return {name: ng.lipschitz(make().eval(), batch(make)[0]).lower for name, make in MODELS.items()}


@pin("weight_lipschitz")
def _():
    names = "input", "log10_output", "log10_chain", "log10_local", "log10_plain", "log10_gradient"

    def one(o):
        return {layer.name: fields(layer, *names) for layer in ng.weight_lipschitz(o).layers}

    return {mode: of_models(one, mlp, conv, mode=mode) for mode in ("train", "eval")}


@pin("margins")
def _():
    def one(o):
        found = ng.margins(o)
        return {"accuracy": found.accuracy, **found.values, "divisors": found.log10_divisors}

    return of_models(one, mode="eval")


@pin("flatness")
def _():
    found = ng.flatness(objective(mlp), samples=1, sharpness=["adaptive", "spherical"])
    return {**fields(found, "loss", "accuracy"), **{item.name: item.value for item in found.sharpness}}


# Means of losses over 20 draws; on another stream they move by about their standard error.
@pin("flatness under noise", elsewhere=0.3)
def _():
    found = ng.flatness(objective(mlp), sigmas=[0.03], samples=20, noises=["absolute", "filter", "quotient"])
    return {item.noise: item.loss for item in found.entries}


@pin("robustness")
def _():
    def one(make):
        attacks = {
            name: ng.robustness(make(), batch(make, 30), attack=name, radius=[0.1, 0.4]) for name in ("fgsm", "bim")
        }
        return {name: [found.clean, *(entry.accuracy for entry in found.entries)] for name, found in attacks.items()}

    return {name: one(make) for name, make in MODELS.items()}


@pin("robustness under random attacks", elsewhere=0.5)
def _():
    settings = {"gaussian": "stored", "pgd": "noisy", "pgd_l2": "batch"}
    return {
        name: [
            e.accuracy for e in ng.robustness(mlp(), batch(mlp, 30), attack=name, radius=[0.4], statistics=kind).entries
        ]
        for name, kind in settings.items()
    }


@pin("drift")
def _():
    def one(make):
        found = ng.drift(make(), [batch(make, 12, 60), batch(make, 12, 61)])
        names = "mean_shift", "worst_shift", "log_variance_ratio", "divergence", "recalibrated_shift", "floor"
        layers = {layer.layer: fields(layer, *names) for layer in found.layers}
        kept = fields(found, "output_change", "decisions_changed", "accuracy", "recalibrated_accuracy")
        return {**kept, "layers": layers}

    return {"mlp": one(mlp), "conv": one(conv)}


# All are fixed multiples of the top eigenvalue, whose residual is 1e-3 and which starts at random.
@pin("stable_rate", elsewhere=1e-3)
def _():
    smooth = filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    o = ng.Objective(smooth, F.mse_loss, (numbers(10, 3, seed=50), numbers(10, 1, seed=51)), mode="eval")
    found = ng.stable_rate(o)
    return {**fields(found, "predicted", "top_eigenvalue", "observed_low", "observed_high", "status")}


@pin("sharpness_track", elsewhere=1e-3)
def _():
    o = objective(mlp)
    optimizer = torch.optim.SGD(o.model.parameters(), lr=0.1, momentum=0.5)
    point = ng.sharpness_track(o, optimizer).measure(0)
    return fields(point, "loss", "threshold", "sharpness", "ratio", "critical_rate")


@pin("smoothing")
def _():
    def one(o):
        names = "sigma", "gain", "mean_share", "yhat_share", "reduction", "curvature", "term"
        return {entry.layer: fields(entry, *names) for entry in ng.smoothing(o).layers}

    return of_models(one)


# Eight draws: standard errors are a third of the values.
@pin("batch_noise", elsewhere=3.0)
def _():
    found = ng.batch_noise(objective(mlp), sizes=[4, 8], draws=8)
    return {str(e.size): {"sampling": e.sampling.value, "total": e.total.value} for e in found.sizes}


# LLA needs a top eigenvalue from a random start, to a residual of 1e-3.
@pin("generalization", elsewhere=1e-3)
def _():
    inputs, targets = batch(mlp, 60)
    centres = inputs[:4]
    test = batch(mlp, 30, 70)
    found = ng.generalization(mlp(), (inputs, targets), test=test, partition=centres, radius=2.0)
    return {
        **fields(found, "empirical", "test_loss", "partition_cells", "slack", "network_slope"),
        "bounds": {item.name: fields(item, "upper", "kind", "verdict") for item in found.bounds},
        "measures": {
            f"{item.name}, {item.weights}": fields(item, "value", "verdict")
            for item in found.measures
            if "PAC" not in item.name  # searched with random noise
        },
    }


# Every sample is replaced, but by which fresh one is drawn: moved by 0.26 on another stream.
@pin("stability", elsewhere=0.5)
def _():
    inputs, targets = batch(mlp, 24)

    def train(data, seed):
        model = mlp().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(data[0]), data[1]).backward()
            optimizer.step()
        return model

    def loss(output, target):
        return F.cross_entropy(output, target, reduction="none")

    fresh = batch(mlp, 24, 80)
    found = ng.stability(train, (inputs, targets), fresh, loss=loss, pairs=24)
    return fields(found, "uniform", "mean")


@pin("prune_norms")
def _():
    def one(make, by):
        done = ng.prune_norms(make().eval(), by, 0.4, batch(make)[0])
        return {"change": done.change, "outputs": done.model(batch(make)[0]).detach(), **tally(done.model)}

    return {f"{make.__name__}, {by}": one(make, by) for make in (mlp, conv) for by in ("gamma", "similar")}


def tally(model):
    return {"parameters": sum(tensor.numel() for tensor in model.parameters())}


@pin("take and cite")
def _():
    return {"take": ng.take(iter(range(5)), 3), "cite": [len(ng.cite(key)) > 50 for key in ("ioffe2015", "akbar2025")]}


OPTIMIZERS = {
    "SphereSGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "GeodesicSGD": {"lr": 0.1, "momentum": 0.9},
    "SphereAdam": {"lr": 0.05},
    "GeodesicAdam": {"lr": 0.05},
    "ProjectedSGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "ProjectedAdam": {"lr": 0.05, "weight_decay": 0.01},
    "NormalizedSGD": {"lr": 0.1, "momentum": 0.9},
}


# No bias before BatchNorm: its gradient is rounding, which NormalizedSGD makes as long as any other.
@pin("optim, five steps")
def _():
    def trained(name, options):
        model, (inputs, targets) = without_bias(), batch(mlp)
        optimizer = getattr(ng.optim, name)(model.parameters(), **options)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return {**dict(model.named_parameters()), "loss": F.cross_entropy(model(inputs), targets).detach()}

    model, (inputs, targets) = without_bias(), batch(mlp)
    closed = ng.optim.GDNP(model)

    def closure():
        closed.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    for _ in range(5):
        closed.step(closure)
    gdnp = {"loss": F.cross_entropy(model(inputs), targets).detach()}
    return {**{name: trained(name, options) for name, options in OPTIMIZERS.items()}, "GDNP": gdnp}


@pin("optim.damped_gauss_newton")
def _():
    found = ng.optim.damped_gauss_newton(objective(mlp), damping=0.1, tol=1e-10)
    return {"step": objective(mlp).flatten(found.step), "predicted": found.predicted}


@pin("optim.gdnp")
def _():
    x = numbers(40, 3, seed=11) * torch.tensor([1.0, 2.0, 0.5])
    signs = torch.where(x @ torch.tensor([1.0, -1.0, 2.0]) + numbers(40, seed=12) > 0, 1.0, -1.0)
    spread = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    problems = {
        "least_squares": ng.optim.least_squares(x, x @ torch.ones(3) + numbers(40, seed=13)),
        "halfspace": ng.optim.halfspace(x - x.mean(0), signs),
        "gaussian_halfspace": ng.optim.gaussian_halfspace(torch.tensor([0.5, -0.3, 0.2]), spread),
    }
    runs = {name: ng.optim.gdnp(problem, iterations=5, start=torch.ones(3)) for name, problem in problems.items()}
    names = "loss", "rho", "length", "gradient_norm"
    return {
        name: {"weights": run.weights, "condition": run.condition, "last": fields(run.records[-1], *names)}
        for name, run in runs.items()
    }


# One sweep: the next one's line search halves by a comparison that rounding decides.
@pin("optim.gdnp_network")
def _():
    x, start = numbers(30, 3, seed=11), numbers(2, 3, seed=14)
    found = ng.optim.gdnp_network(
        x - x.mean(0), 2.0 * (labels(30) > 0) - 1, output=torch.tensor([1.0, -0.5]), start=start, sweeps=1
    )
    return fields(found, "weights", "losses", "gradient_norms", "alignments")


@pin("nn.registry")
def _():
    return {
        name: {
            f"space {space}, {mode}": normalized(name, space, mode) for space in (0, 2) for mode in ("train", "eval")
        }
        for name in ng.nn.registry.names()
        if not ng.nn.registry.get(name).noise
    }


# Noise of the layer itself: torch's own stream.
@pin("nn.registry, noisy", elsewhere=1.0)
def _():
    torch.manual_seed(0)
    return {"noisy_batch": normalized("noisy_batch", 0, "train")}


def normalized(name, space, mode):
    """Norms of a normalized layer's output, of its gradient to the input and to the weights, by a fixed cotangent."""
    declared, spatial = ng.nn.registry.get(name), (4,) * space
    if space not in declared.spatial:
        return {"declared": False}
    linear = nn.Conv2d(3, 8, 3, padding=1) if space else nn.Linear(3, 8)
    linear = filled(linear, seed=5)
    layer = (
        declared.wrap(linear)
        if declared.placement == "weights"
        else nn.Sequential(linear, filled(declared.layer(8, space), seed=6))
    )
    layer.double().train(mode == "train")
    x = numbers(16, 3, *spatial, seed=20).requires_grad_()
    out = layer(x)
    slopes = torch.autograd.grad(
        (out * numbers(*out.shape, seed=21)).sum(), [x, *layer.parameters()], allow_unused=True
    )
    learned = [slope for slope in slopes[1:] if slope is not None]
    parts = {"output": [out], "to_input": slopes[:1], "to_weights": learned}
    return {part: float(torch.cat([t.detach().flatten() for t in tensors]).norm()) for part, tensors in parts.items()}
