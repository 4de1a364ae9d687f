"""The same network under any normalizer: built in, published, or a user's own factory."""

from normgauge.lab.models.build import (
    AS_BUILT,
    build,
    file_digests,
    is_everywhere,
    is_own,
    keep_model,
    names,
    takes_norm,
)
from normgauge.lab.models.gpt import gpt
from normgauge.lab.models.normalized import Normalized

__all__ = ["AS_BUILT", "Normalized", "build", "file_digests", "gpt", "is_everywhere", "is_own", "keep_model", "names"]
__all__ += ["takes_norm"]
