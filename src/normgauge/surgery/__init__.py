"""Surgery: a model taken apart and put together again, with proof of what it changed."""

from normgauge.surgery._channels import ChannelPath as ChannelPath
from normgauge.surgery._channels import channel_paths as channel_paths
from normgauge.surgery._prune import prune_norms as prune_norms
from normgauge.surgery._prune import scale_l1 as scale_l1
from normgauge.surgery._surgery import Surgery as Surgery
from normgauge.surgery.canonicalize import canonicalize as canonicalize
from normgauge.surgery.fold_norms import fold_norms as fold_norms
from normgauge.surgery.freeze_norms import freeze_norms as freeze_norms
from normgauge.surgery.guard_norms import guard_norms as guard_norms
from normgauge.surgery.layer_to_rms import ShiftedRMSNorm as ShiftedRMSNorm
from normgauge.surgery.layer_to_rms import layer_to_rms as layer_to_rms
from normgauge.surgery.migrate_weight_norm import migrate_weight_norm as migrate_weight_norm
from normgauge.surgery.recalibrate_norms import recalibrate_norms as recalibrate_norms
from normgauge.surgery.recipe import load as load
from normgauge.surgery.recipe import load_weights as load_weights
from normgauge.surgery.recipe import save as save
from normgauge.surgery.recipe import ties as ties
from normgauge.surgery.rotate_stream import rotate_stream as rotate_stream
from normgauge.surgery.split_norms import split_norms as split_norms
from normgauge.surgery.strip_biases import strip_biases as strip_biases
from normgauge.surgery.swap_norms import swap_norms as swap_norms

__all__ = [
    "ChannelPath",
    "ShiftedRMSNorm",
    "Surgery",
    "canonicalize",
    "channel_paths",
    "fold_norms",
    "freeze_norms",
    "guard_norms",
    "layer_to_rms",
    "load",
    "load_weights",
    "migrate_weight_norm",
    "prune_norms",
    "recalibrate_norms",
    "rotate_stream",
    "save",
    "scale_l1",
    "split_norms",
    "strip_biases",
    "swap_norms",
    "ties",
]
