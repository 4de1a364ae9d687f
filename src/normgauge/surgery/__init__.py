"""Surgery: a model taken apart and put together again, with proof of what it changed.

Operations take any model and an `example` (a tensor, tuple or mapping of inputs). `where` is a glob, names or a
predicate(name, module), all normalizers concerned by default; `forward(model, inputs)` is for unusual calls, `inplace`
changes the model itself; `untie` gives maps that share their weight with another layer a weight of their own.
"""

from normgauge.surgery._surgery import Surgery
from normgauge.surgery.canonicalize import canonicalize
from normgauge.surgery.fold_norms import fold_norms
from normgauge.surgery.migrate_weight_norm import migrate_weight_norm
from normgauge.surgery.prune_norms import ChannelPath, channel_paths, prune_norms, scale_l1
from normgauge.surgery.recipe import load, load_weights, save, ties
from normgauge.surgery.rotate_stream import ShiftedRMSNorm, layer_to_rms, rotate_stream
from normgauge.surgery.statistics import freeze_norms, guard_norms, recalibrate_norms, split_norms
from normgauge.surgery.strip_biases import strip_biases
from normgauge.surgery.swap_norms import swap_norms

__all__ = ["ChannelPath", "ShiftedRMSNorm", "Surgery", "canonicalize", "channel_paths", "fold_norms"]
__all__ += ["freeze_norms", "guard_norms", "layer_to_rms", "load", "load_weights", "migrate_weight_norm"]
__all__ += ["prune_norms", "recalibrate_norms", "rotate_stream", "save", "scale_l1", "split_norms", "strip_biases"]
__all__ += ["swap_norms", "ties"]
