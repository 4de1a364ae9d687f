"""Gradient descent in normalized parametrization, with a record of every quantity in its bounds; one hidden layer."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normgauge.errors import InputError
from normgauge.optim._gdnp_problems import LOSSES, GaussianHalfspace, LeastSquares, Problem, _samples, _second_moment
from normgauge.records import Chart, Reading, Status
from normgauge.results import Result, instrument, spend
from normgauge.rng import generator
from normgauge.theory.gdnp import largest_coefficient

_ROUNDING = 1e-12  # relative, of the quadrature
ALIGNED = 0.99  # |cos|: within 8 degrees of the line
CONVERGED = 1e-6  # of the first gradient: half the digits of float64, where losses no longer tell points apart


@dataclass(frozen=True)
class GDNPRecord:
    """One iteration: where it is, and both sides of the bounds.

    Attributes:
        iteration: from 0.
        loss: f.
        rho: `-(u^T w)^2 / (w^T S w)`, the Rayleigh quotient of the direction.
        rho_gap: `rho - rho*`.
        rho_bound: `(1 - mu / L)^(2 t) (rho_0 - rho*)`.
        length: gamma.
        length_slope: the derivative of f by gamma.
        length_bound: `(zeta / mu) 2^-T |b - a|`, a bound on its size (zeta a smoothness constant of f); 0 for least
            squares, whose length is known in closed form.
        stopping: h.
        step: s, nan at the last iteration.
        gradient_norm: `|grad f|` in the norm of `S^-1`.
        gradient_bound: root of `Phi^2 rho_bound + length_bound^2`, Phi a bound on `|c1|` known before the run
            (`theory.gdnp.largest_coefficient`; 2 for least squares); nan where the analysis does not cover the problem.
    """

    iteration: int
    loss: float
    rho: float
    rho_gap: float
    rho_bound: float
    length: float
    length_slope: float
    length_bound: float
    stopping: float
    step: float
    gradient_norm: float
    gradient_bound: float


@dataclass(frozen=True)
class GDNPRun(Result):
    """A run of `gdnp`.

    Attributes:
        weights: the solution, `gamma w / |w|_S`.
        direction: w.
        length: gamma.
        records: one per iteration.
        condition: `L / mu` of S.
        bounds_apply: whether the analysis covers the problem (least squares, Gaussian data).
        halvings: times a step was halved because it did not descend (never where the bounds apply).
    """

    weights: Tensor
    direction: Tensor
    length: float
    records: tuple[GDNPRecord, ...]
    condition: float
    bounds_apply: bool
    halvings: int

    @property
    def loss(self) -> float:
        """The final loss."""
        return self.records[-1].loss

    def _title(self) -> str:
        return f"GDNP: loss {self.loss:.6g} after {len(self.records) - 1} steps, condition {self.condition:.3g}"

    def _rows(self) -> list[dict[str, Any]]:
        return [vars(record).copy() for record in self.records]

    def readings(self) -> tuple[Reading, ...]:
        """Return loss, gradient norm and gap of the Rayleigh quotient at the end, and the bound on the gap."""
        last = self.records[-1]
        return (
            Reading("loss", self.loss),
            Reading("gradient norm", last.gradient_norm),
            Reading("gap of the Rayleigh quotient", last.rho_gap),
            Reading("bound on the gap", last.rho_bound, "upper" if self.bounds_apply else "estimate"),
        )

    def _meaning(self) -> str:
        first, last = self.records[0].gradient_norm, self.records[-1].gradient_norm
        way = f"In {len(self.records) - 1} steps the gradient went from {first:.3g} to {last:.3g}"
        end = f"a critical point, loss {self.loss:.4g}"
        if last > CONVERGED * max(first, 1.0):
            end = f"allow more steps; condition {self.condition:.3g} sets the pace"
        return f"{way} (limit {CONVERGED:g} of the start): {end}."

    def _notes(self) -> str:
        bounds = "bounds apply" if self.bounds_apply else "bounds do not apply (samples that need not be Gaussian)"
        return f"{bounds}; {self.halvings} halvings"

    def chart(self) -> Chart:
        """Return the gap of the Rayleigh quotient and the gradient norm with their bounds, on a log scale."""
        from normgauge.charts import curves

        names = ("rho_gap", "rho_bound", "gradient_norm", "gradient_bound")
        drawn = ((record, name) for record in self.records for name in names if getattr(record, name) > 0)
        rows = [{"iteration": r.iteration, "quantity": name, "value": getattr(r, name)} for r, name in drawn]
        return curves(rows, x="iteration", series="quantity", y_scale="log", title="what GDNP drives to zero")


@instrument
def gdnp(
    problem: Problem,
    *,
    iterations: int = 50,
    bisections: int = 50,
    start: Tensor | None = None,
    smoothness: float | None = None,
    tol: float = 1e-14,
    seed: int = 0,
) -> GDNPRun:
    """Minimize `f(gamma w / |w|_S)`: an adaptive gradient step for the direction w, bisection for the length gamma.

    With `c1 = E[phi'] - E[phi''] u^T wt`, `wt = gamma w / |w|_S` and `h = c1 u^T w`, the step is
    `s = -|w|_S^3 / (L gamma h)` and `w' = w - s grad_w f`; then gamma is a root of the derivative of f by gamma. Where
    the gradient of f is `c1 u + c2 S wt` (least squares; Gaussian z) this is gradient descent on the Rayleigh quotient
    `rho = -(u^T w)^2 / (w^T S w)`, and `rho - rho* <= (1 - mu / L)^(2 t) (rho_0 - rho*)`, mu and L the extreme
    eigenvalues of S.

    Args:
        problem: from `least_squares`, `halfspace` or `gaussian_halfspace`.
        iterations: at most.
        bisections: T, of the length at each step.
        start: the first direction; random when `None`. Must not be orthogonal to u.
        smoothness: zeta, a Lipschitz constant of the gradient of f, for `length_bound`; by default `sup|phi''| L`.
        tol: stop when `|h|` is below it.
        seed: of a random start.

    Deviations: from S3 as printed. The least-squares objective is `2 gamma u^T w / |w|_S + gamma^2`, not a quotient
        with `+ gamma^2` below the line. The stopping function has `u^T wt` in its second term, not `u^T w` (else the
        step is not the one of the Rayleigh quotient). Bisection gives `|slope| <= (zeta / mu) 2^-T |b - a|`, so its
        square falls as `4^-T`, not `2^-T`. The final bound holds in the norm of `S^-1`. The printed Rayleigh rate has
        the exponent 2t for a single step and eigenvalues of B alone (it would be zero for `B = u u^T`); proved here is
        `sin(a') <= (1 - mu / L) sin(a)` for the angle a to the solution in the S metric. Gradient descent on least
        squares has the same rate, not a sublinear one. On samples a step that does not descend is halved.

    Examples:
        Least squares ends at the normal equations:

        >>> x = torch.randn(50, 3, generator=generator(0), dtype=torch.float64)
        >>> y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        >>> from normgauge.optim import least_squares
        >>> run = gdnp(least_squares(x, y), iterations=60)
        >>> [round(value, 4) for value in run.weights.tolist()]
        [1.0, -2.0, 0.5]

    References: kohler2019, batchnorm_article
    """
    u, S = problem.u, problem.S
    spectrum = torch.linalg.eigvalsh(S)
    mu, L = float(spectrum[0]), float(spectrum[-1])
    w = torch.randn(len(u), generator=generator(seed), dtype=u.dtype) if start is None else start.to(u).clone()
    if float(w @ w) == 0 or abs(float(u @ w)) <= 1e-14 * float(u.norm() * w.norm()):
        rule = "the first direction must not be zero or orthogonal to u: there the Rayleigh quotient is critical"
        raise InputError("gdnp", rule, f"u^T w = {float(u @ w):.3g}", "Pass another start, for example -u")
    if smoothness is not None and not 0 < smoothness < math.inf:
        step = "Leave it out for sup|phi''| L"
        raise InputError("gdnp", "smoothness is a positive number", repr(smoothness), step)
    zeta = smoothness or L * (2 if isinstance(problem, LeastSquares) else LOSSES[problem.loss][2])
    best = -float(u @ torch.linalg.solve(S, u))
    rho0, shrink, limit = _rayleigh(w, u, S), 1 - mu / L, _coefficient_limit(problem, best)
    records: list[GDNPRecord] = []
    status: Status = "ok"
    sentence, halvings = "", 0
    gamma, bracket, has_minimum = _length(problem, w, S, bisections)
    for number in range(iterations + 1):
        if not has_minimum:
            status = "nonconverged"
            sentence = "the loss has no finite minimum along a direction (separable data, or a bounded loss?)"
        norm = math.sqrt(float(w @ S @ w))
        weights = gamma / norm * w
        means = problem.means(weights)
        c1 = means.first - means.second * float(u @ weights)
        h = c1 * float(u @ w)
        slope = float(means.gradient @ w) / norm
        full = math.sqrt(max(float(means.gradient @ torch.linalg.solve(S, means.gradient)), 0.0))
        rho, bound = _rayleigh(w, u, S), shrink ** (2 * number) * (rho0 - best)
        error = zeta / mu * 2.0**-bisections * bracket
        last = number == iterations or abs(h) <= tol or abs(gamma) <= tol or not has_minimum
        stride = math.nan if last else -(norm**3) / (L * gamma * h)
        total = math.sqrt(limit**2 * bound + error**2)
        values = {"loss": means.loss, "rho": rho, "rho_gap": rho - best, "rho_bound": bound, "length": gamma}
        values |= {"length_slope": slope, "length_bound": error, "stopping": h, "step": stride}
        records.append(GDNPRecord(iteration=number, **values, gradient_norm=full, gradient_bound=total))
        if last:
            limit_here = CONVERGED * max(records[0].gradient_norm, 1.0)
            if has_minimum and number < iterations and not full <= limit_here:
                status = "nonconverged"
                sentence = f"the direction no longer moves (h or the length is 0) at a gradient of {full:.3g}"
            break
        slope_w = gamma / norm * (means.gradient - S @ w * (float(w @ means.gradient) / norm**2))
        for _ in range(40):
            moved = w - stride * slope_w
            moved = moved / moved.norm()
            gamma, bracket, has_minimum = _length(problem, moved, S, bisections)
            after = problem.means(gamma / math.sqrt(float(moved @ S @ moved)) * moved).loss
            if problem.gaussian or after <= means.loss + 1e-15:
                break
            stride, halvings = stride / 2, halvings + 1
        w = moved
    return GDNPRun(
        weights=gamma / math.sqrt(float(w @ S @ w)) * w,
        direction=w,
        length=gamma,
        records=tuple(records),
        condition=L / mu,
        status=status,
        sentence=sentence,
        bounds_apply=problem.gaussian,
        halvings=halvings,
    )


def _rayleigh(w: Tensor, u: Tensor, S: Tensor) -> float:
    return -(float(u @ w) ** 2) / float(w @ S @ w)


def _length(problem: Problem, w: Tensor, S: Tensor, bisections: int) -> tuple[float, float, bool]:
    """Return gamma, the width of the first bracket, and whether there was one."""
    unit = w / math.sqrt(float(w @ S @ w))
    if isinstance(problem, LeastSquares):
        return -float(problem.u @ unit), 0.0, True  # the optimum in closed form

    def slope(gamma: float) -> tuple[float, float]:
        """Return the derivative by gamma and its rounding: |phi''| is at most 2 phi' for all losses here."""
        means = problem.means(gamma * unit)
        return float(means.gradient @ unit), _ROUNDING * means.first * (1 + 2 * abs(gamma))

    side = -math.copysign(1.0, slope(0.0)[0])
    inner, outer = 0.0, side
    while slope(outer)[0] * side <= slope(outer)[1]:  # what is left of a slope that dies out is no root
        inner, outer = outer, 2 * outer
        if abs(outer) > 1e6:
            return inner, abs(outer - inner), False
    width = abs(outer - inner)
    for _ in range(bisections):
        middle = (inner + outer) / 2
        inner, outer = (middle, outer) if slope(middle)[0] * side < 0 else (inner, middle)
    return (inner + outer) / 2, width, True


def _coefficient_limit(problem: Problem, best: float) -> float:
    if isinstance(problem, LeastSquares):
        return 2.0  # c1 itself
    if isinstance(problem, GaussianHalfspace):
        return float(largest_coefficient(LOSSES[problem.loss][1], torch.tensor(best, dtype=torch.float64)))
    return math.nan


@dataclass(frozen=True)
class GDNPNetworkRun(Result):
    """A run of `gdnp_network`.

    Attributes:
        weights: hidden weights, one row per unit.
        output: the output weights, as given.
        losses: after each sweep over the units, the first before any.
        gradient_norms: `|gradient by a unit's weights|` in the norm of `S^-1`, the largest over units, per sweep.
        evaluations: of the loss and its gradient, from the start to each sweep; the searches of steps are counted too.
        alignments: per sweep, the smallest `|cos|` (S metric) of a unit with `S^-1 u`, S3's line of critical points.
    """

    weights: Tensor
    output: Tensor
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    alignments: tuple[float, ...]
    evaluations: tuple[int, ...]

    def _title(self) -> str:
        return f"GDNP on {len(self.output)} tanh units: loss {self.losses[-1]:.6g} after {len(self.losses) - 1} sweeps"

    def _rows(self) -> list[dict[str, Any]]:
        names = ("loss", "gradient_norm", "alignment", "evaluations")
        columns = zip(self.losses, self.gradient_norms, self.alignments, self.evaluations, strict=True)
        return [{"sweep": i, **dict(zip(names, values, strict=True))} for i, values in enumerate(columns)]

    def readings(self) -> tuple[Reading, ...]:
        """Return loss, largest gradient norm and smallest alignment at the end."""
        ends = {"loss": self.losses, "gradient norm": self.gradient_norms, "alignment": self.alignments}
        return tuple(Reading(name, values[-1]) for name, values in ends.items())

    def _meaning(self) -> str:
        said = f"{len(self.losses) - 1} sweeps took the loss from {self.losses[0]:.4g} to {self.losses[-1]:.4g}; "
        if self.alignments[-1] >= ALIGNED:
            return f"{said}every unit lies along S^-1 u (|cos| at least {ALIGNED:g}), as for Gaussian data."
        off = f"a unit is off the line S^-1 u (|cos| {self.alignments[-1]:.3g}, under {ALIGNED:g})"
        return f"{said}{off}: what holds for Gaussian data does not hold here."

    def _notes(self) -> str:
        return "samples, so no rate is promised"

    def chart(self) -> Chart:
        """Return loss, gradient norm and alignment over the sweeps, side by side."""
        from normgauge.charts import panels

        ys = {"loss": "loss", "gradient_norm": "largest gradient norm", "alignment": "smallest |cos| with S^-1 u"}
        return panels(self._rows(), x="sweep", ys=ys)


@instrument
def gdnp_network(
    x: Tensor,
    y: Tensor,
    *,
    output: Tensor,
    start: Tensor | None = None,
    sweeps: int = 20,
    iterations: int = 1,
    seed: int = 0,
) -> GDNPNetworkRun:
    """Train the hidden weights of `F(x) = sum_i theta_i tanh(x^T w_i)` for `mean(softplus(-y F))`, unit by unit.

    The other units and the output weights stay fixed while one unit's direction takes a step against the S-tangent part
    of its gradient, of length 1 / L in the S metric and halved until the loss falls, and its length is searched.

    Args:
        x: samples `[n, d]`, centred.
        y: labels -1 and 1.
        output: theta, one weight per unit; not trained.
        start: first hidden weights `[units, d]`; random when `None`.
        sweeps: over all units.
        iterations: of the direction per unit and sweep.
        seed: of a random start.

    Deviations: S3 takes the stopping criterion and step size of the halfspace; with other units present the gradient
        of a unit is not `c1 u + c2 S w` for one common u on samples, so the step is chosen by descent. That all
        critical units lie on the line of `S^-1 u` is a statement about Gaussian data; `alignments` shows how far it
        holds.

    References: kohler2019, batchnorm_article
    """
    x, y = _samples(x, y, "gdnp_network")
    theta, S = output.to(x), _second_moment(x)
    units, d = len(theta), x.shape[1]
    W = torch.randn(units, d, generator=generator(seed), dtype=x.dtype) if start is None else start.to(x).clone()
    if W.shape != (units, d):
        raise InputError("gdnp_network", f"start is [{units}, {d}]", str(tuple(W.shape)), "One row per output weight")
    inverse, L = torch.linalg.inv(S), float(torch.linalg.eigvalsh(S)[-1])
    target, count = inverse @ (-(y @ x) / len(x)), 0

    def loss_and_slopes(hidden: Tensor) -> tuple[float, Tensor]:
        nonlocal count
        count += 1
        spend("gradients")
        t = torch.tanh(x @ hidden.T)
        margin = y * (t @ theta)
        weight = -y * torch.sigmoid(-margin) / len(x)
        slopes = (weight[:, None] * (1 - t * t) * theta).T @ x
        return float(torch.nn.functional.softplus(-margin).mean()), slopes

    def state(hidden: Tensor) -> tuple[float, float, float, int]:
        value, slopes = loss_and_slopes(hidden)
        sizes = ((slopes @ inverse) * slopes).sum(1).clamp_min(0).sqrt()
        lengths = ((hidden @ S) * hidden).sum(1).sqrt() * math.sqrt(float(target @ S @ target))
        cosines = (hidden @ S @ target).abs() / lengths
        return value, float(sizes.max()), float(cosines.min()), count

    history = [state(W)]
    for _ in range(sweeps):
        for unit in range(units):
            for _ in range(iterations):
                _improve(W, unit, S, L, loss_and_slopes)
        history.append(state(W))
    losses, norms, cosines, counts = zip(*history, strict=True)
    return GDNPNetworkRun(W, theta, losses, norms, cosines, counts)


def _improve(W: Tensor, unit: int, S: Tensor, L: float, loss_and_slopes: Any) -> None:
    """Turn one unit, then stretch it; every accepted change lowers the loss."""
    value, slopes = loss_and_slopes(W)
    w, g = W[unit].clone(), slopes[unit]
    length2 = float(w @ S @ w)
    across = g - S @ w * (float(w @ g) / length2)
    size = math.sqrt(max(float(across @ across), 0.0))
    step = math.sqrt(length2 / L) / size if size > 0 else 0.0
    for _ in range(40):
        turned = w - step * across
        W[unit] = turned * math.sqrt(length2 / float(turned @ S @ turned))
        after = loss_and_slopes(W)[0]
        if after <= value:
            value = after
            break
        W[unit] = w
        step /= 2
    factor, base = 2.0, W[unit].clone()

    def loss_at(row: Tensor) -> float:
        W[unit] = row
        return float(loss_and_slopes(W)[0])

    for _ in range(40):
        best = min((loss_at(base * f), f) for f in (factor, 1 / factor))
        if best[0] < value:
            value, base = best[0], base * best[1]
        else:
            factor = math.sqrt(factor)
            if factor < 1 + 1e-9:
                break
    W[unit] = base
