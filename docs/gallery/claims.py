"""Is this paper's claim true? verdicts of the ledger, by paper."""

import normgauge as ng

result = ng.claims.ledger(paper="S1").judge()
