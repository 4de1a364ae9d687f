"""Break a judge and look again: the verdict must notice that its sentences were exchanged."""

from dataclasses import replace

from normgauge.claims._checks import Check
from normgauge.claims._court import judge_one
from normgauge.claims._registry import find

EXCHANGE = {"printed": "corrected", "corrected": "printed"}


def judged(id, seed=0):
    """Return the word of a claim's verdict, or its status where there is none."""
    return _word(find(id), seed)


def swapped(id, seed=0):
    """Return the word with the printed and the corrected statement exchanged."""
    return _word(_recast(find(id), EXCHANGE), seed)


def promoted(id, seed=0):
    """Return the word with the corrected statement in the place of the printed one, which is dropped."""
    return _word(_recast(find(id), {"printed": None, "corrected": "printed"}), seed)


def _recast(claim, roles):
    def trial(generator):
        for check in claim.trial(generator):
            role = roles.get(check.role, check.role)
            if role is not None:
                yield Check(role, check.name, check.value, check.tolerance)

    return replace(claim, trial=trial)


def _word(claim, seed):
    verdict = judge_one(claim, seed)
    return verdict.verdict if verdict.status == "judged" else verdict.status
