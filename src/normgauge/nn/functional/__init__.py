"""Pure forward maps of the normalizers and their closed-form backward maps, on tensors alone.

Arguments everywhere: `x` is `(batch, channels, *space)` for maps over channels, any tensor for maps over its `trailing`
axes; `gamma` (None for 1) and `beta` (None for 0) are per channel or entry; `eps` is added to what is under the root;
`grad` is the gradient with respect to the output; `v` is `[rows, ...]` with one `g` per row; `p` is at least 1 or inf.
"""

from normgauge.nn.functional._decompose import decompose
from normgauge.nn.functional._lp import lp_norm, lp_norm_backward
from normgauge.nn.functional._standard import (
    batch_norm,
    batch_norm_backward,
    group_norm,
    group_norm_backward,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from normgauge.nn.functional._weights import (
    centered_weight_norm,
    centered_weight_norm_backward,
    spectral_norm,
    spectral_norm_backward,
    unit_sphere,
    unit_sphere_backward,
    weight_norm,
    weight_norm_backward,
    weight_standardization,
    weight_standardization_backward,
)

__all__ = [
    "batch_norm",
    "batch_norm_backward",
    "centered_weight_norm",
    "centered_weight_norm_backward",
    "decompose",
    "group_norm",
    "group_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "lp_norm",
    "lp_norm_backward",
    "rms_norm",
    "rms_norm_backward",
    "spectral_norm",
    "spectral_norm_backward",
    "unit_sphere",
    "unit_sphere_backward",
    "weight_norm",
    "weight_norm_backward",
    "weight_standardization",
    "weight_standardization_backward",
]
