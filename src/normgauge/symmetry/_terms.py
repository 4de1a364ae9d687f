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

    `summands` are what a gradient's inner products with the fields are sums of, entry by entry of the slot's tensor,
    without the coefficient; `gather` are the inner products, `field` maps numbers per index to the sum of fields,
    `act` is the finite change (t is an exponent of two for scales, a length otherwise).
    """

    slot: Slot
    coefficient: float = 1.0

    role = "term"
    finite_scale = False

    @property
    def parameter(self) -> str:
        return self.slot.name

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensors that the change looks at, itself included."""
        others = (getattr(self, name, "") for name in ("by", "beta", "bias", "reader"))
        return (self.parameter, self.slot.name, *(name for name in others if name))

    @property
    def size(self) -> int:
        return self.slot.size

    def with_coefficient(self, value: float) -> Term:
        return replace(self, coefficient=value)

    def summands(self, point: Values, gradient: Values) -> Tensor:
        """Return what the inner products sum."""
        raise NotImplementedError

    def gather(self, point: Values, gradient: Values) -> Tensor:
        """Return the inner products of a gradient with the fields (coefficient included)."""
        return self.coefficient * self.slot.gather(self.summands(point, gradient))

    def magnitude(self, point: Values, gradient: Values) -> Tensor:
        """Return the size the inner products would have if their summands had random signs."""
        return abs(self.coefficient) * self.slot.gather(self.summands(point, gradient).square()).sqrt()

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        """Return the tangent vector, on the tensor's shape, of the sum of fields with these amounts."""
        raise NotImplementedError

    def act(self, point: Values, amounts: Tensor) -> Tensor:
        """Return the tensor after the finite change."""
        return point[self.parameter] + self.field(point, amounts)

    def describe(self) -> str:
        return f"{self.parameter}{self.slot.describe()}"

    def to_json(self) -> dict[str, Any]:
        return {"role": self.role, **asdict(self)}


class Scale(Term):
    """theta -> 2^(c t_i) theta on slice i; the field is the slice itself."""

    role = "scale"
    finite_scale = True

    def summands(self, point: Values, gradient: Values) -> Tensor:
        return point[self.parameter] * gradient[self.parameter]

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        value = point[self.parameter]
        return self.coefficient * value * self.slot.spread(amounts.to(value), tuple(value.shape))

    def act(self, point: Values, amounts: Tensor) -> Tensor:
        value = point[self.parameter]
        factors = torch.exp2(self.coefficient * amounts.to(value))
        return value * self.slot.spread(factors, tuple(value.shape), outside=1.0)


class Shift(Term):
    """theta -> theta + c t_i on slice i."""

    role = "shift"

    def summands(self, point: Values, gradient: Values) -> Tensor:
        return gradient[self.parameter]

    def field(self, point: Values, amounts: Tensor) -> Tensor:
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
        return self.bias

    def summands(self, point: Values, gradient: Values) -> Tensor:
        view = self.slot.view_of(point[self.slot.name])
        slope = gradient[self.bias].reshape([s if a in self.out else 1 for a, s in enumerate(view.shape)])
        return (view * slope).reshape(point[self.slot.name].shape)

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        matrix = self.slot.view_of(point[self.slot.name])
        drop = [axis for axis in range(matrix.ndim) if axis not in self.out]
        inputs = self.slot.spread(amounts.to(matrix), self.slot.view)
        return self.coefficient * (matrix * inputs).sum(drop).reshape(point[self.bias].shape)

    def describe(self) -> str:
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

    def summands(self, point: Values, gradient: Values) -> Tensor:
        return self.slot.view_of(gradient[self.slot.name]) * self._weights(point)

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        value = point[self.slot.name]
        wide = self.slot.spread(amounts.to(value), self.slot.view) * self._weights(point)
        return self.coefficient * wide.reshape(value.shape)

    def describe(self) -> str:
        return f"{self.slot.name}{self.slot.describe()} / {self.by}"


@dataclass(frozen=True)
class Offset(Term):
    """bias -> bias + c t_i sum_j beta_j / gamma_j: what `Centred` must give back because of beta."""

    by: str = ""
    beta: str = ""

    role = "offset"

    def _factor(self, point: Values) -> Tensor:
        return (point[self.beta] / point[self.by]).sum()

    def summands(self, point: Values, gradient: Values) -> Tensor:
        return self._factor(point) * gradient[self.slot.name]

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        value = point[self.slot.name]
        return self.coefficient * self._factor(point) * self.slot.spread(amounts.to(value), tuple(value.shape))


@dataclass(frozen=True)
class Undone(Centred):
    """W -> W - W t (1/gamma)^T / <beta + t, 1/gamma>: what undoes beta -> beta + t where W's layer has no bias.

    It reads gamma * z + beta with sum(z) = 0 (LayerNorm). `slot` keeps the axis along which gamma and beta lie.
    """

    beta: str = ""

    role = "undone"

    def _weights(self, point: Values) -> Tensor:
        wide = [-1 if a in self.slot.keep else 1 for a in range(len(self.slot.view))]
        return (1 / point[self.by] / (point[self.beta] / point[self.by]).sum()).reshape(wide)

    def summands(self, point: Values, gradient: Values) -> Tensor:
        along = (gradient[self.slot.name] * self._weights(point)).sum(self.slot.keep, keepdim=True)
        return point[self.slot.name] * along

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        value = point[self.slot.name]
        moved = (value * self.slot.spread(amounts.to(value), self.slot.view)).sum(self.slot.keep, keepdim=True)
        return self.coefficient * moved * self._weights(point)

    def act(self, point: Values, amounts: Tensor) -> Tensor:
        beta = point[self.beta] + amounts.to(point[self.beta]).reshape(point[self.beta].shape)
        return point[self.slot.name] + self.field({**point, self.beta: beta}, amounts)

    def describe(self) -> str:
        return f"{self.slot.name} by {self.beta} / {self.by}"


@dataclass(frozen=True)
class Through(Term):
    """bias -> bias + c t_i gain_i: what a shift before an elementwise gain does behind it. `slot` is the gain's."""

    bias: str = ""

    role = "through"

    @property
    def parameter(self) -> str:
        return self.bias

    def summands(self, point: Values, gradient: Values) -> Tensor:
        return point[self.slot.name] * gradient[self.bias].reshape(point[self.slot.name].shape)

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        gain = point[self.slot.name]
        return self.coefficient * gain * amounts.to(gain).reshape(gain.shape)

    def describe(self) -> str:
        return f"{self.bias} by {self.slot.name}{self.slot.describe()}"


def kernel_basis(reader: Tensor, along: int) -> Tensor:
    """Return [width, kernel]: an orthonormal basis of what a matrix that reads along an axis maps to zero."""
    rows = reader.detach().movedim(along, -1).reshape(-1, reader.shape[along])
    return torch.linalg.qr(rows.mT.double(), mode="complete").Q[:, rows.shape[0] :]


@dataclass(frozen=True)
class Unread(Term):
    """W -> W + c N(R) t: columns of a writer along what its only reader R maps to zero.

    `slot` keeps every axis of W but `axis`, which R reads along its axis `along`. N(R) is an orthonormal basis of the
    kernel of R, so there are `kernel` generators for each column; the index is (kernel vector, column).
    """

    reader: str = ""
    along: int = 0
    axis: int = 0
    kernel: int = 0

    role = "unread"

    @property
    def size(self) -> int:
        return self.kernel * self.slot.size

    def _basis(self, point: Values) -> Tensor:
        return kernel_basis(point[self.reader], self.along)

    def gather(self, point: Values, gradient: Values) -> Tensor:
        slope = gradient[self.slot.name].movedim(self.axis, 0)
        return self.coefficient * (self._basis(point).mT @ slope.reshape(slope.shape[0], -1).double()).reshape(-1)

    def magnitude(self, point: Values, gradient: Values) -> Tensor:
        slope = gradient[self.slot.name].movedim(self.axis, 0)
        norms = slope.reshape(slope.shape[0], -1).double().norm(dim=0)
        return abs(self.coefficient) * norms.expand(self.kernel, -1).reshape(-1)

    def field(self, point: Values, amounts: Tensor) -> Tensor:
        value = point[self.slot.name]
        moved = value.movedim(self.axis, 0)
        wide = self._basis(point) @ amounts.double().reshape(self.kernel, -1)
        return (self.coefficient * wide).to(value).reshape(moved.shape).movedim(0, self.axis)

    def describe(self) -> str:
        return f"{self.slot.name}{self.slot.describe()} in the kernel of {self.reader}"


ROLES: dict[str, type[Term]] = {
    kind.role: kind for kind in (Scale, Shift, Pull, Centred, Undone, Offset, Through, Unread)
}


def term_from_json(data: Mapping[str, Any]) -> Term:
    rest = {name: value for name, value in data.items() if name not in ("role", "slot")}
    for name in ("out", "outer", "inner"):
        if name in rest:
            rest[name] = tuple(rest[name])
    raw = data["slot"]
    narrow = None if raw["narrow"] is None else tuple(raw["narrow"])
    first = None if raw["first"] is None else tuple(raw["first"])
    slot = Slot(raw["name"], tuple(raw["view"]), tuple(raw["keep"]), narrow, first)
    return ROLES[data["role"]](slot=slot, **rest)
