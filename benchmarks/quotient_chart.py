"""Draw docs/instruments/quotient.svg: what random rescalings do to the plain and to the quotient spectrum.

PYTHONPATH=src python benchmarks/quotient_chart.py
"""

from pathlib import Path

import torch
from torch import nn

import normgauge as ng
from normgauge.charts import curves, svg

OUT = Path(__file__).parent.parent / "docs" / "instruments" / "quotient.svg"


def network():
    """Return a BatchNorm-ReLU network: rows before the norms are free, gamma and beta coupled to the next layer."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, eps=1e-20), nn.ReLU(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def rescaled(parameters, seed):
    """Multiply free rows and coupled (gamma, beta) by random factors; the function stays the same."""
    draw = torch.Generator().manual_seed(seed)
    free, coupled = (torch.exp(1.5 * torch.randn(8, generator=draw, dtype=torch.float64)) for _ in range(2))
    return {
        "0.weight": parameters["0.weight"] * free[:, None],
        "1.weight": parameters["1.weight"] * coupled,
        "1.bias": parameters["1.bias"] * coupled,
        "3.weight": parameters["3.weight"] / coupled,
    }


def canonical(parameters):
    """Scale (gamma, beta) of every channel to norm one and push the factor into the next layer."""
    size = torch.stack([parameters["1.weight"], parameters["1.bias"]]).norm(dim=0)
    return {
        "1.weight": parameters["1.weight"] / size,
        "1.bias": parameters["1.bias"] / size,
        "3.weight": parameters["3.weight"] * size,
    }


def main():
    """Measure twelve points of one orbit and draw them."""
    model = network()
    data = (torch.randn(32, 6, dtype=torch.float64), torch.randint(0, 3, (32,)))
    start = ng.Objective(model, nn.functional.cross_entropy, data, mode="train")
    blocks = [(("0.weight", 0),), (("1.weight", 0), ("1.bias", 0))]
    rows = []
    for point in range(12):
        here = start if point == 0 else start.at(rescaled(start.parameters, point))
        plain = ng.spectrum(here, top=1, tol=1e-6).top[0]
        quotient = ng.quotient_spectrum(here.at(canonical(here.parameters)), blocks, top=1, tol=1e-6)
        rows.append({"point": point, "curvature": "Hessian", "eigenvalue": plain})
        rows.append({"point": point, "curvature": "quotient", "eigenvalue": quotient.sharpness})
        print(f"{point}: loss {float(here.loss()):.12f}, Hessian {plain:.4g}, quotient {quotient.sharpness:.12g}")
    drawn = curves(rows, x="point", y="eigenvalue", series="curvature", y_scale="log", y_title="largest eigenvalue",
                   x_title="the same network, its symmetric blocks multiplied by random factors",
                   title="One function, twelve parametrizations")  # fmt: skip
    OUT.write_text(svg(drawn, "Largest eigenvalue of Hessian and quotient along one orbit") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
