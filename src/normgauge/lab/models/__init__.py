"""The same network under any normalizer: built in, published, or a user's own factory."""

from normgauge.lab.models.build import build as build
from normgauge.lab.models.build import names as names
from normgauge.lab.models.gpt import gpt as gpt
from normgauge.lab.models.normalized import Normalized as Normalized

__all__ = ["Normalized", "build", "gpt", "names"]
