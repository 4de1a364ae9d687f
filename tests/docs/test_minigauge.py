"""The idea in one file: short, runs, and finds what normgauge finds."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import normgauge as ng

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
import minigauge  # noqa: E402


@pytest.fixture(params=["batch", "layer", "none"])
def pair(request):
    torch.set_default_dtype(torch.float32)
    model, batch = minigauge.network(request.param, 0, width=6, depth=2), minigauge.problem(0, samples=40)
    mini = minigauge.Objective(model, nn.functional.cross_entropy, batch, mode="train")
    whole = ng.Objective(model.double(), nn.functional.cross_entropy, (batch[0].double(), batch[1]), mode="train")
    return request.param, mini, whole


def test_it_is_at_most_250_lines_and_needs_torch_alone():
    text = (DOCS / "minigauge.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    assert "normgauge import" not in text and "import normgauge" not in text


def test_loss_gradient_and_curvature_are_normgauges(pair):
    _, mini, whole = pair
    assert math.isclose(mini(mini.parameters), whole.loss(), rel_tol=1e-12)
    for name, slope in whole.gradient().items():
        torch.testing.assert_close(mini.gradient()[name], slope, rtol=1e-9, atol=1e-12)
    value, residual = minigauge.top_eigenvalue(mini.hessian_times, whole.dimension, steps=200)
    assert residual < 1e-8 and math.isclose(value, float(ng.spectrum(whole, top=1).top[0]), rel_tol=1e-6)


def test_the_curvature_on_unit_spheres_does_not_see_the_scale_of_rows(pair):
    _, mini, whole = pair
    rows = minigauge.invariant_rows(mini)
    tops = [
        minigauge.top_eigenvalue(
            minigauge.on_unit_spheres(minigauge.rescale(mini, rows, factor), rows), whole.dimension, steps=200
        )[0]
        for factor in (1.0, 0.1, 7.0)
    ]
    torch.testing.assert_close(torch.tensor(tops), torch.full((3,), tops[0]), rtol=1e-4, atol=0)


def test_rows_are_those_the_symmetries_name(pair):
    norm, mini, whole = pair
    rows = minigauge.invariant_rows(mini)
    spheres = [group for group in ng.param_groups(whole, geometry=True) if group.get("geometry") == "sphere"]
    inner = {name for name, chosen in rows.items() if chosen.any()}
    assert inner == ({"0.weight", "3.weight"} if norm == "batch" else set())
    assert sum(len(group["params"]) for group in spheres if group.get("granularity", "row") == "row") >= len(inner)
    assert all(bool(rows[name].all()) for name in inner)


def test_laws_are_those_of_the_theory_room():
    from normgauge.theory.norm_growth import after_sgd_step
    from normgauge.theory.weight_dynamics import sgd_effective_rate, sgd_equilibrium

    assert math.isclose(minigauge.after_sgd_step(3.0, 2.0, 0.5), after_sgd_step(3.0, 2.0, 0.5))
    assert math.isclose(minigauge.effective_rate(0.3, 1.7), sgd_effective_rate(0.3, 1.7))
    assert math.isclose(minigauge.equilibrium_norm(0.3, 0.02, 1.7), sgd_equilibrium(0.3, 0.02, 1.7).norm)
    weight, gradient = torch.randn(2, 3, 5).unbind()
    ours = nn.Parameter(weight.clone())
    ours.grad = gradient.clone()
    ng.optim.SphereSGD([ours], lr=0.4).step()
    minigauge.sphere_step(weight, gradient, 0.4)
    torch.testing.assert_close(weight, ours.detach())


def test_the_theorem_gets_the_verdict_of_the_ledger():
    printed, corrected = minigauge.judge_theorem(50)
    assert printed > 1e-3 and corrected < 1e-12
    (claim,) = ng.claims.ledger(ids=["S1-T4.1"]).judge()
    assert claim.result.word != "holds"


def test_the_page_prints_what_the_file_prints(capsys):
    torch.set_default_dtype(torch.float32)
    minigauge.main()
    page = (DOCS / "minigauge.md").read_text(encoding="utf-8")
    for line in capsys.readouterr().out.splitlines():
        assert line.partition("it is an equality to")[0].partition("none:")[0] in page, line
