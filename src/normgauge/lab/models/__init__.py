"""The same network under any normalizer: built in, published, or a user's own factory."""

from normgauge.lab.models.build import AS_BUILT as AS_BUILT
from normgauge.lab.models.build import build as build
from normgauge.lab.models.build import names as names
from normgauge.lab.models.build import takes_norm as takes_norm
from normgauge.lab.models.gpt import gpt as gpt
from normgauge.lab.models.normalized import Normalized as Normalized

__all__ = ["AS_BUILT", "Normalized", "build", "gpt", "names", "takes_norm"]
