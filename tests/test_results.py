"""Every instrument's result keeps the contract of `Result`; an instrument that is not registered is noticed."""

import inspect
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from normgauge import optim
from normgauge.errors import InputError
from normgauge.records import Reading
from normgauge.results import INSTRUMENTS, Cost, Result, counting, instrument, spend
from normgauge.testing import NonconformingError, check_result


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def net():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(draws(*parameter.shape, seed=number))
    return model


def batch(samples=12, seed=50):
    return draws(samples, 3, seed=seed), (draws(samples, seed=seed + 1) > 0).long()


def objective(mode="train", loss=F.cross_entropy, data=None):
    return ng.Objective(net(), loss, data or [batch(), batch(8, 60)], mode=mode)


def trained(data, seed):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(data[0]), data[1]).backward()
    optimizer.step()
    return model


def landscapes(o):
    return {step: ng.landscape(o.at(o.flatten(o.parameters) * (1 + step)), steps=[0.1, 0.5]) for step in (0, 1)}


def wide(width):
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def problem():
    x = draws(30, 3, seed=7)
    return optim.halfspace(x - x.mean(0), torch.where(draws(30, seed=8) > 0, 1.0, -1.0))


TINY = {
    "spectrum": lambda: ng.spectrum(objective(), top=2, bottom=1),
    "quotient_spectrum": lambda: ng.quotient_spectrum(objective(), top=1),
    "density": lambda: ng.density(objective(), iterations=8, points=20),
    "trace": lambda: ng.trace(objective(), of="gauss_newton", relative_error=0.3),
    "layer_spectra": lambda: ng.layer_spectra(objective()),
    "stable_rate": lambda: ng.stable_rate(objective("eval"), iterations=4, tol=2.0),
    "batch_noise": lambda: ng.batch_noise(objective(), sizes=[4, 8], draws=3),
    "sharpness_track": lambda: ng.sharpness_track(o := objective(), checkpoints={0: o.parameters}),
    "landscape": lambda: ng.landscape(objective(), steps=[0.1, 1.0], random=1),
    "landscape_bands": lambda: ng.landscape_bands(landscapes(objective())),
    "smoothing": lambda: ng.smoothing(o := objective(), checkpoints={0: o.parameters, 5: o.parameters}),
    "loss_surface": lambda: ng.loss_surface(objective(), points=3),
    "flatness": lambda: ng.flatness(objective(), samples=2, sharpness=["adaptive", "spherical"]),
    "activations": lambda: ng.activations(objective()),
    "activation_history": lambda: ng.activation_history({s: ng.activations(objective()) for s in (0, 5)}),
    "covariate_shift": lambda: ng.covariate_shift(objective(), 0.5),
    "signal_propagation": lambda: ng.signal_propagation(objective()),
    "trainable_depth": lambda: ng.trainable_depth(net(), batch()[0]),
    "width_check": lambda: ng.width_check(wide, widths=[4, 8, 16], data=batch(), iterations=1, seeds=1),
    "translate": lambda: ng.translate(
        torch.optim.SGD((o := objective()).model.parameters(), lr=0.01), to="adamw", objective=o, iterations=20
    ),
    "drift": lambda: ng.drift(net(), [batch(), batch(8, 60)]),
    "margins": lambda: ng.margins(objective("eval")),
    "robustness": lambda: ng.robustness(net(), batch(), attack="pgd", radius=[0.1, 0.5], iterations=2, restarts=1),
    "weight_dynamics": lambda: ng.weight_dynamics(o := objective(), torch.optim.SGD(o.model.parameters(), lr=0.1)),
    "gradient_flow": lambda: ng.gradient_flow(objective(), 0.1, integrator="runge_kutta", iterations=3, rates=[0.05]),
    "lipschitz": lambda: ng.lipschitz(net().eval(), batch()[0], radius=0.1),
    "operator_norm": lambda: ng.operator_norm(nn.Conv2d(2, 3, 3, padding=1), (2, 30, 30)),
    "weight_lipschitz": lambda: ng.weight_lipschitz(objective()),
    "generalization": lambda: ng.generalization(net(), batch(60), test=batch(20, 70), partition=2),
    "stability": lambda: ng.stability(
        trained, batch(), batch(8, 60), loss=lambda o, t: F.cross_entropy(o, t, reduction="none"), pairs=2, seeds=1
    ),
    "symmetries": lambda: ng.symmetries(objective()),
    "param_groups": lambda: ng.param_groups(objective(), {"lr": 0.1, "weight_decay": 0.1}),
    "fold_norms": lambda: ng.fold_norms(net().eval(), example=batch()[0]),
    "canonicalize": lambda: ng.canonicalize(net(), example=batch()[0]),
    "layer_to_rms": lambda: ng.layer_to_rms(
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), example=draws(5, 3)
    ),
    "migrate_weight_norm": lambda: ng.migrate_weight_norm(nn.utils.weight_norm(nn.Linear(3, 2)), example=draws(5, 3)),
    "rotate_stream": lambda: ng.rotate_stream(
        nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4), nn.Linear(4, 2)), example=draws(5, 3)
    ),
    "split_norms": lambda: ng.split_norms(nn.Sequential(n := nn.BatchNorm1d(3), n), example=draws(5, 3)),
    "swap_norms": lambda: ng.swap_norms(net(), "layer", example=batch()[0]),
    "freeze_norms": lambda: ng.freeze_norms(net(), example=batch()[0]),
    "guard_norms": lambda: ng.guard_norms(net(), example=batch()[0]),
    "recalibrate_norms": lambda: ng.recalibrate_norms(net(), [batch(), batch(8, 60)]),
    "strip_biases": lambda: ng.strip_biases(net(), example=batch()[0]),
    "prune_norms": lambda: ng.prune_norms(net().eval(), "gamma", 0.5, batch()[0]),
    "layer_geometry": lambda: ng.nn.layer_geometry(draws(3, 4), draws(10, 4, seed=1)),
    "gdnp": lambda: optim.gdnp(problem(), iterations=3),
    "gdnp_network": lambda: optim.gdnp_network(
        draws(30, 3), torch.where(draws(30, seed=2) > 0, 1.0, -1.0), output=torch.ones(2), sweeps=1
    ),
}


#: Whose stated errors are held against dense twins, and where.
TWINS = {
    **dict.fromkeys(("spectrum", "density", "trace", "layer_spectra", "stable_rate"), "measure/test_estimators.py"),
    **dict.fromkeys(("batch_noise", "flatness"), "measure/test_estimators.py"),
    "quotient_spectrum": "measure/curvature/test_quotient.py",
    "stability": "measure/generalization/test_stability.py",
    "width_check": "measure/signal/test_width_check.py",
}


def test_every_instrument_is_registered_and_held_to_the_contract():
    """By a line in TINY, or by a test file of its own that calls `check_result`."""
    rooms = [getattr(ng, name) for name in ng.__all__ if inspect.ismodule(getattr(ng, name))]
    public = {name: getattr(ng, name) for name in ng.__all__} | {
        name: getattr(room, name) for room in rooms for name in getattr(room, "__all__", ())
    }
    for name, function in public.items():
        if inspect.isfunction(function):
            own = inspect.unwrap(function)
            gives = own.__globals__.get(own.__annotations__.get("return"))
            measures = own.__module__.split(".")[1] in ("measure", "symmetry", "surgery", "nn", "optim")
            gives_result = inspect.isclass(gives) and issubclass(gives, Result)
            assert not (measures and gives_result) or name in INSTRUMENTS, name
    ours = {name for name, function in INSTRUMENTS.items() if function.__module__.startswith("normgauge.")}
    tests = {path.stem.removeprefix("test_"): path for path in Path(__file__).parent.rglob("test_*.py")}
    for name in ours - set(TINY):
        assert name in tests and "check_result(" in tests[name].read_text(), f"{name}: no test holds its Result"
    assert set(TINY) <= ours


@pytest.mark.parametrize("name", TINY)
def test_every_instrument_keeps_the_contract(name):
    result = TINY[name]()
    check_result(result)
    assert result.cost.gradients_worth > 0 and len(result.frame())
    if any(r.kind in ("estimate", "unbiased") and r.uncertainty is not None for r in result.readings()):
        assert name in (Path(__file__).parent / TWINS[name]).read_text(), "no dense twin holds the error it states"
    assert result.chart().to_dict()["config"]["axis"]["labelOverlap"] == "greedy", "not in the theme"
    assert "<svg" in result._repr_html_()


BAD = {
    "a loss that is not finite anywhere near": lambda: ng.landscape(
        objective(loss=lambda o, t: F.cross_entropy(o, t) if o.abs().max() < 20 else o.sum() * math.inf), steps=[1e6]
    ),
    "an eigenvalue that does not converge": lambda: ng.spectrum(objective(), top=3, tol=1e-9, max_products=4),
    "a trace that does not converge": lambda: ng.trace(objective(), relative_error=1e-9, probes=3),
    "a loss that is linear": lambda: ng.spectrum(objective(loss=lambda o, t: o.sum() * 0 + 1.0 * o[0, 0] * 0), top=1),
    "no classes": lambda: ng.margins(objective("eval", lambda o, t: o.square().mean(), (draws(6, 3), draws(6, 2)))),
    "no normalizer": lambda: ng.drift(nn.Sequential(nn.Linear(3, 2)), [batch()]),
    "no scale to move": lambda: ng.weight_dynamics(
        ng.Objective(nn.Sequential(nn.Linear(3, 2)), F.cross_entropy, batch(), mode="eval")
    ),
    "no affine layers": lambda: ng.signal_propagation(
        ng.Objective(nn.Sequential(nn.Linear(3, 2)), F.cross_entropy, batch(), mode="eval")
    ),
    "a batch of two": lambda: ng.nn.layer_geometry(draws(3, 4), draws(2, 4, seed=1)),
    "too few evaluations": lambda: ng.gradient_flow(objective("eval"), 1e3, max_gradients=12),
    "no symmetry": lambda: ng.symmetries(
        ng.Objective(nn.Linear(3, 2), F.mse_loss, (draws(40, 3), draws(40, 2)), mode="eval")
    ),
    "noise without a finite loss": lambda: ng.flatness(
        objective(loss=lambda o, t: F.cross_entropy(o, t) + math.inf), samples=1, sharpness=[]
    ),
    "no edge of stability": lambda: ng.stable_rate(
        ng.Objective.from_step(nn.Linear(2, 1), lambda m, _: (m.weight**2).sum().tanh(), torch.ones(1), mode="eval"),
        iterations=4,
    ),
    "an exact norm": lambda: ng.operator_norm(nn.BatchNorm1d(3).eval()),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.filterwarnings("ignore::normgauge.errors.NormgaugeWarning")
def test_trouble_is_a_result_that_keeps_the_contract(case):
    check_result(BAD[case]())


def test_names_from_outside_are_escaped():
    model = nn.Sequential()
    model.add_module("<script>alert(1)</script>", nn.Linear(3, 2))
    found = ng.activations(ng.Objective(model, F.cross_entropy, batch(), mode="eval"))
    assert "<script" not in found._repr_html_() and "&lt;script" in found._repr_html_()


def test_a_page_without_the_extra_has_no_picture(monkeypatch):
    found = TINY["spectrum"]()
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    assert "<svg" not in found._repr_html_() and "<table" in found._repr_html_()


# -- cost ---------------------------------------------------------------------------------------------------------


def test_calls_of_an_objective_are_counted_in_passes_over_its_data():
    o = objective()
    with counting() as cost:
        o.loss(), o.outputs(), o.terms()
        assert cost() == Cost(forwards=3)
        o.gradient(), o.at(o.flatten(o.parameters)).loss_and_gradient()
        assert cost() == Cost(3, 2)
        with o.hessian() as hessian:
            hessian @ torch.ones(o.dimension)
            hessian @ torch.ones(o.dimension)
        assert cost() == Cost(3, 3, 2)  # the graph is a gradient
        o.replace(mode="eval").loss()
        assert cost() == Cost(4, 3, 2)


def test_counts_nest_and_end():
    with counting() as outer:
        with counting() as inner:
            spend("forwards", 2)
        spend("products", 0.5)
    spend("products")
    assert inner() == Cost(2) and outer() == Cost(2, 0, 0.5)
    assert Cost(3, 1, 1).gradients_worth == pytest.approx(1 + 1 + 2.2)
    assert str(Cost()) == "cost none" and "(1 gradient, 2 products)" in str(Cost(0, 1, 2))


def test_parts_of_the_data_are_parts_of_a_pass():
    o = objective()
    with counting() as cost:
        number, first = next(iter(o.batches()))
        o.evaluate(number, lambda model: o.loss_of(model, number, first))
    assert cost().forwards == pytest.approx(12 / 20)


def test_documented_costs_are_the_counted_ones():
    o = objective()
    assert ng.landscape(o, steps=[0.1, 0.2], random=2).cost == Cost(0, 2 * 3 + 1)
    assert ng.loss_surface(o, points=3).cost == Cost(9 + 1)
    assert ng.signal_propagation(o).cost == Cost(0, 1)
    assert ng.drift(net(), [batch()]).cost == Cost(3)
    found = ng.spectrum(o, top=1)
    assert found.cost == Cost(0, 1, found.matvecs)


# -- the check itself -----------------------------------------------------------------------------------------------


def test_an_instrument_is_told_mode_seed_and_cost():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Sum(Result):
        value: float

        def _rows(self):
            return [{"value": self.value}]

        def readings(self):
            return (Reading("value", self.value),)

        def _meaning(self):
            return f"The sum is {self.value:g}, which is not above the limit of 9."

    @instrument
    def the_sum(objective, *, seed=3):
        return Sum(float(objective.loss()))

    found = the_sum(objective())
    check_result(found)
    assert (found.mode, found.seed, found.cost, INSTRUMENTS["the_sum"]) == ("train", 3, Cost(1), the_sum)
    for change, rule in (
        ({"value": math.nan}, "not a number is not ok"),
        ({"status": "diverged"}, "says why"),
        ({"mode": "both"}, "mode"),
    ):
        with pytest.raises(NonconformingError, match=rule):
            check_result(Sum(**{"value": 1.0, **change}))
    with pytest.raises(NonconformingError, match="there is a reading"):
        check_result(Result())


def plain_net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


REALS = torch.zeros(6, 3)
LACKING = {
    "no stored statistics": lambda: ng.drift(plain_net(), [torch.randn(6, 4)]),
    "no classes": lambda: ng.margins(ng.Objective(plain_net(), F.mse_loss, (torch.randn(6, 4), REALS), mode="eval")),
    "no accuracy": lambda: ng.flatness(
        ng.Objective(plain_net(), F.mse_loss, (torch.randn(6, 4), REALS), mode="eval"), sigmas=(0.1,), samples=1
    ),
    "no scale-invariant block": lambda: ng.weight_dynamics(objective_of(plain_net())),
    "one probe": lambda: ng.density(objective_of(plain_net()), probes=1),
}


def objective_of(model):
    return ng.Objective(model, F.cross_entropy, (torch.randn(6, 4), torch.arange(6) % 3), mode="train")


@pytest.mark.parametrize("case", LACKING)
def test_what_a_model_has_not_is_said_and_no_table_of_holes_is_printed(case):
    result = LACKING[case]()
    told, shown = str(result), result._repr_html_()
    assert "nan" not in told and ">nan<" not in shown
    assert result.meaning() and all(len(set(line.split())) > 1 or "-" not in line.split() for line in told.splitlines())
    if result.status == "skipped":
        assert "───" not in told and "<table>" not in shown and result.sentence in told


MODEL = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
OBJECTIVE = ng.Objective(MODEL, F.mse_loss, (torch.randn(8, 3), torch.randn(8, 2)), mode="train")


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (lambda: ng.spectrum(MODEL), r"spectrum: the first argument is an ng.Objective. Got Sequential. Make one"),
        (lambda: ng.symmetries(objective=3), r"symmetries: the first argument is an ng.Objective. Got int"),
        (lambda: ng.drift(OBJECTIVE, []), r"drift: model is a torch.nn.Module. Got Objective. Pass objective.model"),
        (lambda: ng.operator_norm(torch.eye(2)), r"operator_norm: layer is a torch.nn.Module. Got Tensor"),
        (lambda: ng.flatness(OBJECTIVE, radius=math.nan), r"flatness: radius must be a number. Got nan"),
        (lambda: ng.spectrum(OBJECTIVE, max_products=0), r"max_products is at least 1. Got 0"),
    ],
)
def test_every_instrument_checks_what_it_is_about(measure, message):
    with pytest.raises(InputError, match=message):
        measure()


def test_missing_arguments_name_the_instrument():
    with pytest.raises(TypeError, match=r"spectrum\(\): missing a required argument: 'objective'"):
        ng.spectrum()


@pytest.mark.parametrize("switch", [torch.no_grad, torch.inference_mode])
def test_measurements_differentiate_also_where_the_caller_does_not(switch):
    expected, slope = ng.spectrum(OBJECTIVE, top=1).top, OBJECTIVE.gradient()["0.weight"]
    with switch():
        assert ng.spectrum(OBJECTIVE, top=1).top == expected
        assert torch.equal(OBJECTIVE.gradient()["0.weight"], slope)
