"""The ledger is complete: every claim of the list is there, judged or honestly not run."""

from pathlib import Path

import normgauge as ng

LISTED = (Path(__file__).parent / "listed_claims.txt").read_text(encoding="utf-8").split()
ADDED_BY_NAME = {"S1-noise", "S1-random", "S1-l1", "S3-GDNP-data", "S3-dropout", "S3-init", "S0-decay", "S0-sgd"}


def test_every_listed_claim_is_in_the_ledger_once():
    ids = [claim.id for claim in ng.claims.ledger()]
    assert len(ids) == len(set(ids))
    assert len(LISTED) == 139 and set(LISTED) <= set(ids)
    assert set(ids) >= ADDED_BY_NAME


def test_every_claim_says_where_it_stands_and_how_it_is_judged():
    for claim in ng.claims.ledger():
        assert claim.printed and claim.place and claim.cite, claim.id
        if claim.kind == "empirical":
            assert claim.study and claim.criterion, claim.id
