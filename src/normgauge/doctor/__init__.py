"""The doctor: findings about a user's network, each with evidence and remedy."""

from normgauge.doctor.checks import all_checks as all_checks
from normgauge.doctor.checkup import Checkup as Checkup
from normgauge.doctor.checkup import checkup as checkup
from normgauge.doctor.example import sick_model as sick_model
from normgauge.doctor.finding import Check as Check
from normgauge.doctor.finding import Exam as Exam
from normgauge.doctor.finding import Finding as Finding
from normgauge.doctor.finding import Sign as Sign
from normgauge.doctor.finding import check as check
from normgauge.doctor.probes.divergence import Divergence as Divergence
from normgauge.doctor.probes.identity import NormIdentity as NormIdentity
from normgauge.doctor.probes.identity import identify as identify

__all__ = [
    "Check",
    "Checkup",
    "Divergence",
    "Exam",
    "Finding",
    "NormIdentity",
    "Sign",
    "all_checks",
    "check",
    "checkup",
    "identify",
    "sick_model",
]
