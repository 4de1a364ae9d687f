"""Surgery: a model taken apart and put together again, with proof of what it changed."""

from normgauge.surgery._channels import ChannelPath as ChannelPath
from normgauge.surgery._channels import channel_paths as channel_paths
from normgauge.surgery._prune import prune_norms as prune_norms
from normgauge.surgery._prune import scale_l1 as scale_l1
from normgauge.surgery._surgery import Surgery as Surgery
from normgauge.surgery.fold_norms import fold_norms as fold_norms
from normgauge.surgery.freeze_norms import freeze_norms as freeze_norms
from normgauge.surgery.guard_norms import guard_norms as guard_norms
from normgauge.surgery.recalibrate_norms import recalibrate_norms as recalibrate_norms
from normgauge.surgery.strip_biases import strip_biases as strip_biases

__all__ = [
    "ChannelPath",
    "Surgery",
    "channel_paths",
    "fold_norms",
    "freeze_norms",
    "guard_norms",
    "prune_norms",
    "recalibrate_norms",
    "scale_l1",
    "strip_biases",
]
