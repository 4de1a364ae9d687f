"""One of two gloo processes training a small net on different data; writes weights and optimizer state."""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from normgauge import optim


def main(rank, store, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    saved = {}
    for name, options in (("SphereSGD", {"momentum": 0.9}), ("GeodesicAdam", {}), ("ProjectedAdam", {})):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 3)
        )
        model = DistributedDataParallel(net)
        optimizer = getattr(optim, name)(model.parameters(), lr=0.02, **options)
        source = torch.Generator().manual_seed(100 + rank)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 2, 5, 5, generator=source)).square().mean().backward()
            optimizer.step()
        for number, param in enumerate(net.parameters()):
            saved[f"{name}.{number}"] = param.detach()
            saved |= {
                f"{name}.{number}.{k}": v for k, v in optimizer.state[param].items() if isinstance(v, torch.Tensor)
            }
    torch.save(saved, f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
