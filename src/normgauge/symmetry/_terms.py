"""Terms: the elementary changes of one tensor, one per index, that generators are sums of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normgauge.symmetry._axes import Slot

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Term:
    """One tensor's share in a family of generators: `coefficient` times a field, one field per index.

    `gather` maps a gradient to its inner products with the fields, `field` maps numbers per index to the sum
    of fields, `act` is the finite change (t is an exponent of two for scales, a length otherwise).
    """

    slot: Slot
    coefficient: float = 1.0

    role = "term"
    finite_scale = False

    @property
    def parameter(self) -> str:
        """The tensor that changes."""
        return self.slot.name

    @property
    def size(self) -> int:
        """The number of indices."""
        return self.slot.size

    def with_coefficient(self, value: float) -> Term:
        """Return the same term with another coefficient."""
        return replace(self, coefficient=value)

    def gather(self, point: Values, gradient: Values) -> Tensor:
        """Return the inner products of a gradient with the fields (coefficient included)."""
        raise NotImplementedError

    def magnitude(self, point: Values, gradient: Values) -> Tensor:
        """Return the size the inner products would have if their summands had random signs."""
        raise NotImplementedError

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        """Return the tangent vector, on the tensor's shape, of the sum of fields with these amounts."""
        raise NotImplementedError

    def act(self, point: Values, amounts: Tensor) -> Tensor:
        """Return the tensor after the finite change."""
        return point[self.parameter] + self.field(point, amounts)

    def describe(self) -> str:
        """Name the tensor and its slices."""
        return f"{self.parameter}{self.slot.describe()}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"role": self.role, **asdict(self)}


class Scale(Term):
    """theta -> 2^(c t_i) theta on slice i; the field is the slice itself."""

    role = "scale"
    finite_scale = True

    def gather(self, point: Values, gradient: Values) -> Tensor:
        """Return c <slice, gradient of slice>."""
        return self.coefficient * self.slot.gather(point[self.parameter] * gradient[self.parameter])

    def magnitude(self, point: Values, gradient: Values) -> Tensor:
        """Return the root of the sum of squares of the summands."""
        product = point[self.parameter] * gradient[self.parameter]
        return abs(self.coefficient) * self.slot.gather(product.square()).sqrt()

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        """Return c t_i times slice i."""
        value = point[self.parameter]
        return self.coefficient * value * self.slot.spread(amounts.to(value), tuple(value.shape))

    def act(self, point: Values, amounts: Tensor) -> Tensor:
        """Multiply by powers of two: no rounding when the exponents are integers."""
        value = point[self.parameter]
        factors = torch.exp2(self.coefficient * amounts.to(value))
        return value * self.slot.spread(factors, tuple(value.shape), outside=1.0)


class Shift(Term):
    """theta -> theta + c t_i on slice i."""

    role = "shift"

    def gather(self, point: Values, gradient: Values) -> Tensor:
        """Return c times the summed gradient of each slice."""
        return self.coefficient * self.slot.gather(gradient[self.parameter])

    def magnitude(self, point: Values, gradient: Values) -> Tensor:
        """Return the root of the sum of squared gradients of each slice."""
        return abs(self.coefficient) * self.slot.gather(gradient[self.parameter].square()).sqrt()

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        """Return c t_i on slice i."""
        value = point[self.parameter]
        return self.coefficient * self.slot.spread(amounts.to(value), tuple(value.shape))


@dataclass(frozen=True)
class Pull(Term):
    """bias -> bias + c sum_i t_i W[:, i]: what a shift of the layer's input i does to its bias.

    `slot` is the slot of W whose index is the layer's input; `out` are the axes of its view that the bias has.
    """

    bias: str = ""
    out: tuple[int, ...] = ()

    role = "pull"

    @property
    def parameter(self) -> str:
        """The bias."""
        return self.bias

    def _matrix(self, point: Values) -> Tensor:
        """Return W as [bias entries, inputs], kernels summed; shared axes (groups) become block diagonal."""
        view = self.slot.view_of(point[self.slot.name])
        rest = [axis for axis in range(view.ndim) if axis not in self.slot.keep and axis not in self.out]
        return view.sum(rest, keepdim=True) if rest else view

    def gather(self, point: Values, gradient: Values) -> Tensor:
        """Return c W^T g_b."""
        matrix = self._matrix(point)
        slope = gradient[self.bias].reshape([s if a in self.out else 1 for a, s in enumerate(matrix.shape)])
        drop = [axis for axis in range(matrix.ndim) if axis not in self.slot.keep]
        return self.coefficient * (matrix * slope).sum(drop).reshape(-1)

    def magnitude(self, point: Values, gradient: Values) -> Tensor:
        """Return the root of the sum of squares of the summands."""
        matrix = self._matrix(point)
        slope = gradient[self.bias].reshape([s if a in self.out else 1 for a, s in enumerate(matrix.shape)])
        drop = [axis for axis in range(matrix.ndim) if axis not in self.slot.keep]
        return abs(self.coefficient) * (matrix * slope).square().sum(drop).sqrt().reshape(-1)

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        """Return c W t."""
        matrix = self._matrix(point)
        inputs = amounts.to(matrix).reshape([s if a in self.slot.keep else 1 for a, s in enumerate(matrix.shape)])
        drop = [axis for axis in range(matrix.ndim) if axis not in self.out]
        return self.coefficient * (matrix * inputs).sum(drop).reshape(point[self.bias].shape)

    def describe(self) -> str:
        """Name the bias and the weight that carries the shift."""
        return f"{self.bias} by {self.slot.name}{self.slot.describe()}"


@dataclass(frozen=True)
class Centred(Term):
    """W -> W + c t_k / gamma_j along one axis j: invisible when gamma's input sums to zero over j (LayerNorm).

    `slot` keeps every axis of W but `axis`, along which `by` (gamma) lies.
    """

    by: str = ""

    role = "centred"

    def _weights(self, point: Values) -> Tensor:
        (axis,) = [a for a in range(len(self.slot.view)) if a not in self.slot.keep]
        return (1 / point[self.by]).reshape([-1 if a == axis else 1 for a in range(len(self.slot.view))])

    def gather(self, point: Values, gradient: Values) -> Tensor:
        """Return c sum_j g_jk / gamma_j."""
        return self.coefficient * self.slot.gather(self.slot.view_of(gradient[self.slot.name]) * self._weights(point))

    def magnitude(self, point: Values, gradient: Values) -> Tensor:
        """Return the root of the sum of squares of the summands."""
        weighted = self.slot.view_of(gradient[self.slot.name]) * self._weights(point)
        return abs(self.coefficient) * self.slot.gather(weighted.square()).sqrt()

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        """Return c t_k / gamma_j."""
        value = point[self.slot.name]
        wide = self.slot.spread(amounts.to(value), self.slot.view) * self._weights(point)
        return self.coefficient * wide.reshape(value.shape)

    def describe(self) -> str:
        """Name the tensor and the gamma that weighs the shift."""
        return f"{self.slot.name}{self.slot.describe()} / {self.by}"


@dataclass(frozen=True)
class Offset(Term):
    """bias -> bias + c t_i sum_j beta_j / gamma_j: what `Centred` must give back because of beta."""

    by: str = ""
    beta: str = ""

    role = "offset"

    def _factor(self, point: Values) -> Tensor:
        return self.coefficient * (point[self.beta] / point[self.by]).sum()

    def gather(self, point: Values, gradient: Values) -> Tensor:
        """Return c (sum beta / gamma) g_b."""
        return self._factor(point) * self.slot.gather(gradient[self.slot.name])

    def magnitude(self, point: Values, gradient: Values) -> Tensor:
        """Return the absolute values of `gather`."""
        return self.gather(point, gradient).abs()

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        """Return c t_i (sum beta / gamma)."""
        value = point[self.slot.name]
        return self._factor(point) * self.slot.spread(amounts.to(value), tuple(value.shape))


@dataclass(frozen=True)
class Gain(Term):
    """g_k -> g_k |v'_k| / |v_k| when column i of v is scaled: what weight normalization's gain must follow.

    `slot` is the slot of v whose columns are scaled; `gain` is g, whose entries belong to v's slices along
    `out`. The field of index i on g_k is g_k v_ki^2 / |v_k|^2.
    """

    gain: str = ""
    out: tuple[int, ...] = ()

    role = "gain"
    finite_scale = True

    @property
    def parameter(self) -> str:
        """The gain."""
        return self.gain

    def _shares(self, point: Values) -> Tensor:
        """Return v_ki^2 / |v_k|^2 summed over the axes that are neither k nor i, as [out..., keep...] broadcast."""
        squares = self.slot.view_of(point[self.slot.name]).square()
        rest = [axis for axis in range(squares.ndim) if axis not in self.slot.keep and axis not in self.out]
        whole = [axis for axis in range(squares.ndim) if axis not in self.out]
        part = squares.sum(rest, keepdim=True) if rest else squares
        return part / squares.sum(whole, keepdim=True).clamp_min(1e-300)

    def _sum_over_inputs(self, values: Tensor) -> Tensor:
        drop = [axis for axis in range(values.ndim) if axis not in self.out]
        return values.sum(drop)

    def gather(self, point: Values, gradient: Values) -> Tensor:
        """Return c sum_k share_ki g_k slope_k."""
        shares = self._shares(point)
        product = (point[self.gain] * gradient[self.gain]).reshape(
            [s if a in self.out else 1 for a, s in enumerate(shares.shape)]
        )
        drop = [axis for axis in range(shares.ndim) if axis not in self.slot.keep]
        return self.coefficient * (shares * product).sum(drop).reshape(-1)

    def magnitude(self, point: Values, gradient: Values) -> Tensor:
        """Return the root of the sum of squares of the summands."""
        shares = self._shares(point)
        product = (point[self.gain] * gradient[self.gain]).reshape(
            [s if a in self.out else 1 for a, s in enumerate(shares.shape)]
        )
        drop = [axis for axis in range(shares.ndim) if axis not in self.slot.keep]
        return abs(self.coefficient) * (shares * product).square().sum(drop).sqrt().reshape(-1)

    def _weighted_shares(self, point: Values, amounts: Tensor) -> Tensor:
        shares = self._shares(point)
        wide = amounts.to(shares).reshape([s if a in self.slot.keep else 1 for a, s in enumerate(shares.shape)])
        return self._sum_over_inputs(shares * wide).reshape(point[self.gain].shape)

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        """Return c g_k sum_i t_i share_ki."""
        return self.coefficient * point[self.gain] * self._weighted_shares(point, amounts)

    def act(self, point: Values, amounts: Tensor) -> Tensor:
        """Return g_k times the ratio of norms after and before."""
        return point[self.gain] * self._weighted_shares(point, torch.exp2(2 * self.coefficient * amounts)).sqrt()

    def describe(self) -> str:
        """Name the gain and the direction it follows."""
        return f"{self.gain} with {self.slot.name}"


ROLES: dict[str, type[Term]] = {kind.role: kind for kind in (Scale, Shift, Pull, Centred, Offset, Gain)}


def term_from_json(data: Mapping[str, Any]) -> Term:
    """Rebuild a term from plain data."""
    rest = {name: value for name, value in data.items() if name not in ("role", "slot")}
    for name in ("out", "outer", "inner"):
        if name in rest:
            rest[name] = tuple(rest[name])
    raw = data["slot"]
    narrow = None if raw["narrow"] is None else tuple(raw["narrow"])
    first = None if raw["first"] is None else tuple(raw["first"])
    slot = Slot(raw["name"], tuple(raw["view"]), tuple(raw["keep"]), narrow, first)
    return ROLES[data["role"]](slot=slot, **rest)
