"""Spectral normalization by the norm of the layer as an operator, not of its reshaped weight."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normgauge.errors import InputError
from normgauge.linalg import Convolution, top_singular_pair

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class SpectralNorm(nn.Module):
    """W = V / ||A_V v||, v the top right singular vector of the layer's map A_V, kept by power iterations."""

    right: Tensor | None

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.operator: Convolution | None = None
        self.register_buffer("right", None)

    def learn(self, layer: nn.Module, size: Sequence[int]) -> None:
        """Fix the size of the layer's input; a later, larger one replaces it, since the norm grows with the size."""
        stored = self._stored_size()
        wanted = tuple(size) if stored is None else tuple(max(a, b) for a, b in zip(stored, size, strict=True))
        if wanted == stored:
            return
        raw: Tensor = layer.parametrizations.weight.original.detach()  # type: ignore[operator, union-attr]
        operator = Convolution.of(layer, wanted, raw)
        if self.right is None or self.right.shape[1:] != operator.input_shape:
            working = operator if raw.dtype in (torch.float32, torch.float64) else operator.to(torch.float32)
            with torch.autocast(raw.device.type, enabled=False):  # a norm in bfloat16 would be three digits long
                vector = top_singular_pair(working, steps=30).vector
            self.right = vector.reshape(1, *operator.input_shape).to(raw.dtype)
        operator.weight = raw.new_zeros(()).expand(raw.shape)  # the shape is all that is needed from here on
        self.operator = operator

    def _stored_size(self) -> tuple[int, ...] | None:
        if self.operator is None:
            return None
        return self.operator.outputs if self.operator.transposed else self.operator.size

    def forward(self, raw: Tensor) -> Tensor:
        """Return the weight divided by the norm of its operator."""
        if self.operator is None or self.right is None:
            rule = "the norm of a convolution depends on the size of its input, which is learned at the first forward"
            step = "Run the layer once, or wrap it with input_shape=(height, width)"
            raise InputError("spectral_norm", rule, "a weight asked for before any forward", step)
        kernel = raw.unsqueeze(-1) if raw.ndim == 2 else raw
        with torch.autocast(raw.device.type, enabled=False):
            if self.training:
                self._iterate(kernel.detach())
            image = self.operator.apply(self.right.detach().clone(), kernel)
            return raw / torch.linalg.vector_norm(image)

    @torch.no_grad()
    def _iterate(self, kernel: Tensor) -> None:
        assert self.operator is not None and self.right is not None  # by the caller
        vector = self.right
        for _ in range(self.steps):
            vector = self.operator.apply_adjoint(self.operator.apply(vector, kernel), kernel)
            vector = vector / torch.linalg.vector_norm(vector).clamp_min(torch.finfo(vector.dtype).tiny)
        self.right = vector  # a new tensor, not a write in place: torch.func forbids those on captured buffers

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the weight itself: one of norm 1 comes back as it is."""
        return weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        stored = state_dict.get(f"{prefix}right")
        if stored is not None:  # the size may have been learned before saving, and not yet here
            self.right = torch.empty_like(stored) if self.right is None else self.right.new_empty(stored.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _learn_size(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Tell the parametrization the size of the layer's input, before its forward."""
    if inputs and parametrize.is_parametrized(layer, "weight"):
        for part in layer.parametrizations["weight"]:  # type: ignore[index]
            if isinstance(part, SpectralNorm):
                part.learn(layer, inputs[0].shape[-len(layer.kernel_size) :])  # type: ignore[arg-type]


def spectral_norm(
    module: nn.Module, name: str = "weight", *, input_shape: Sequence[int] | None = None, steps: int = 1
) -> nn.Module:
    """Divide a layer's weight by the norm of the layer as an operator, in place.

    W = V / ||A_V||, where A_V is the map of the layer with weight V on inputs of one size, with its stride, padding,
    dilation and groups. The top singular vector is kept in a buffer: 30 Golub-Kahan steps when the size becomes
    known, then `steps` power iterations per training forward, none in evaluation mode. The whole weight lives on the
    unit sphere of the operator norm, up to the power iteration's error: it is a lower bound on the norm that is
    divided by, so ||A_W|| is 1 or slightly above. `normgauge.operator_norm(module, shape)` brackets it.

    The norm of a convolution depends on the spatial size of the input (it grows with it, towards a limit). Give
    `input_shape`, or the layer learns it at its first forward, before which the weight cannot be asked for; when a
    larger input comes later, the size is learned again.

    Deviations: miyato2018 and `torch.nn.utils.parametrizations.spectral_norm` divide by the norm of the weight
    reshaped to a matrix, which is 0.36-0.80 of a 3x3 convolution's: their "1-Lipschitz" layers are up to 2.8 times
    that (measured in docs/instruments/operator-norm.md).

    Examples:
        >>> layer = torch.nn.Conv2d(3, 4, 3, padding=1)
        >>> layer = spectral_norm(layer, input_shape=(6, 6), steps=20)
        >>> from normgauge.linalg import Convolution, top_singular_pair
        >>> norm = top_singular_pair(Convolution.of(layer, (6, 6)), steps=60).rayleigh
        >>> abs(norm - 1) < 1e-3
        True

    References: miyato2018, sun2020.
    """
    if not isinstance(module, _LAYERS) or name != "weight":
        rule = "the module must be Linear, Conv or ConvTranspose, normalized by its weight"
        got = f"{type(module).__name__}, {name!r}"
        raise InputError("spectral_norm", rule, got, "Wrap each layer of the model itself")
    if parametrize.is_parametrized(module, name):
        got = "a layer that is parametrized already"
        step = "Take it off with torch.nn.utils.parametrize.remove_parametrizations first"
        raise InputError("spectral_norm", "the weight may carry one normalizer", got, step)
    if steps < 1:
        raise InputError("spectral_norm", "steps is at least 1", repr(steps), "Use steps=1")
    if not bool(module.weight.detach().any()):
        raise InputError("spectral_norm", "the weight must not be zero", "zeros", "Initialize it first")
    part = SpectralNorm(steps)
    # unsafe: torch's check would ask for the weight before the size is known
    parametrize.register_parametrization(module, name, part, unsafe=True)
    if isinstance(module, nn.Linear):
        part.learn(module, ())
        return module
    if input_shape is not None:
        axes = len(module.kernel_size)
        if len(input_shape) < axes:
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            got = str(tuple(input_shape))
            raise InputError("spectral_norm", f"input_shape has {axes} sizes", got, "Give the spatial size")
        part.learn(module, tuple(input_shape)[-axes:])
    module.register_forward_pre_hook(_learn_size)
    return module
