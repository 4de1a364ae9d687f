"""The doctor: findings about a user's network, each with evidence and remedy."""

from normgauge.doctor.checks import all_checks
from normgauge.doctor.checkup import Checkup, checkup
from normgauge.doctor.example import sick_model
from normgauge.doctor.finding import Check, Exam, Finding, Sign, check
from normgauge.doctor.probes.divergence import Divergence
from normgauge.doctor.probes.identity import NormIdentity, identify

__all__ = ["Check", "Checkup", "Divergence", "Exam", "Finding", "NormIdentity", "Sign", "all_checks", "check"]
__all__ += ["checkup", "identify", "sick_model"]
