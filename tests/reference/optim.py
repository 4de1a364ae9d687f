"""Optimizers in the words of their definitions: one row at a time, float64, nothing shared with the package."""

import torch


def rows(tensor, granularity):
    count = {"row": tensor.shape[0], "tensor": 1}.get(granularity, granularity)
    return [part.reshape(-1) for part in tensor.reshape(count, -1)]


def tangent(w, v):
    return v - w * (w @ v) / (w @ w)


class Twin:
    """Keep rows and state of one tensor; `step(gradient)` moves them."""

    def __init__(self, tensor, granularity="row", radius=None, **options):
        self.shape, self.granularity, self.options = tensor.shape, granularity, options
        self.w = [row.clone() for row in rows(tensor, granularity)]
        self.r = [row.norm() if radius is None else torch.tensor(float(radius)) for row in self.w]
        self.w = [r * row / row.norm() for r, row in zip(self.r, self.w, strict=True)]
        self.state = [{} for _ in self.w]
        self.t = 0

    def step(self, gradient):
        self.t += 1
        for i, g in enumerate(rows(gradient, self.granularity)):
            self.w[i] = self.move(self.w[i], -g if self.options.get("maximize") else g, self.r[i], self.state[i])
        return self.value

    @property
    def value(self):
        return torch.stack(self.w).reshape(self.shape)


class SphereSGD(Twin):
    def momentum(self, w, g, state):
        mu, damp = self.options.get("momentum", 0), self.options.get("dampening", 0)
        h = tangent(w, g)
        if not mu:
            state["b"] = torch.zeros_like(h)
            return h
        state["b"] = mu * state["b"] + (1 - damp) * h if "b" in state else h
        return h + mu * state["b"] if self.options.get("nesterov") else state["b"]

    def move(self, w, g, r, state):
        d = self.momentum(w, g, state)
        w = w - self.options["lr"] * d
        w = r * w / w.norm()
        state["b"] = tangent(w, state["b"])
        return w


class GeodesicSGD(SphereSGD):
    def move(self, w, g, r, state):
        return self.geodesic(w, -self.options["lr"] * self.momentum(w, g, state), r, state, "b")

    @staticmethod
    def geodesic(w, v, r, state, carried):
        size = v.norm()
        if size == 0:
            return w
        u, a, z = v / size, size / r, state[carried]
        state[carried] = z - (u @ z) * (w / r * torch.sin(a) + u * (1 - torch.cos(a)))
        return w * torch.cos(a) + r * u * torch.sin(a)


def adam_moments(state, g, second, betas, t):
    state["m"] = betas[0] * state.get("m", torch.zeros_like(g)) + (1 - betas[0]) * g
    state["v"] = betas[1] * state.get("v", torch.zeros_like(second)) + (1 - betas[1]) * second
    return state["m"] / (1 - betas[0] ** t), state["v"] / (1 - betas[1] ** t)


class SphereAdam(Twin):
    def move(self, w, g, r, state):
        m, v = adam_moments(state, g, g * g, self.options.get("betas", (0.9, 0.999)), self.t)
        w = w - self.options["lr"] * m / (v.sqrt() + self.options.get("eps", 1e-8))
        return r * w / w.norm()


class GeodesicAdam(Twin):
    def move(self, w, g, r, state):
        h = tangent(w, g)
        m, v = adam_moments(state, h, h @ h, self.options.get("betas", (0.9, 0.999)), self.t)
        v = -self.options["lr"] * m / (v.sqrt() + self.options.get("eps", 1e-8))
        return GeodesicSGD.geodesic(w, v, r, state, "m")


class Projected(Twin):
    """AdamP's rule: project if every row's |cos(w, g)| is below delta / sqrt(width), else try the whole tensor."""

    def __init__(self, tensor, **options):
        super().__init__(tensor, options.pop("granularity", "row"), None, **options)
        self.w = [row.clone() for row in rows(tensor, self.granularity)]
        self.whole = {}

    def step(self, gradient):
        self.t += 1
        gradient = -gradient if self.options.get("maximize") else gradient
        w = self.value
        u = self.direction(gradient)
        decay = self.options["lr"] * self.options.get("weight_decay", 0)
        for view in [self.granularity, "tensor"]:
            pairs = list(zip(rows(w, view), rows(gradient, view), strict=True))
            cosines = torch.stack([(a @ b).abs() / (a.norm() * b.norm()) for a, b in pairs])
            known = self.options.get("geometry") == "sphere"
            if known or cosines.max() < self.options.get("delta", 0.1) / pairs[0][0].numel() ** 0.5:
                u = torch.stack([tangent(a, b) for a, b in zip(rows(w, view), rows(u, view), strict=True)])
                u = u.reshape(self.shape)
                decay *= self.options.get("wd_ratio", 0.1)
                break
        moved = w * (1 - decay) - self.options["lr"] * u
        self.w = [row.clone() for row in rows(moved, self.granularity)]
        return moved


class ProjectedSGD(Projected):
    def direction(self, g):
        mu = self.options.get("momentum", 0)
        if not mu:
            return g
        self.whole["b"] = mu * self.whole["b"] + (1 - self.options.get("dampening", 0)) * g if self.whole else g
        return g + mu * self.whole["b"] if self.options.get("nesterov") else self.whole["b"]


class ProjectedAdam(Projected):
    def direction(self, g):
        m, v = adam_moments(self.whole, g, g * g, self.options.get("betas", (0.9, 0.999)), self.t)
        return m / (v.sqrt() + self.options.get("eps", 1e-8))
