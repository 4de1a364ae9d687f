"""A few random 32x32 images with ten labels: stands in for CIFAR-10 where only the code path matters."""

import torch


def images():
    """Return training, validation and test pairs."""
    source = torch.Generator().manual_seed(0)

    def draw(count):
        inputs = torch.randn(count, 3, 32, 32, generator=source, dtype=torch.float32)
        return inputs, torch.arange(count) % 10

    return draw(160), draw(40), draw(40)
