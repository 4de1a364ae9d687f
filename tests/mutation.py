"""Break a judge and look again: the verdict must notice that its sentences were exchanged."""

from dataclasses import replace
from functools import cache

from normgauge.papers.court import weigh
from normgauge.papers.court.registry import find


def judged(id, seed=0):
    """Judge a claim anew (with whatever is patched) and return the word, or the status where there is none."""
    return _word(replace(find(id), seed=seed).result)


@cache
def settled(id, seed=0):
    """Return the verdict of the unbroken claim, computed once."""
    return replace(find(id), seed=seed).result


def swapped(id):
    """Return the word with the printed and the corrected statement exchanged."""
    return _recast(id, {"printed": "corrected", "corrected": "printed"})


def promoted(id):
    """Return the word with the corrected statement in the place of the printed one, which is dropped."""
    return _recast(id, {"printed": "fact", "corrected": "printed"})


def _recast(id, roles):
    return _word(weigh([replace(item, role=roles.get(item.role, item.role)) for item in settled(id).evidence]))


def _word(verdict):
    return verdict.verdict if verdict.status == "judged" else verdict.status
