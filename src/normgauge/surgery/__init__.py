"""Surgery: a model taken apart and put together again, with proof of what it changed."""

from normgauge.surgery._channels import ChannelPath as ChannelPath
from normgauge.surgery._channels import channel_paths as channel_paths
from normgauge.surgery._prune import prune_norms as prune_norms
from normgauge.surgery._prune import scale_l1 as scale_l1
from normgauge.surgery._surgery import Surgery as Surgery

__all__ = ["ChannelPath", "Surgery", "channel_paths", "prune_norms", "scale_l1"]
