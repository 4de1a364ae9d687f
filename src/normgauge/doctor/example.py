"""A sick model for `normgauge doctor --example`: a small network with five faults that people bring."""

import torch
from torch import Tensor, nn

from normgauge.rng import preserved_rng, seed_everything


def sick_model() -> tuple[nn.Module, tuple[Tensor, Tensor], torch.optim.Optimizer]:
    """Return a network, a batch and an optimizer, with five faults."""
    with preserved_rng():
        seed_everything(0)
        net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16, momentum=0.99), nn.ReLU(), nn.BatchNorm2d(16),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 16), nn.GroupNorm(16, 16), nn.Linear(16, 4),
        )  # fmt: skip
        x, y = torch.randn(32, 3, 8, 8) + 1, torch.randint(0, 4, (32,))
        for _ in range(5):
            net(x)
    net[0:2].requires_grad_(False)
    net[6].get_buffer("running_var")[3] = float("nan")
    plain = [p for n, p in net.named_parameters() if n.endswith("bias")]
    decayed = [p for n, p in net.named_parameters() if n.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    return net, (x, y), torch.optim.AdamW(groups, lr=1e-3)
