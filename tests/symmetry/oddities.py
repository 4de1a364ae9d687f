"""Networks outside the zoo's grammar, made to lead a search for symmetries astray: each may tempt it to a false one."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from symmetry.zoo import RMS, Subject

ODDITIES = {}  # name -> (shape of the inputs, modes, class)


def odd(shape, *modes):
    def enter(cls):
        ODDITIES[cls.__name__] = (shape, modes or ("eval",), cls)
        return cls

    return enter


def vector(*values):
    return nn.Parameter(torch.tensor(values))


@odd((48, 4))
class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b, self.c = (
            nn.Parameter(torch.randn(6, 4)),
            nn.Parameter(torch.zeros(6)),
            nn.Parameter(torch.zeros(4)),
        )

    def forward(self, x):
        return F.relu(x @ self.w.T + self.b) @ self.w + self.c


@odd((48, 4))
class SharedLayer(nn.Module):
    """One linear layer is used twice, between norms."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.relu(self.layer(self.norm(F.relu(self.layer(x))))))


@odd((48, 4), "train", "eval")
class Frozen(nn.Module):
    """The layer behind the norm does not train, so that its gain has nothing to move to."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second, self.third = (
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 5),
            nn.Linear(5, 3),
        )
        self.second.requires_grad_(False)
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.third(F.relu(self.second(F.relu(self.norm(self.first(x))))))


@odd((32, 5, 6))
class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.norms = nn.ModuleList([nn.LayerNorm(6), nn.LayerNorm(6)])
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6)
        self.size = nn.Parameter(0.1 * torch.ones(6))

    def forward(self, x):
        x = self.into(x)
        x = x + self.size * self.down(F.gelu(self.up(self.norms[0](x))))
        return self.head(self.norms[1](x + self.size * x))


@odd((24, 3, 5, 5), "train", "eval")
class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.squeeze, self.excite, self.head = nn.Linear(6, 3), nn.Linear(3, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))
        return self.head((x * gate[:, :, None, None]).mean((2, 3)))


@odd((48, 5))
class Experts(nn.Module):
    """Two of four experts, chosen and weighed by a router behind a norm."""

    def __init__(self, kept=2):
        super().__init__()
        self.norm, self.router, self.kept = nn.RMSNorm(5), nn.Linear(5, 4), kept
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 5) / 2), nn.Parameter(torch.randn(4, 3, 6) / 2)

    def forward(self, x):
        x = self.norm(x)
        best, which = self.router(x).topk(self.kept, dim=-1)
        every = torch.einsum("eoh,beh->beo", self.down, F.relu(torch.einsum("ehi,bi->beh", self.up, x)))
        return (best.softmax(-1)[..., None] * every.gather(1, which[..., None].expand(-1, -1, 3))).sum(1)


@odd((48, 5))
class OneExpert(Experts):
    """The weight of the only expert is one, so that its logits show in the choice alone."""

    def __init__(self):
        super().__init__(1)


@odd((48, 5))
class NormInGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.norm, self.down = nn.Linear(5, 6), nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.down(F.silu(self.norm(self.gate(x))) * self.norm(self.up(x)))


@odd((16, 2, 7, 7), "train", "eval")
class Dilated(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.norm = nn.Conv2d(2, 4, 3, dilation=2), nn.BatchNorm2d(4)
        self.back, self.head = nn.ConvTranspose2d(4, 3, 3, stride=2, groups=1), nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.head(F.leaky_relu(self.back(F.relu(self.norm(self.wide(x)))))).mean((2, 3))


@odd((16, 4, 6))
class GroupedTransposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.back = nn.Conv1d(4, 4, 3, groups=2), nn.ConvTranspose1d(4, 6, 3, groups=2)
        self.norm, self.head = nn.GroupNorm(3, 6), nn.Conv1d(6, 2, 1)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.back(F.relu(self.first(x)))))).flatten(1)


@odd((24, 4, 3))
class BothWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.norm, self.head = (
            nn.GRU(3, 3, bidirectional=True, batch_first=True),
            nn.LayerNorm(6),
            nn.Linear(6, 2),
        )

    def forward(self, x):
        return self.head(self.norm(self.cell(x)[0]))


@odd((24, 4, 5, 5))
class OneGroup(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b, self.m = nn.Conv2d(4, 6, 3), nn.GroupNorm(1, 6), nn.Conv2d(6, 4, 2), nn.GroupNorm(4, 4)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.m(self.b(F.relu(self.n(self.a(x))))).flatten(1))


@odd((48, 5))
class Detached(nn.Module):
    """Autograd does not see the length that the function is divided by: the gradient is not the function's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = F.relu(self.first(x))
        return self.second(x / (x.norm(dim=-1, keepdim=True).detach() + 1e-6))


@odd((48, 5))
class Unseen(nn.Module):
    """A scale that changes the outputs without any gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.second(x) * (1 + self.first.weight.detach().square().sum())


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return torch.round(4 * w) / 4

    @staticmethod
    def backward(ctx, slope):
        return slope


@odd((48, 5))
class Quantized(nn.Module):
    """Straight through: ReLU neighbours look free to rescale, but rounding sees it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        return F.relu(x @ Rounded.apply(self.first).T) @ Rounded.apply(self.second).T


class Clipped(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.first, self.second, self.act = nn.Linear(5, 6), nn.Linear(6, 3), act

    def forward(self, x):
        return self.second(self.act(self.first(x)))


@odd((48, 5))
class Hard(Clipped):
    """Linear in the middle, clipped far out."""

    def __init__(self):
        super().__init__(lambda x: F.hardtanh(x, -30.0, 30.0))


@odd((48, 5))
class Nearly(Clipped):
    """A ReLU up to one part in a million."""

    def __init__(self):
        super().__init__(lambda x: F.relu(x) + 1e-6 * torch.sin(x))


@odd((48, 5))
class FarAway(Clipped):
    """Homogeneous below 1000 only."""

    def __init__(self):
        super().__init__(lambda x: torch.where(x > 1000, 1000 + torch.log1p(F.relu(x - 1000)), F.relu(x)))


@odd((48, 5))
class Squared(Clipped):
    def __init__(self):
        super().__init__(lambda x: F.relu(x).square())


@odd((48, 5))
class Sines(Clipped):
    """Discrete symmetries (a bias moved by two pi) are none of the continuous ones."""

    def __init__(self):
        super().__init__(torch.sin)


@odd((48, 5))
class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(5, 6), nn.PReLU(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.act(self.first(x)))


@odd((48, 6))
class Maxout(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.first(x).view(-1, 6, 2).amax(-1))


@odd((48, 5))
class CosineHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.w, self.warm = (
            nn.Linear(5, 6),
            nn.Parameter(torch.randn(3, 6)),
            nn.Parameter(torch.tensor(2.0)),
        )

    def forward(self, x):
        return self.warm * F.normalize(F.relu(self.first(x)), dim=-1) @ F.normalize(self.w, dim=-1).T


@odd((48, 5))
class Modulated(nn.Module):
    """FiLM: gain and bias of a norm come from another part of the input."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 6), nn.LayerNorm(6, elementwise_affine=False)
        self.gain, self.bias, self.head = nn.Linear(2, 6), nn.Linear(2, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(F.relu(self.gain(x[:, 3:]) * self.norm(self.first(x[:, :3])) + self.bias(x[:, 3:])))


@odd((48, 5))
class Ratio(nn.Module):
    """Parameters seen as a quotient, a sum, a product and by their sign."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = vector(1.0, 2.0), vector(1.5, 0.5), vector(0.3, -0.7), vector(0.5, -1.0)
        self.first, self.second = nn.Linear(5, 2), nn.Linear(2, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x) * self.a / self.b + self.a + self.c) * self.d * self.d.sign())


@odd((48, 5))
class Hyper(nn.Module):
    """A small network writes the weights of the layer."""

    def __init__(self):
        super().__init__()
        self.code, self.writer, self.second = (
            nn.Parameter(torch.randn(3)),
            nn.Linear(3, 20, bias=False),
            nn.Linear(4, 3),
        )

    def forward(self, x):
        return self.second(F.relu(x @ self.writer(self.code).view(4, 5).T))


@odd((48, 5), "train", "eval")
class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(5, 6))
        self.norm, self.second = nn.BatchNorm1d(6), parametrizations.orthogonal(nn.Linear(6, 3))

    def forward(self, x):
        return self.second(F.relu(self.norm(self.first(x))))


@odd((24, 5, 6))
class TiedKeys(nn.Module):
    """Queries are the keys, with a learned temperature for each head."""

    def __init__(self):
        super().__init__()
        self.norm, self.key, self.value, self.out = RMS(6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.warm = nn.Parameter(torch.ones(2, 1, 1))

    def forward(self, x):
        x = self.norm(x)
        k, v = (f(x).view(len(x), -1, 2, 3).transpose(1, 2) for f in (self.key, self.value))
        y = (self.warm * (k @ k.transpose(-1, -2))).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


@odd((24, 5, 6))
class LinearAttention(nn.Module):
    """Normalized by a sum over positions of positive features."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        q, k, v = F.relu(self.q(x)) + 1e-3, F.relu(self.k(x)) + 1e-3, self.v(x)
        return self.out(q @ (k.transpose(1, 2) @ v) / (q @ k.sum(1, keepdim=True).transpose(1, 2)))


@odd((48, 4, 3))
class Pooled(nn.Module):
    """A set is read by its largest and its mean, and by a soft choice."""

    def __init__(self):
        super().__init__()
        self.first, self.score, self.head = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(12, 2)

    def forward(self, x):
        x = F.relu(self.first(x))
        soft = (self.score(x).softmax(1) * x).sum(1)
        return self.head(torch.cat([x.amax(1), x.mean(1), soft], -1))


@odd((48, 4), "train", "eval")
class TwoNorms(nn.Module):
    """A norm on a norm on a norm, and one affine shared by two branches."""

    def __init__(self):
        super().__init__()
        self.first, self.batch, self.layer, self.other = (
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.LayerNorm(6),
            nn.Linear(4, 6),
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(F.relu(self.layer(self.batch(self.first(x)))) + torch.tanh(self.layer(self.other(x))))


@odd((48, 4), "train", "eval")
class Momentum(nn.Module):
    """The running statistics of one norm are read by another part."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)

    def forward(self, x):
        y = self.first(x)
        return self.head(F.relu(self.norm(y)) + 0.1 * (y - self.norm.running_mean))


@odd((48, 6))
class Butterfly(nn.Module):
    """Weights that are products of sparse, permuted and Kronecker factors."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(n, n)) for n in (2, 3, 6))
        self.order, self.head = [3, 1, 5, 0, 4, 2], nn.Linear(6, 2)

    def forward(self, x):
        mask = torch.eye(6) + torch.eye(6).roll(1, 0)
        return self.head(F.relu(x @ torch.kron(self.a, self.b).T)[:, self.order] @ (self.c * mask))


@odd((24, 8))
class Complex(nn.Module):
    """Complex numbers by pairs: a phase turns between the layers, since only the length is bent."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(3, 4, 2)), nn.Parameter(torch.randn(2, 3, 2))

    def forward(self, x):
        a, b = torch.view_as_complex(self.first), torch.view_as_complex(self.second)
        z = torch.view_as_complex(x.view(-1, 4, 2)) @ a.T
        z = z * torch.tanh(z.abs())
        return torch.view_as_real(z @ b.T).flatten(1)


def subject(name, mode, size):
    """Build an oddity with matrices of this standard deviation (`None`: as torch draws them)."""
    shape, _, cls = ODDITIES[name]
    torch.manual_seed(0)
    model = cls()
    if size is not None:
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.ndim > 1 and "parametrizations" not in key:
                    parameter.copy_(size * torch.randn_like(parameter))
    return Subject(name, model, torch.randn(shape), mode, f"{name}, {mode}, {size}")
