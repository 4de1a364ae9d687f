"""`canonicalize`: of all parameters with the same function, the one that is the same for all of them."""

import math
from typing import Any, Unpack

import torch
from torch import nn

from normgauge.network import KeepDouble, first_tensor
from normgauge.objective import Mode, Objective
from normgauge.results import instrument
from normgauge.surgery._operate import Options, Patient, operate
from normgauge.surgery._surgery import Surgery
from normgauge.symmetry import symmetries


@instrument
def canonicalize(
    model: nn.Module, *, example: Any, mode: Mode = "eval", seed: int = 0, **options: Unpack[Options]
) -> Surgery:
    """Move the parameters to the canonical point of their orbit under the certified scale, shift and rescale symmetry.

    Writers of a generator get norm one and its readers the rest, free shifts are centred (`Symmetries.canonical`): two
    models that differ by these symmetries become one. Permutations of units and changes of basis are not divided out;
    the note counts them. Families that hold without eps alone are divided out too: `proof` leaves eps out, and a row of
    its own says what eps does. `mode` is that in which the function stays: with train, BatchNorm's own symmetries
    count, so recalibrate afterwards.

    Kind: exact in `mode`. Cost: that of `ng.symmetries`, and nine forward passes.

    Examples:
        >>> torch.manual_seed(0) and None
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> rows = canonicalize(net, example=torch.randn(20, 2)).model[0]
        >>> torch.cat([rows.weight, rows.bias[:, None]], 1).norm(dim=1).detach().round(decimals=4)
        tensor([1., 1., 1.])
    """

    def edit(patient: Patient) -> str:
        def outputs(twin: nn.Module, inputs: Any) -> Any:
            with KeepDouble():
                return patient.forward(twin, inputs)

        def size(made: Any, _: Any) -> torch.Tensor:
            tensor = first_tensor(made)
            assert tensor is not None
            return tensor.square().mean()

        first = first_tensor(patient.inputs)
        samples = torch.zeros(1 if first is None else len(first))
        with torch.enable_grad():
            objective = Objective(patient.model, size, (patient.inputs, samples), mode=mode, forward=outputs)
            table = symmetries(objective, seed=seed)
        new = table.canonical()
        for name, value in patient.model.named_parameters():
            if name in new and not torch.equal(new[name], value):
                moved = float((new[name] - value).norm() / value.norm().clamp_min(1e-300))
                value.data.copy_(new[name])
                patient.did(name, f"moved by {moved:.3g} of its norm")
        widths = [family.size for family in table.families if family.kind == "rescale"]
        orders = sum(math.lgamma(width + 1) for width in widths) / math.log(10)
        return (
            f"{table.dimension} directions divided out (gauge {table.gauge}); not divided out: orders of units "
            f"(about 10^{orders:.0f} of {len(widths)} layers) and {table.matrix_dimension} changes of basis"
        )

    return operate("canonicalize", model, example, edit, modes=(mode,), eps_apart=True, **options)
