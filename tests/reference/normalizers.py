"""Naive twins of the normalizers in training: one block at a time, from the definition, differentiable."""

import math

import torch

from normgauge.nn.noisy_batch import ActivationNoise, unit_noise


def by_blocks(x, blocks, normalize):
    """Apply `normalize` to the vector of entries of every block; a block is a boolean mask."""
    y = torch.zeros_like(x)
    for mask in blocks:
        y = y.masked_scatter(mask, normalize(x[mask]))
    return y


def channel_blocks(x):
    for channel in range(x.shape[1]):
        mask = torch.zeros(x.shape, dtype=torch.bool)
        mask[:, channel] = True
        yield mask


def sample_blocks(x, groups=1):
    size = x.shape[1] // groups
    for sample in range(x.shape[0]):
        for group in range(groups):
            mask = torch.zeros(x.shape, dtype=torch.bool)
            mask[sample, group * size : (group + 1) * size] = True
            yield mask


def dealt_blocks(x, ghosts):
    for ghost in range(ghosts):
        for channel in range(x.shape[1]):
            mask = torch.zeros(x.shape, dtype=torch.bool)
            mask[ghost::ghosts, channel] = True
            yield mask


def affine(module, y):
    shape = (1, -1, *(1,) * (y.dim() - 2))
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def mean(v):
    return sum(v.unbind()) / len(v)


def standard(eps):
    def normalize(v):
        centred = v - mean(v)
        return centred / torch.sqrt(mean(centred * centred) + eps)

    return normalize


def lp(p, eps):
    def normalize(v):
        if math.isinf(p):
            return (v - mean(v)) / (v.abs().max() + eps)
        return (v - mean(v)) / (mean(v.abs() ** p) + eps) ** (1 / p)

    return normalize


def none(module, x):
    return x * 1.0


def batch(module, x):
    return affine(module, by_blocks(x, channel_blocks(x), standard(module.eps)))


def layer(module, x):
    return affine(module, by_blocks(x, sample_blocks(x), standard(module.eps)))


def group(module, x):
    return affine(module, by_blocks(x, sample_blocks(x, module.num_groups), standard(module.eps)))


def instance(module, x):
    return affine(module, by_blocks(x, sample_blocks(x, x.shape[1]), standard(module.eps)))


def rms(module, x):
    return affine(module, by_blocks(x, sample_blocks(x), lambda v: v / torch.sqrt(mean(v * v) + module.eps)))


def rms_plus_one(module, x):
    normalized = by_blocks(x, sample_blocks(x), lambda v: v / torch.sqrt(mean(v * v) + module.eps))
    return (1 + module.weight) * normalized


def rms_eps_outside(module, x):
    return module.weight * by_blocks(x, sample_blocks(x), lambda v: v / (torch.sqrt(mean(v * v)) + module.eps))


def scale_norm(module, x):
    floor = torch.tensor(module.eps, dtype=x.dtype)
    return by_blocks(x, sample_blocks(x), lambda v: module.weight * v / torch.maximum(torch.sqrt((v * v).sum()), floor))


def unit_stream(module, x):
    return by_blocks(x, sample_blocks(x), lambda v: v / torch.sqrt((v * v).sum()))


def qk_head(module, x):
    heads = sample_blocks(x, module.num_groups)
    return module.weight.repeat(module.num_groups) * by_blocks(
        x, heads, lambda v: v / torch.sqrt(mean(v * v) + module.eps)
    )


def dyt(module, x):
    e = torch.exp(2 * module.alpha * x)
    return module.weight * (e - 1) / (e + 1) + module.bias


def derf(module, x):
    normal = torch.distributions.Normal(0.0, 1.0)
    cdf = normal.cdf((module.alpha * x + module.shift) * math.sqrt(2.0))
    return module.weight * (2 * cdf - 1) + module.bias


def lp_batch(module, x):
    return affine(module, by_blocks(x, channel_blocks(x), lp(module.p, module.eps)))


def batch_renorm(module, x):
    def normalize_channel(channel):
        stored_mean, stored_std = module.running_mean[channel], module.running_moment[channel]

        def normalize(v):
            centred = v - mean(v)
            std = torch.sqrt(mean(centred * centred) + module.eps)
            r = torch.clamp(std.detach() / stored_std, 1 / module.r_max, module.r_max)
            d = torch.clamp((mean(v).detach() - stored_mean) / stored_std, -module.d_max, module.d_max)
            return centred / std * r + d

        return normalize

    y = torch.zeros_like(x)
    for channel, mask in enumerate(channel_blocks(x)):
        y = y.masked_scatter(mask, normalize_channel(channel)(x[mask]))
    return affine(module, y)


def ghost_batch(module, x):
    ghosts = max(1, x.shape[0] // module.ghost_size)
    return affine(module, by_blocks(x, dealt_blocks(x, ghosts), standard(module.eps)))


def frozen_batch(module, x):
    shape = (1, -1, *(1,) * (x.dim() - 2))
    centred = x - module.running_mean.view(shape)
    return affine(module, centred / torch.sqrt(module.running_var.view(shape) + module.eps))


def noisy_batch(module, x):
    seed, step = int(module.seed), int(module.num_batches_tracked)
    mu, sigma = unit_noise(x.shape[1], seed, step)
    noise = ActivationNoise(x.shape, seed, step)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    offset = module.n_mu * mu.view(shape) + module.r_mu * noise.uniform(dtype=x.dtype)
    factor = 1 + (module.n_sigma - 1) * sigma.view(shape) + module.r_sigma * noise.normal(dtype=x.dtype)
    return factor * batch(module, x) + offset


def whitening(module, x):
    size = x.shape[1] // module.groups
    rows = x.transpose(0, 1).reshape(x.shape[1], -1)
    parts = []
    for group in range(module.groups):
        block = rows[group * size : (group + 1) * size]
        centred = block - block.mean(1, keepdim=True)
        covariance = centred @ centred.T / centred.shape[1] + module.eps * torch.eye(size)
        scaled, root = covariance / covariance.trace(), torch.eye(size)
        for _ in range(module.iterations):
            root = (3 * root - root @ root @ root @ scaled) / 2
        parts.append(root @ centred / torch.sqrt(covariance.trace()))
    y = torch.cat(parts).view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)
    return affine(module, y)


def stat(module, x):
    def normalize(v):
        ordered = v.sort().values
        count = len(v)
        low = ordered[math.floor(module.quantile * (count - 1) + 1e-9)]
        high = ordered[count - 1 - math.floor(module.quantile * (count - 1) + 1e-9)]
        middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
        center = {"mean": mean(v), "median": middle, "none": 0.0}[module.center]
        if module.scale == "std":
            scale = torch.sqrt(mean((v - mean(v)) ** 2) + module.eps)
        elif module.scale == "quantile":
            scale = (high - low) / 2 + module.eps
        elif module.scale == "linf":
            scale = v.abs().max() + module.eps
        else:
            p = 2.0 if module.scale == "rms" else float(module.scale[1:])
            scale = (mean(v.abs() ** p) + module.eps) ** (1 / p)
        return (v - center) / scale

    groups = {"layer": 1, "instance": x.shape[1], "group": module.groups}
    blocks = channel_blocks(x) if module.axes == "batch" else sample_blocks(x, groups[module.axes])
    return affine(module, by_blocks(x, blocks, normalize))


def linear(module, x, weight):
    """The wrapped layer's own map with the given weight."""
    if weight.dim() == 2:
        return x @ weight.T + module.bias
    convolve = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[weight.dim()]
    return convolve(x, weight, module.bias, padding=1)


def weight(module, x):
    gain, raw = module.parametrizations.weight.original0, module.parametrizations.weight.original1
    rows = [gain[i] * raw[i] / torch.sqrt((raw[i] * raw[i]).sum()) for i in range(len(raw))]
    return linear(module, x, torch.stack(rows))


def norm_propagation(module, x):
    gain, raw = module.parametrizations.weight[0].gain, module.parametrizations.weight.original
    rows = [gain[i] * raw[i] / torch.sqrt((raw[i] * raw[i]).sum()) for i in range(len(raw))]
    mean_of_rectified, variance = 1 / math.sqrt(2 * math.pi), 0.5 - 1 / (2 * math.pi)
    return linear(module, (x - mean_of_rectified) / math.sqrt(variance), torch.stack(rows))


TWINS = {
    "none": none,
    "batch": batch,
    "batch_renorm": batch_renorm,
    "frozen_batch": frozen_batch,
    "ghost_batch": ghost_batch,
    "group": group,
    "instance": instance,
    "layer": layer,
    "lp1_batch": lp_batch,
    "lp2_batch": lp_batch,
    "lpinf_batch": lp_batch,
    "noisy_batch": noisy_batch,
    "norm_propagation": norm_propagation,
    "rms": rms,
    "rms_plus_one": rms_plus_one,
    "rms_eps_outside": rms_eps_outside,
    "scale_norm": scale_norm,
    "unit_stream": unit_stream,
    "qk_head": qk_head,
    "qk_full": rms,
    "dyt": dyt,
    "derf": derf,
    "stat": stat,
    "weight": weight,
    "whitening": whitening,
}
