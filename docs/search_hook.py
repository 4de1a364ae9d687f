"""Make the search index light: words, not code and not tables of numbers; nothing twice. It is loaded by every page."""

import json
import re
from pathlib import Path

# Everything of this page is on a page of its own, one per claim.
TWICE = "_generated/ledger.html"
_CODE = re.compile(r"<pre>.*?</pre>", flags=re.DOTALL)
_TAG = re.compile(r"</?(?:code|strong|em|p|li|ul|ol|blockquote)>")


def on_page_content(content, page, **_):
    """Leave tables of numbers and of places out (mkdocs calls this with the page's HTML)."""
    if page.file.src_uri.startswith(("_generated/studies/", "_generated/index-of-papers", "claims/")):
        return content.replace("<table>", "<table data-search-exclude>")
    return content


def on_post_build(config, **_):
    """Rewrite the index (mkdocs calls this after the search plugin wrote it, and before it is made a script)."""
    path = Path(config.site_dir, "search", "search_index.json")
    index = json.loads(path.read_text(encoding="utf-8"))
    index["docs"] = list(entries(index["docs"]))
    path.write_text(json.dumps(index, separators=(",", ":"), ensure_ascii=False), encoding="utf-8")


def entries(docs):
    """Yield what can be found: each section once, in its words."""
    seen = set()
    for doc in docs:
        page, _, section = doc["location"].partition("#")
        if page == TWICE and section:
            continue
        text = " ".join(_TAG.sub(" ", _CODE.sub(" ", doc["text"])).split())
        if section and ((doc["title"], text) in seen or (not text and "attribute" in doc["title"])):
            continue
        seen.add((doc["title"], text))
        yield {**doc, "text": text}
