"""Every file of golden values by its name."""

from golden.instruments import INSTRUMENTS

SUBJECTS = {"instruments": INSTRUMENTS}
