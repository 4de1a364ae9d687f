"""What our optimizers share: groups with a geometry, radii, refusals, and the split into flat and curved parts."""

import math
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from torch.optim.sgd import sgd as torch_sgd

from normgauge.errors import InputError, NormgaugeWarning, explain
from normgauge.optim._rows import Block, Item, Plan, Pool, count_rows, lay_side_by_side, orient, working_dtype

GEOMETRIES = ("sphere", "euclidean")
PLANS = 8  # kept at a time; more than a few means that other parameters have gradients at every step
Group = dict[str, Any]
Names = tuple[str, ...]


class GeometricOptimizer(Optimizer):
    """Base of optimizers whose parameter groups say where their parameters live.

    A group's `geometry` is "sphere", "euclidean", or `None`: two and more dimensions on spheres, fewer flat.
    `granularity` says what part of a tensor is one sphere: "row" (a slice of the first axis), "column" (of the second),
    "tensor", or a number of equal blocks. A subclass gives `_step_curved`, and
    `_step_flat` where that is not torch's SGD.
    """

    row_numbers: tuple[str, ...] = ("radius",)

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._warned = False
        self._pool = Pool()
        self._plans: dict[Any, Plan] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore, filling in what an older state does not know."""
        super().__setstate__(state)
        self._warned = getattr(self, "_warned", True)
        self._pool, self._plans = Pool(), {}
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking its options."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
        except Exception:
            self.param_groups.pop()
            raise
        self._warn_about_decay(group)
        if "radius" in self.row_numbers and group.get("radius") is not None:
            for param in group["params"]:  # at once, so that the first gradient is taken there
                if self.is_curved(param, group) and not param.is_complex():
                    self._start(orient(param.detach(), group["granularity"]), group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step; `closure` re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            flat: list[Tensor] = []
            curved: list[Tensor] = []
            for param in group["params"]:
                if param.grad is not None:
                    self._refuse(param, param.grad)
                    (curved if self.is_curved(param, group) else flat).append(param)
            if flat:
                self._step_flat(group, flat)
            if curved:
                with np.errstate(all="ignore"):  # NaN gradients are the user's, and torch says nothing about them
                    self._step_curved(group, curved)
        return loss

    def is_curved(self, param: Tensor, group: dict[str, Any]) -> bool:
        """Tell whether a parameter lives on spheres."""
        geometry = group["geometry"]
        return param.ndim >= 2 if geometry is None else geometry != "euclidean"

    def _step_flat(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Do a step of torch's own SGD on the parameters that are not on spheres, bit for bit."""
        buffers = [self.state[param].get("momentum_buffer") if group["momentum"] else None for param in params]
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "foreach", "fused")
        grads: list[Any] = [param.grad for param in params]
        torch_sgd(params, grads, buffers, **{name: group[name] for name in names})
        if group["momentum"]:
            for param, buffer in zip(params, buffers, strict=True):
                self.state[param]["momentum_buffer"] = buffer

    def _step_curved(self, group: dict[str, Any], params: list[Tensor]) -> None:
        raise NotImplementedError

    # -- states and blocks --------------------------------------------------------------------------------------

    def _blocks(self, group: Group, params: list[Tensor], tensors: Names, numbers: Names) -> Iterator[Block]:
        """Yield blocks of rows; a fresh state gets zeros for `tensors` and the radius."""
        if not params:
            return iter(())
        plan, granularity = self._find_plan(group, params, tensors, numbers), group["granularity"]
        if plan is None:
            self._create(group, params, tensors, numbers)
            if len(self._plans) >= PLANS:
                self._plans.clear()
            plan = self._plans[_key(group, params, tensors, numbers)] = self._plan(group, params, tensors, numbers)
        grads: list[Tensor] = [param.grad for param in params]  # type: ignore[misc]
        if granularity == "column":
            grads = [orient(grad, granularity) for grad in grads]
        return plan.blocks(list(torch._foreach_neg(grads)) if group["maximize"] else grads)

    def _split_by_age(
        self, group: Group, params: list[Tensor], tensors: Names, numbers: Names
    ) -> list[tuple[list[Tensor], float]]:
        """Return parameters with the gradient's share in their momentum: all of it in a first step, as in torch."""
        keep = 1.0 - group["dampening"]
        if keep == 1.0 or not tensors or self._find_plan(group, params, tensors, numbers) is not None:
            return [(params, keep)]
        fresh = [tensors[0] not in self.state[param] for param in params]
        new = [param for param, first in zip(params, fresh, strict=True) if first]
        return [(new, 1.0), ([param for param, first in zip(params, fresh, strict=True) if not first], keep)]

    def _find_plan(self, group: Group, params: list[Tensor], tensors: Names, numbers: Names) -> Plan | None:
        """Return the plan of an earlier step, if parameters and states are still the tensors it was made of."""
        plan = self._plans.get(_key(group, params, tensors, numbers))
        if plan is None or plan.pointers != [param.data_ptr() for param in params]:
            return None
        states = [self.state[param] for param in params]
        for key, entries in plan.states.items():
            if not all(map(operator.is_, [state.get(key) for state in states], entries)):
                return None
        return plan

    def _plan(self, group: Group, params: list[Tensor], tensors: Names, numbers: Names) -> Plan:
        granularity, items = group["granularity"], []
        for param in params:
            state, w = self.state[param], orient(param.detach(), granularity)
            own = {key: orient(state[key], granularity) for key in tensors}
            items.append(Item(w, count_rows(w, granularity), own, {key: state[key] for key in numbers}))
        plan = Plan(items, self._pool, pack=group["foreach"] is not False)
        plan.states = {key: [self.state[param][key] for param in params] for key in (*tensors, *numbers)}
        return plan

    def _create(self, group: Group, params: list[Tensor], tensors: Names, numbers: Names) -> None:
        """Give parameters the states they do not have yet, those of small ones side by side."""
        for key in (*numbers, *tensors):
            new = [param for param in params if key not in self.state[param]]
            if key in tensors:
                values = [torch.zeros_like(param, memory_format=torch.preserve_format) for param in new]
            else:
                seen = [orient(param.detach(), group["granularity"]) for param in new]
                values = [self._start(w, group) if key == "radius" else _row_zeros(w, group) for w in seen]
            for param, value in zip(new, lay_side_by_side(values), strict=True):
                self.state[param][key] = value

    def _start(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the radii of a parameter seen for the first time, and bring it onto its spheres."""
        radius = group["radius"]
        view = param.reshape(count_rows(param, group["granularity"]), -1)
        norms = torch.linalg.vector_norm(view, dim=1, dtype=working_dtype(param.dtype))
        if not bool((norms > 0).all()):  # the only look at values; once per parameter
            rule = "a row on a sphere needs a direction, so it must not be zero"
            got = f"{int((norms == 0).sum())} zero rows in a parameter of shape {tuple(param.shape)}"
            step = "Put it into a group with geometry='euclidean', or initialize it otherwise"
            raise InputError(type(self).__name__, rule, got, step)
        if radius is None:
            return norms.to(param.dtype)
        param.copy_((view.to(norms.dtype) * (radius / norms).unsqueeze(1)).view(param.shape))
        return torch.full_like(norms, radius).to(param.dtype)

    # -- refusals -----------------------------------------------------------------------------------------------

    def _refuse(self, param: Tensor, grad: Tensor) -> None:
        name, step = type(self).__name__, "Use torch.optim.SGD for sparse embeddings"
        if grad.layout != torch.strided:
            raise InputError(name, "gradients must be dense", str(grad.layout), step)
        if param.is_complex():
            raise InputError(name, "parameters must be real", str(param.dtype), "Use torch.view_as_real")

    def _check(self, group: dict[str, Any]) -> None:
        name, lr = type(self).__name__, group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise InputError(f"{name}(lr)", "a tensor lr has one element", str(tuple(lr.shape)), "Pass a number")
        for key, why in (
            ("capturable", "steps read the learning rate and count on the host, which a graph cannot"),
            ("differentiable", "steps change weights in place, outside autograd"),
        ):
            if group.get(key):
                raise InputError(f"{name}({key})", why, f"{key}=True", "Leave it out, or use torch.optim")
        for key in ("lr", "momentum", "weight_decay", "eps", "damping"):
            if key in group and not 0 <= float(group[key]) < math.inf:
                raise InputError(f"{name}({key})", "must be finite and not negative", str(group[key]), "Correct it")
        for beta in group.get("betas", ()):
            if not 0 <= float(beta) < 1:
                raise InputError(f"{name}(betas)", "each is in [0, 1)", str(group["betas"]), "Correct it")
        if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
            rule = "Nesterov momentum needs momentum > 0 and dampening = 0"
            got = f"momentum={group['momentum']}, dampening={group['dampening']}"
            raise InputError(f"{name}(nesterov)", rule, got, "Pass momentum=0.9, dampening=0")
        if group["geometry"] not in (None, *GEOMETRIES):
            rule = f"geometry is None or one of {', '.join(GEOMETRIES)}"
            raise InputError(f"{name}(geometry)", rule, repr(group["geometry"]), "Correct the group")
        radius = group.get("radius")
        if radius is not None and not 0 < float(radius) < math.inf:
            raise InputError(f"{name}(radius)", "a radius is positive", str(radius), "Pass None to keep norms")
        if group["fused"] and group["foreach"]:
            rule = "fused and foreach exclude each other, as in torch.optim"
            raise InputError(name, rule, "both True", "Pass one of them")
        for param in group["params"]:
            if self.is_curved(param, group):
                count_rows(orient(param, group["granularity"]), group["granularity"])

    def _warn_about_decay(self, group: dict[str, Any]) -> None:
        if self._warned or "radius" not in self.row_numbers or not float(group.get("weight_decay", 0)):
            return
        if any(self.is_curved(param, group) for param in group["params"]):
            self._warned = True
            rule = "weight decay shrinks a norm, and on a sphere the norm is fixed, so it is left out there"
            step = "Pass weight_decay=0 for sphere groups; it still acts on Euclidean ones"
            said = explain(type(self).__name__, rule, f"weight_decay={group['weight_decay']}", step)
            warnings.warn(said, NormgaugeWarning, stacklevel=4)


def rate_of(group: dict[str, Any]) -> float:
    """Return the learning rate as a number (a tensor on an accelerator is read, as torch's plain optimizers do)."""
    return float(group["lr"])


def _key(group: Group, params: list[Tensor], tensors: Names, numbers: Names) -> Any:
    return (tensors, numbers, group["granularity"], group["foreach"] is not False, *map(id, params))


def _row_zeros(param: Tensor, group: Group) -> Tensor:
    return torch.zeros(count_rows(param, group["granularity"]), dtype=param.dtype, device=param.device)
