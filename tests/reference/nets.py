"""Small networks, one per way a second derivative can go wrong; each factory gives (model, loss, batches)."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


def images(size=6, classes=3, seed=0, channels=2):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, channels, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (size,), generator=generator)


def rows(size=7, width=4, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, width, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (size,), generator=generator)


def real(size=7, width=4, outputs=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, n, generator=generator, dtype=torch.float64) for n in (width, outputs))


def jittered(model):
    """Move every parameter off its special starting value and the running statistics off 0 and 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.3 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64))
            elif name.endswith("running_var"):
                buffer.add_(torch.rand(buffer.shape, generator=generator, dtype=torch.float64))
    return model


def mlp(norm):
    return nn.Sequential(nn.Linear(4, 5), norm, nn.Tanh(), nn.Linear(5, 3))


def conv(norm):
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), norm, nn.Softplus(), nn.Flatten(), nn.Linear(64, 3))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x.view(len(x), -1, 4)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.core = kind(2, 3, batch_first=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.core(x.view(len(x), -1, 2))[0][:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.outside = nn.Linear(4, 4)
        self.outside.weight = self.inside.weight

    def forward(self, x):
        return self.outside(torch.tanh(self.norm(self.inside(x))))[:, :3]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(2), nn.BatchNorm2d(2)])
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        inner = torch.nn.functional.softplus(self.norms[0](self.first(x)))
        return self.head((x + self.norms[1](self.second(inner))).flatten(1))


NETS = {
    "batch norm 1d": lambda: (mlp(nn.BatchNorm1d(5)), cross_entropy, [rows()]),
    "batch norm 2d": lambda: (conv(nn.BatchNorm2d(4)), cross_entropy, [images()]),
    "batch norm without affine": lambda: (mlp(nn.BatchNorm1d(5, affine=False)), cross_entropy, [rows()]),
    "layer norm": lambda: (mlp(nn.LayerNorm(5)), cross_entropy, [rows()]),
    "group norm": lambda: (conv(nn.GroupNorm(2, 4)), cross_entropy, [images()]),
    "instance norm": lambda: (conv(nn.InstanceNorm2d(4, affine=True)), cross_entropy, [images()]),
    "rms norm": lambda: (mlp(nn.RMSNorm(5)), cross_entropy, [rows()]),
    "weight norm": lambda: (
        nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
        cross_entropy,
        [rows()],
    ),
    "spectral norm": lambda: (
        nn.Sequential(spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)).eval(),
        cross_entropy,
        [rows()],
    ),
    "no norm, squares": lambda: (
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)),
        mse_loss,
        [real()],
    ),
    "attention": lambda: (Attention(), cross_entropy, [rows(5, 12)]),
    "lstm": lambda: (Recurrent(nn.LSTM), cross_entropy, [rows(5, 6)]),
    "gru": lambda: (Recurrent(nn.GRU), cross_entropy, [rows(5, 6)]),
    "tied weights": lambda: (Tied(), cross_entropy, [rows()]),
    "residual": lambda: (Residual(), cross_entropy, [images(5)]),
    "several batches": lambda: (mlp(nn.BatchNorm1d(5)), cross_entropy, [rows(7), rows(4, seed=1), rows(5, seed=2)]),
}


def net(name):
    """Return a fresh (model, loss, batches), jittered, in float64."""
    torch.manual_seed(0)
    model, loss, batches = NETS[name]()
    return jittered(model.double()), loss, batches
