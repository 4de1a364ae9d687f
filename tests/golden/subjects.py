"""Every file of golden values by its name."""

from golden.instruments import INSTRUMENTS
from golden.lab import LAB
from golden.verdicts import VERDICTS

SUBJECTS = {"instruments": INSTRUMENTS, "verdicts": VERDICTS, "lab": LAB}
