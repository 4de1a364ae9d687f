"""Fill the gallery's page from its files, their pictures and their sentences, while the site is built."""

import ast
import json
from pathlib import Path

DOCS = Path(__file__).parent


def on_page_markdown(markdown, page, **_):
    """Write the tiles and the examples (mkdocs calls this with a page's text)."""
    return markdown.replace("<!-- gallery -->", examples()) if page.file.src_uri == "gallery.md" else markdown


def examples():
    """Return the tiles, then every example with its picture, its sentence and its code."""
    cached = json.loads((DOCS / "_generated" / "gallery" / "index.json").read_text(encoding="utf-8"))
    tiles, parts = [], []
    for path in sorted((DOCS / "gallery").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        said = ast.get_docstring(ast.parse(source))
        picture = f"_generated/gallery/{path.stem}.svg"
        title = said.split(": ")[0].split("? ")[0] + ("?" if "? " in said else "")
        tiles.append(f'<a href="#{path.stem}"><img src="{picture}" alt="" loading="lazy"><br>{title}</a>')
        code = source.partition('"""\n\n')[2].rstrip()
        head = f'<h2 id="{path.stem}">{title}</h2>'
        parts += [head, f"![{said}]({picture})", cached[path.stem]["meaning"], f"```py\n{code}\n```"]
    return '<div class="gallery">\n' + "\n".join(tiles) + "\n</div>\n\n" + "\n\n".join(parts)
