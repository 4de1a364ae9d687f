"""The committed page of normalizers is the one the register writes."""

import runpy
from pathlib import Path

from normgauge.nn import registry

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date():
    written = runpy.run_path(str(DOCS / "generate_normalizers.py"))["page"]()
    committed = (DOCS / "_generated" / "normalizers.md").read_text(encoding="utf-8")
    assert committed == written, "run make generated"


def test_the_page_shows_every_law():
    page = (DOCS / "_generated" / "normalizers.md").read_text(encoding="utf-8")
    for name in registry.names():
        declaration = registry.get(name)
        assert f"## {name}\n" in page
        assert all(str(law) in page for law in declaration.invariances)
