"""What two processes compute with SyncedBatchNorm; run by torch.multiprocessing."""

import torch
from torch import distributed as dist

from normgauge.nn import SyncedBatchNorm


def loss_of(y, probe):
    return (y * probe).sum() + (y.square() * probe.cos()).sum()


def worker(rank, rendezvous, cuts, x, probe, out):
    """Forward, backward and a second derivative on this process's samples, for each way to cut the batch in two."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        for cut in cuts:
            part = slice(0, cut) if rank == 0 else slice(cut, len(x))
            torch.save(step(x[part], probe[part]), f"{out}{cut}-{rank}")
    finally:
        dist.destroy_process_group()


def step(x, probe):
    layer = SyncedBatchNorm(x.shape[1])
    with torch.no_grad():
        layer.weight.copy_(torch.arange(1.0, x.shape[1] + 1))
    inputs = x.clone().requires_grad_()
    y = layer(inputs)
    gradients = torch.autograd.grad(loss_of(y, probe), [inputs, layer.weight, layer.bias], create_graph=True)
    (second,) = torch.autograd.grad((gradients[0] * probe.sin()).sum(), inputs)
    return {
        "y": y.detach(),
        "gradients": [value.detach() for value in gradients],
        "second": second,
        "state": layer.state_dict(),
    }
