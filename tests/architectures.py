"""Small networks of every kind the symmetry search is tested on."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

EPS = 1e-14  # small enough for the Jacobian's null space to be numerically exact


class Standardized(nn.Module):
    """Weight standardization as a parametrization."""

    def forward(self, weight):
        flat = weight.flatten(1)
        flat = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, unbiased=False, keepdim=True) + EPS).sqrt()
        return flat.reshape(weight.shape)


def plain():
    leaky = nn.LeakyReLU(0.2)  # no unit dies: every parameter is observed
    return nn.Sequential(nn.Linear(5, 6), leaky, nn.Linear(6, 4), leaky, nn.Linear(4, 3))


def smooth():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def linear():
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 5))


def mlp(norm, width=6):
    return nn.Sequential(nn.Linear(5, width), norm(width), nn.ReLU(), nn.Linear(width, 3))


def batch_mlp(eps=EPS):
    return mlp(lambda d: nn.BatchNorm1d(d, eps=eps))


def layer_mlp(eps=EPS):
    return mlp(lambda d: nn.LayerNorm(d, eps=eps))


def group_mlp():
    return mlp(lambda d: nn.GroupNorm(2, d, eps=EPS), width=8)


def rms_mlp():
    return mlp(lambda d: nn.RMSNorm(d, eps=EPS))


class FunctionalNorm(nn.Module):
    """A home-made normalization no module name gives away."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(3, 6))
        self.gain = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x):
        h = x @ self.mix
        h = h / (h.abs().mean(0, keepdim=True) + 1e-15)
        return F.relu(h * self.gain) @ self.out.T


def weight_normed():
    wn = nn.utils.parametrizations.weight_norm
    return nn.Sequential(wn(nn.Linear(5, 6)), nn.ReLU(), wn(nn.Linear(6, 3)))


def standardized():
    net = plain()
    for layer in (net[0], net[2]):
        parametrize.register_parametrization(layer, "weight", Standardized())
    return net


def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)), nn.ReLU(), nn.Linear(6, 3))


def convolutional(norm):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        norm(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3),
        norm(5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 5),
    )


def conv_batch():
    return convolutional(lambda d: nn.BatchNorm2d(d, eps=EPS))


def conv_instance():
    return convolutional(lambda d: nn.InstanceNorm2d(d, eps=EPS, affine=True))


def grouped():
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.LeakyReLU(0.3),
        nn.Conv2d(4, 6, 1),
        nn.GroupNorm(3, 6, eps=EPS),
        nn.LeakyReLU(0.3),
        nn.Conv2d(6, 6, 3, groups=2),
        nn.LeakyReLU(0.3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )


def transposed():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 5, 3),
        nn.BatchNorm2d(5, eps=EPS),
        nn.ReLU(),
        nn.Conv2d(5, 2, 1),
    )


class Residual(nn.Module):
    def __init__(self, zero=False):
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, eps=EPS)
        self.c1, self.b1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, eps=EPS)
        self.c2, self.b2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, eps=EPS)
        self.c3, self.b3 = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, eps=EPS)
        self.down, self.bd = nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6, eps=EPS)
        self.fc = nn.Linear(6, 5)
        if zero:
            nn.init.zeros_(self.b2.weight)
            nn.init.zeros_(self.b3.weight)

    def forward(self, x):
        x = self.bn0(self.stem(x)).relu()
        x = (x + self.b2(self.c2(self.b1(self.c1(x)).relu()))).relu()
        x = (self.bd(self.down(x)) + self.b3(self.c3(x))).relu()
        return self.fc(x.mean((2, 3)))


class Concatenating(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.o = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(7, 4), nn.Linear(4, 3)

    def forward(self, x):
        act = nn.LeakyReLU(0.2)
        h = act(self.a(x))
        g = act(self.b(h))
        return self.o(act(self.c(torch.cat([h, g], 1))))


class Stream(nn.Module):
    """A pre-norm residual stream."""

    def __init__(self, norm, bias, width=6, depth=2):
        super().__init__()
        self.embed = nn.Linear(7, width, bias=False)
        self.norms = nn.ModuleList(norm(width) for _ in range(depth + 1))
        self.up = nn.ModuleList(nn.Linear(width, 8, bias=bias) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(8, width, bias=bias) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.embed(x)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=False):
            x = x + down(up(norm(x)).tanh())
        return self.head(self.norms[-1](x))


def rms_stream():
    return Stream(lambda d: nn.RMSNorm(d, eps=EPS), bias=False)


def layer_stream():
    return Stream(lambda d: nn.LayerNorm(d, eps=EPS), bias=True)


class Transformer(nn.Module):
    def __init__(self, post):
        super().__init__()
        d = 8
        self.post = post
        self.tok, self.pos = nn.Embedding(7, d), nn.Parameter(torch.randn(4, d))
        self.l1, self.l2, self.l3 = (nn.LayerNorm(d, eps=EPS) for _ in range(3))
        self.att = nn.MultiheadAttention(d, 2, batch_first=True)
        self.up, self.down, self.out = nn.Linear(d, 10), nn.Linear(10, d), nn.Linear(d, 5)

    def forward(self, x):
        x = self.tok(x) + self.pos
        if self.post:
            x = self.l1(x)
            x = self.l2(x + self.att(x, x, x, need_weights=False)[0])
            return self.out(self.l3(x + self.down(F.gelu(self.up(x)))))
        y = self.l1(x)
        x = x + self.att(y, y, y, need_weights=False)[0]
        x = x + self.down(F.gelu(self.up(self.l2(x))))
        return self.out(self.l3(x))


def images(count=80, channels=3, size=6):
    return [torch.randn(count, channels, size, size) for _ in range(2)]


def vectors(count=80, width=5):
    return [3 * torch.randn(count, width) for _ in range(2)]


def tokens(count=40, vocabulary=7, length=4):
    return [torch.randint(0, vocabulary, (count, length)) for _ in range(2)]


# name -> (factory, inputs); the search's dimension and the Jacobian's nullity agree on all of them
NETS = {
    "plain": (plain, vectors),
    "smooth": (smooth, vectors),
    "linear": (linear, lambda: vectors(width=6)),
    "batch": (batch_mlp, vectors),
    "layer": (layer_mlp, vectors),
    "group": (group_mlp, vectors),
    "rms": (rms_mlp, vectors),
    "functional": (FunctionalNorm, vectors),
    "weight_norm": (weight_normed, vectors),
    "weight_standardization": (standardized, vectors),
    "conv_batch": (conv_batch, images),
    "conv_instance": (conv_instance, images),
    "grouped": (grouped, lambda: images(channels=4)),
    "transposed": (transposed, lambda: images(count=12)),
    "residual": (Residual, lambda: images(count=90, size=5)),
    "residual_zero": (lambda: Residual(zero=True), lambda: images(count=90, size=5)),
    "concatenating": (Concatenating, vectors),
    "rms_stream": (rms_stream, lambda: vectors(width=7)),
    "layer_stream": (layer_stream, lambda: vectors(width=7)),
    "pre_norm_transformer": (lambda: Transformer(post=False), tokens),
    "post_norm_transformer": (lambda: Transformer(post=True), tokens),
}
