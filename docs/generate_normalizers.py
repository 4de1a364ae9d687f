"""Write docs/reference/normalizers.md from the register: `python docs/generate_normalizers.py`."""

from __future__ import annotations

from pathlib import Path

from normgauge.nn import registry
from normgauge.nn.registry import Declaration

PAGE = Path(__file__).parent / "reference" / "normalizers.md"

HEAD = """# Normalizers

<!-- Written by docs/generate_normalizers.py from the register; edit the declarations, not this page. -->

Every normalizer is declared as data: what it averages, where its statistics come from, what it is invariant to. The
table and the sections below are that data; `normgauge.testing.check_normalizer` tries every law of it.

```py
import normgauge as ng

ng.nn.registry.names()  # all names
layer = ng.nn.registry.get("group").layer(64, 2)  # for (batch, 64, height, width)
ng.nn.registry.get("weight").wrap(linear)  # weight normalizers change a layer in place
ng.nn.registry.get("stat:center=median,scale=l1")  # a design point of StatNorm
```

**How to read an invariance.** *Positive scale of the weights per row*: multiply each row of the weights before the
normalizer (and its bias) by a positive number of its own, and the output stays. A negative factor flips the sign of the
normalized output unless noted. *(eps = 0)*: exact only without the stabilizer; with it the deviation is of the order
eps / variance. *(train)*: only with statistics of the batch. A law per row holds per group and per tensor too. Scales
and shifts that are neither listed nor follow from the list do not leave the output as it was; the tests check that too.

**The design space.** `stat:axes=...,center=...,scale=...` names any point of `StatNorm`: axes batch, layer, instance,
group; center mean, median, none; scale std, rms, l1, l2, linf, any other `l<p>`, quantile (with `quantile=0.25`). Its
laws follow from the three words: scale is always divided out; a shift only with a centre and a scale that does not see
it (std, quantile).
"""


def table(declarations: list[Declaration]) -> str:
    """Return the overview as a Markdown table."""
    rows = ["| name | normalizer | averaged | statistics | formula |", "|---|---|---|---|---|"]
    for one in declarations:
        rows.append(f"| [`{one.name}`](#{one.name}) | {one.title} | {one.axes} | {one.statistics} | ${one.formula}$ |")
    # A bar inside a formula would end the cell.
    return "\n".join(rows[:2] + [row.replace("|x|", r"\lvert x \rvert") for row in rows[2:]])


def section(one: Declaration) -> str:
    """Return what a reader needs about one normalizer."""
    laws = [f"* {law}{_sign(law)}" for law in one.invariances] or ["* none"]
    where = {
        "activation": "a layer behind a linear map",
        "weights": "acts on a layer's weights",
        "none": "the identity",
    }
    needs = f" Training needs at least {one.smallest} values per channel." if one.smallest > 1 else ""
    return "\n".join(
        [
            f"## {one.name}",
            "",
            f"{one.title[0].upper()}{one.title[1:]}; {where[one.placement]}; averages {one.axes}.",
            "",
            f"$${one.formula}$$",
            "",
            f"{one.behaviour}{needs}",
            "",
            "Invariances:",
            "",
            *laws,
            "",
            f"References: {', '.join(f'`{key}`' for key in one.cite)}.",
        ]
    )


def _sign(law: registry.Invariance) -> str:
    if law.kind == "shift" or law.sign == "any":
        return ""
    return "; a negative factor flips the sign" if law.flips else "; a negative factor flips the part before the noise"


def page() -> str:
    """Return the whole page."""
    declarations = [registry.get(name) for name in registry.names()]
    return "\n\n".join([HEAD.strip(), table(declarations), *(section(one) for one in declarations)]) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
