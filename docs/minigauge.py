"""minigauge: the whole idea of normgauge in one file that needs torch alone.

A normalizer makes directions of the weights that the loss cannot see. Find them, measure what is left, mind the one
learning rate that follows from them, train where the weights really live, compare over seeds, and check what papers
say by computing it. Run it: python docs/minigauge.py
"""

import copy
import math

import torch
from torch import nn
from torch.func import functional_call

# --- 1. Model, loss and data as one pure function of the parameters ---------------------------------------------------


class Objective:
    """The loss of a copy of the model on one batch, in float64, as a function of the parameters and nothing else."""

    def __init__(self, model, loss, batch, mode):
        """Take what is measured; `mode` has no default: BatchNorm's loss is another function in train and in eval."""
        self.model = copy.deepcopy(model).double().train(mode == "train")  # the user's model is never touched
        self.loss_of, (inputs, self.targets) = loss, batch
        self.inputs = inputs.double() if inputs.is_floating_point() else inputs
        self.parameters = {name: value.detach() for name, value in self.model.named_parameters()}

    def __call__(self, parameters):
        """Return the loss at these parameters; running statistics are cloned, so nothing is written back."""
        state = {name: value.clone() for name, value in self.model.named_buffers()}
        return self.loss_of(functional_call(self.model, {**state, **parameters}, (self.inputs,)), self.targets)

    def gradient(self, parameters=None):
        """Return the gradient by name."""
        leaves = {name: value.clone().requires_grad_() for name, value in (parameters or self.parameters).items()}
        return dict(zip(leaves, torch.autograd.grad(self(leaves), list(leaves.values())), strict=True))

    def hessian_times(self, direction):
        """Return the Hessian times a vector by two backward passes: `torch.func.hessian` is wrong through BatchNorm."""
        leaves = {name: value.clone().requires_grad_() for name, value in self.parameters.items()}
        first = flatten(torch.autograd.grad(self(leaves), list(leaves.values()), create_graph=True))
        return flatten(torch.autograd.grad(first @ direction, list(leaves.values()), allow_unused=True))


def flatten(tensors):
    """Return tensors as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


# --- 2. Which rows of the weights can be rescaled without any change? -------------------------------------------------


def invariant_rows(objective, factor=2.0, tolerance=1e-4):
    """Return, by parameter, which rows may be multiplied by a factor; Euler's identity is the second witness.

    If `L(c w) = L(w)` for all c > 0 then `<w, grad L(w)> = 0`: the gradient is tangent to the sphere through w.
    BatchNorm's eps lets a little through, hence the tolerance.
    """
    here, slopes, found = objective(objective.parameters), objective.gradient(), {}
    for name, weight in objective.parameters.items():
        if weight.dim() < 2:
            continue
        found[name] = torch.zeros(len(weight), dtype=torch.bool)
        for row in range(len(weight)):
            scaled = weight.clone()
            scaled[row] *= factor
            change = objective({**objective.parameters, name: scaled}) - here
            radial = (weight[row] * slopes[name][row]).sum() / (weight[row].norm() * slopes[name].norm() + 1e-300)
            found[name][row] = abs(change) < tolerance * abs(here) and abs(radial) < tolerance
    return found


def rescale(objective, rows, factor):
    """Return the objective at the same function: these rows multiplied by a factor."""
    other = copy.copy(objective)
    other.parameters = {name: value.clone() for name, value in objective.parameters.items()}
    for name, chosen in rows.items():
        other.parameters[name][chosen] *= factor
    return other


# --- 3. How curved is the loss, with and without the invisible directions? --------------------------------------------


def top_eigenvalue(times, size, steps=60, seed=0):
    """Return the largest eigenvalue of a symmetric operator and its true residual `|A v - t v|`, by Lanczos."""
    start = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    basis, images = [start / start.norm()], []
    for _ in range(min(steps, size)):
        images.append(times(basis[-1]))
        rest, Q = images[-1], torch.stack(basis, 1)
        for _ in range(2):  # orthogonal twice is orthogonal
            rest = rest - Q @ (Q.T @ rest)
        if rest.norm() < 1e-10 * images[-1].norm():
            break
        basis.append(rest / rest.norm())
    Q = torch.stack(basis[: len(images)], 1)
    values, vectors = torch.linalg.eigh(Q.T @ torch.stack(images, 1))
    vector = Q @ vectors[:, -1]
    return values[-1].item(), (times(vector) - values[-1] * vector).norm().item()


def on_unit_spheres(objective, rows):
    """Return the Hessian in the coordinates that matter, `w / |w|` for invariant rows: `D P H P D`, D their lengths.

    P takes out the rays. Rescaling changes the Hessian, by `1 / factor^2`; it does not change this operator.
    """
    lengths = {name: torch.ones_like(value) for name, value in objective.parameters.items()}
    rays = {name: torch.zeros_like(value) for name, value in objective.parameters.items()}
    for name, chosen in rows.items():
        norms = objective.parameters[name].norm(dim=1, keepdim=True)
        lengths[name] = torch.where(chosen[:, None], norms, 1.0).expand_as(lengths[name])
        rays[name][chosen] = (objective.parameters[name] / norms)[chosen]
    shapes = {name: value.shape for name, value in rays.items()}
    D, ray = flatten(lengths.values()), flatten(rays.values())

    def visible(vector):
        pieces = (ray * vector).split([shape.numel() for shape in shapes.values()])
        sums = [
            piece.view(shape).sum(1, keepdim=True).expand(shape).reshape(-1)
            if len(shape) > 1
            else torch.zeros_like(piece)
            for piece, shape in zip(pieces, shapes.values(), strict=True)
        ]
        return vector - ray * torch.cat(sums)

    return lambda vector: D * visible(objective.hessian_times(visible(D * vector)))


# --- 4. What training does to a length nobody sees --------------------------------------------------------------------


def after_sgd_step(squared_norm, squared_gradient, rate, decay=0.0):
    """Return `|w|^2` after a step of SGD: exact, because the gradient stands at a right angle to w."""
    return (1 - rate * decay) ** 2 * squared_norm + rate**2 * squared_gradient


def effective_rate(rate, norm):
    """Return `rate / |w|^2`, the rate at which the direction of w is trained, whatever the optimizer was told."""
    return rate / norm**2


def equilibrium_norm(rate, decay, G):
    """Return where decay and growth balance, `|w|^4 = rate G / (decay (2 - rate decay))`; G: mean of `|w|^2 |g|^2`."""
    return (rate * G / (decay * (2 - rate * decay))) ** 0.25


@torch.no_grad()
def sphere_step(weight, gradient, rate):
    """Do a step of SGD on spheres, one per row: tangent part, step, back to the radius."""
    radius = weight.norm(dim=1, keepdim=True)
    tangent = gradient - weight * (weight * gradient).sum(1, keepdim=True) / radius**2
    moved = weight - rate * tangent
    weight.copy_(moved * radius / moved.norm(dim=1, keepdim=True))


# --- 5. Which normalizer? Differences over seeds, with an interval ----------------------------------------------------

NORMS = {"none": lambda n: nn.Identity(), "batch": lambda n: nn.BatchNorm1d(n, eps=1e-9), "layer": nn.LayerNorm}


def network(norm, seed, width=32, depth=3):
    """Return an MLP with a normalizer behind every hidden layer; equal seeds give equal weights."""
    torch.manual_seed(seed)
    parts = []
    for k in range(depth):
        parts += [nn.Linear(16 if k == 0 else width, width), NORMS[norm](width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 4))


def problem(seed, samples=512):
    """Return inputs and labels that a random network gave them."""
    generator = torch.Generator().manual_seed(1000 + seed)
    inputs = torch.randn(samples, 16, generator=generator)
    teacher = torch.randn(16, 4, generator=generator) / 4
    return inputs, (inputs @ teacher + 0.5 * inputs.square() @ teacher).argmax(1)


def held_out_accuracy(norm, rate, seed, steps=150):
    """Train and return the accuracy on samples never trained on."""
    (inputs, labels), model = problem(seed), network(norm, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(steps):
        chosen = torch.arange(step * 32, step * 32 + 32) % 384
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
    return (model.eval()(inputs[384:]).argmax(1) == labels[384:]).double().mean().item()


def compare(first, second, rate, seeds=6, quantile=2.571):
    """Return the mean difference of two normalizers and the half width of its 95 % interval, paired over seeds."""
    gaps = torch.tensor([held_out_accuracy(first, rate, s) - held_out_accuracy(second, rate, s) for s in range(seeds)])
    return gaps.mean().item(), quantile * gaps.std().item() / math.sqrt(seeds)  # quantile of Student's t for 6 seeds


# --- 6. Is it true what the paper prints? -----------------------------------------------------------------------------


def judge_theorem(instances=200):
    """Judge Santurkar et al. 2018, Theorem 4.1, on random batches: the largest violation as printed, and corrected.

    Printed: `|grad_y|^2 <= (gamma / s)^2 (|g|^2 - <1, g>^2 / m - <g, yh>^2 / sqrt(m))`. With `1 / m` in the last term
    it is true, and an equality.
    """
    printed = corrected = 0.0
    for seed in range(instances):
        torch.manual_seed(seed)
        y, g = torch.randn(2, 8, dtype=torch.float64)
        y.requires_grad_()
        s = y.var(correction=0).sqrt()
        yh = (y - y.mean()) / s
        (gradient,) = torch.autograd.grad((g * yh).sum(), y)
        left = gradient.square().sum().item()
        parts = [g.square().sum() - g.sum() ** 2 / 8 - (g @ yh) ** 2 / root for root in (math.sqrt(8), 8)]
        right = [(part / s**2).item() for part in parts]
        printed, corrected = max(printed, left - right[0]), max(corrected, abs(left - right[1]))
    return printed, corrected


def main():
    """Measure one network, and print what came out."""
    model, (inputs, labels) = network("batch", 0), problem(0)
    objective = Objective(model, nn.functional.cross_entropy, (inputs, labels), mode="train")
    rows = invariant_rows(objective)
    print(f"rows that can be rescaled: { {name: int(chosen.sum()) for name, chosen in rows.items()} }")
    size = sum(value.numel() for value in objective.parameters.values())
    for factor in (1.0, 0.1):
        same = rescale(objective, rows, factor)
        flat, _ = top_eigenvalue(same.hessian_times, size)
        round_, _ = top_eigenvalue(on_unit_spheres(same, rows), size)
        print(
            f"rows x {factor:g}: loss {same(same.parameters):.4f}, curvature {flat:.4g}, on unit spheres {round_:.4g}"
        )
    row, slope = objective.parameters["0.weight"][0], objective.gradient()["0.weight"][0]
    grown = after_sgd_step(row.square().sum(), slope.square().sum(), rate=0.5)
    print(f"|w|^2 after a step {(row - 0.5 * slope).square().sum():.10f}, by the law {grown:.10f}")
    print(f"effective rate {effective_rate(0.5, row.norm()):.3g} at rate 0.5")
    for norm in ("batch", "layer"):
        gap, half_width = compare(norm, "none", rate=0.1)
        print(f"{norm} against none: {gap:+.3f} -+ {half_width:.3f} test accuracy")
    printed, corrected = judge_theorem()
    print(f"Theorem 4.1 as printed is violated by {printed:.3g}; corrected, it is an equality to {corrected:.1g}")


if __name__ == "__main__":
    main()
