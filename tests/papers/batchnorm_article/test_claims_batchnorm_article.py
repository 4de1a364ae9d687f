"""S3's claims: their verdicts over seeds; judges with an ingredient broken notice it; the experiments' criteria."""

import pytest
import torch

from mutation import judged, promoted, settled, swapped
from normgauge.papers.batchnorm_article.claims import halfspaces, layer, least_squares, networks
from normgauge.papers.court import ledger
from normgauge.papers.instances import gaussian
from normgauge.papers.santurkar2018.claims import activations as santurkar2018_activations
from normgauge.papers.santurkar2018.claims import weights as santurkar2018_weights
from normgauge.theory import batchnorm_calculus as calculus
from normgauge.theory import gdnp, gradient_explosion, rayleigh, smoothness

VERDICTS = {
    "S3-bp": "holds",
    "S3-inf": "holds",
    "S3-T41": "holds",
    "S3-T42": "holds",
    "S3-shift": "false_as_stated",
    "S3-T44": "holds_with_correction",
    "S3-L45": "holds_with_correction",
    "S3-fBN": "holds",
    "S3-lam": "holds_with_correction",
    "S3-lamlin": "holds_with_correction",
    "S3-OLS1": "holds_with_correction",
    "S3-OLS2": "holds",
    "S3-OLS3": "holds",
    "S3-sublin": "false_as_stated",
    "S3-Ray": "holds_with_correction",
    "S3-Stein": "holds",
    "S3-crit": "holds_with_correction",
    "S3-GDNP": "holds_with_correction",
    "S3-bis": "holds_with_correction",
    "S3-dir": "holds_with_correction",
    "S3-final": "holds_with_correction",
    "S3-NN": "false_as_stated",
    "S3-rate": "false_as_stated",
}
EXPERIMENTS = ["S3-ICS", "S3-lamfull", "S3-train", "S3-GDNP-data", "S3-dropout", "S3-init"]
EXPERIMENTS += ["S3-spectrum", "S3-depth"]


@pytest.mark.parametrize("id", VERDICTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_verdict_over_seeds(id, seed):
    found = settled(id, seed)
    assert (found.verdict, found.status) == (VERDICTS[id], "judged"), found.sentence


def test_every_claim_of_the_paper_is_here():
    assert {claim.id for claim in ledger(paper="S3")} == {*VERDICTS, *EXPERIMENTS}


@pytest.mark.parametrize("id", [id for id, word in VERDICTS.items() if word != "holds"])
def test_exchanging_printed_and_corrected_changes_the_verdict(id):
    assert swapped(id) == "error"  # the printed statement, offered as the correction, fails
    assert promoted(id) == "holds"  # the corrected statement, had it been printed


def uncentred(y, eps=0.0):
    s = (y.square().mean(-1, keepdim=True) + eps).sqrt()
    return y / s, s.squeeze(-1)


def forget_the_projection(y, g, gamma=1.0):
    return (gamma / calculus.standardize(y)[1]) ** 2 * (g @ g)


def forget_the_metric(w, u, S, L):
    return rayleigh.direction_step(w, u, torch.eye(len(u)), L)


def opposite(slope, bend, u, wt):
    return slope + bend * (u @ wt), bend


def as_printed(slope, bend, u, w, gamma, S):
    return slope * (u @ w) - bend * (u @ w) ** 2


@pytest.mark.parametrize(
    ("id", "module", "name", "mutant"),
    [
        ("S3-bp", layer, "standardize", uncentred),
        ("S3-inf", layer, "product", lambda items, repeat: [(i,) * repeat for i in items]),  # a batch of one, repeated
        ("S3-T41", layer, "gradient_norm_squared", forget_the_projection),
        (
            "S3-T44",
            santurkar2018_weights,
            "worst_weight_gradient",
            lambda y, g, gamma, radius: radius * smoothness.worst_weight_gradient(y, g, gamma, 1.0),
        ),
        ("S3-L45", layer, "nearest_rescaling", lambda start, best: (-(start @ best), 0.0)),
        ("S3-fBN", layer, "standardize", lambda y, eps=0.0: calculus.standardize(y, 0.5)),
        ("S3-lam", layer, "relu_rate", lambda batch: gradient_explosion.relu_rate(batch) ** 0.5),
        ("S3-lamlin", layer, "linear_rate", lambda batch: (batch - 1) / (batch - 4)),
        ("S3-lamlin", layer, "linear_rate", lambda batch: (batch - 1) / (batch - 2)),  # near enough for networks
        ("S3-lamlin", layer, "_evenness", lambda generator, phi: 1.0),  # the cube would be as stable as the others
        ("S3-lamlin", layer, "large_batch_rate", lambda values, slopes, weights: 1.2),
        ("S3-shift", layer, "_shift_growth", lambda generator, phi, deviation, normalized: 1.2),
        ("S3-shift", layer, "standardize", lambda y, eps=0.0: (0.5 * y, y.norm())),
        ("S3-T42", santurkar2018_activations, "curvature_along_gradient", lambda y, g, H, gamma: g @ H @ g + 1),
        (
            "S3-OLS1",
            least_squares,
            "decoupled_least_squares",
            lambda w, gamma, u, S: 2 * gamma * (u @ w) / ((w @ S @ w).sqrt() + gamma**2),
        ),
        ("S3-OLS2", least_squares, "best_length", lambda w, u, S: -rayleigh.best_length(w, u, S)),
        ("S3-OLS3", least_squares, "direction_step", forget_the_metric),
        ("S3-Ray", least_squares, "ascent_factor", lambda values, conditioning=1.0: rayleigh.ascent_factor(values)),
        ("S3-Stein", halfspaces, "stein_coefficients", opposite),
        ("S3-crit", halfspaces, "misalignment", lambda a, b: gaussian.misalignment(a, torch.stack([-b[1], b[0]]))),
        ("S3-GDNP", halfspaces, "direction_weight", as_printed),
        (
            "S3-bis",
            halfspaces,
            "bisection_bound",
            lambda halvings, smoothness, width, mu: 2.0**-halvings * smoothness * width / mu**2,
        ),
        ("S3-dir", halfspaces, "largest_coefficient", lambda steepest, least: steepest + 0 * least),
        ("S3-final", halfspaces, "direction_step", lambda w, u, S, L: w),
        ("S3-NN", networks, "misalignment", lambda a, b: 0.0),
        ("S3-rate", networks, "direction_step", lambda w, u, S, L: w),
    ],
)
def test_a_broken_ingredient_changes_the_verdict(monkeypatch, id, module, name, mutant):
    monkeypatch.setattr(module, name, mutant)
    assert judged(id) != VERDICTS[id]


def test_plain_descent_with_a_vanishing_step_is_no_longer_linear(monkeypatch):
    monkeypatch.setattr(least_squares, "_descent_errors", lambda *_: 1 / torch.arange(1.0, 20))
    assert judged("S3-sublin") == "error"  # the correction fails: such a method is sub-linear


def test_the_squared_rate_would_be_the_norms_if_networks_were_measured_by_their_squares(monkeypatch):
    growth = layer._measured_growth
    monkeypatch.setattr(layer, "_measured_growth", lambda *arguments: growth(*arguments) ** 2)
    assert judged("S3-lam") == "error"  # then the printed rate holds and the corrected one does not


def test_the_closed_form_of_the_explosion_agrees_with_random_directions():
    generator = torch.Generator().manual_seed(0)
    for batch in (5, 9):
        u = torch.randn(40000, batch, generator=generator)
        u = u - u.mean(1, keepdim=True)
        u = u / u.norm(dim=1, keepdim=True)
        y, active = batch**0.5 * u, (u > 0).double()
        second = y.relu().T @ y.relu() / len(u)
        q = second.diag().mean()
        p = (second.sum() - second.diag().sum()) / (batch * (batch - 1))
        G = torch.eye(batch) - 1 / batch
        Q = G - u[:, :, None] * u[:, None, :]
        t = (active[:, :, None] * G * active[:, None, :] * Q).sum((1, 2)).mean()
        rate = batch * t / ((q - p) * (batch - 1) * (batch - 3))
        assert rate == pytest.approx(gradient_explosion.relu_rate(batch), rel=0.02)


def test_the_loss_exhibited_against_the_line_is_what_its_note_says():
    phi = halfspaces._twisted_loss()
    s = torch.linspace(-30, 30, 401)
    slope = torch.func.grad(lambda v: phi(v).sum())(s)
    assert slope.abs().max() < 8  # a bounded derivative
    nodes, weights = gaussian.gaussian_grid(1)
    task = gaussian.GaussianLoss(torch.zeros(1), torch.ones(1, 1), phi)
    first, second = task.mean_slopes(torch.ones(1))
    assert first.abs() < 1e-12
    assert second.abs() < 1e-12
    assert weights.sum() == pytest.approx(1)
    assert len(nodes) == len(weights)


def test_the_bound_on_the_coefficient_holds_for_steep_losses():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        A = torch.randn(2, 2, generator=generator)
        u = 2 * torch.randn(2, generator=generator)
        shift = torch.randn((), generator=generator)
        task = gaussian.GaussianLoss(u, A @ A.T + 0.1 * torch.eye(2), lambda s, c=shift: -halfspaces._log_cosh(s - c))
        wt = torch.randn(2, generator=generator)
        c1 = gdnp.stein_coefficients(*task.mean_slopes(wt), u, wt)[0]
        assert c1.abs() <= gdnp.largest_coefficient(1.0, task.least_quotient) + 1e-9


def rows_for(id, good):
    """Rows in which the readings are those the claim hopes for, or, reversed, those it fears."""
    rows = []
    for seed in range(4):
        jitter = 1 + 0.001 * seed
        if id == "S3-ICS":
            for model in ("vgg", "dln"):
                for norm in ("none", "batch"):
                    high = (norm == "none") == good
                    rows.append({"model": model, "norm": norm, "seed": seed, "cosine": (0.9 if high else 0.1) * jitter})
        elif id == "S3-lamfull":
            for size, growth in ((8, 2.5), (512, 1.46)) if good else ((8, 1.34), (512, 1.21)):
                row = {"part": "batch", "activation": "relu", "batch_size": size, "seed": seed}
                rows.append({**row, "norm_growth": growth * (jitter if size == 512 else jitter**2)})
                rows.append({**row, "activation": "tanh", "norm_growth": 1.0})  # not asked about
        elif id == "S3-train":
            for depth in (10, 100):
                for skip in (False, True):
                    dead = depth == 100 and not skip and good
                    row = {"part": "train", "depth": depth, "skip": skip, "seed": seed}
                    rows.append({**row, "train_accuracy": (0.1 if dead else 0.9) * jitter})
        elif id == "S3-GDNP-data":
            for method in ("gd", "gdnp"):
                slow = (method == "gd") == good
                row = {"data": "a9a", "condition": 10.0, "method": method, "seed": seed}
                rows.append({**row, "iterations": 1000 * jitter if slow else 10})
                rows.append({**row, "data": "gaussian", "iterations": 1})  # not asked about
        elif id == "S3-dropout":
            for norm in ("none", "batch"):
                for rate in (0.0, 0.5):
                    best = (norm == "batch" and rate == 0.0) == good
                    rows.append(
                        {"norm": norm, "dropout": rate, "seed": seed, "test_accuracy": (0.9 if best else 0.8) * jitter}
                    )
        else:
            for norm in ("none", "batch"):
                for init in ("he", "tiny"):
                    for lr in (0.01, 1.0):
                        wide = (norm == "none") == good
                        fallen = 0.3 * (init == "tiny") + 0.2 * (lr == 1.0) if wide else 0.0
                        value = (0.9 - fallen) * jitter
                        rows.append({"norm": norm, "init": init, "lr": lr, "seed": seed, "train_accuracy": value})
    return rows
