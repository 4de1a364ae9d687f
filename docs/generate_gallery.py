"""Run the examples of docs/gallery/ and keep a picture and a sentence of each in docs/_generated/gallery/.

PYTHONPATH=src python docs/generate_gallery.py [NAME ...]

An example runs again only where its text has changed; `make docs` runs none.
"""

import ast
import hashlib
import json
import runpy
import sys
from pathlib import Path

import torch

from normgauge.charts import svg

EXAMPLES = Path(__file__).parent / "gallery"
OUT = Path(__file__).parent / "_generated" / "gallery"


def digest(path):
    """Return what an example's cached picture belongs to, whatever its layout."""
    return hashlib.sha256(ast.dump(ast.parse(path.read_text(encoding="utf-8"))).encode()).hexdigest()[:12]


def run(path):
    """Run one example and return its picture and what it means."""
    torch.set_default_dtype(torch.float32)
    result = runpy.run_path(str(path))["result"]
    meaning = result.meaning() if hasattr(result, "meaning") else str(result).strip().splitlines()[-1]
    return svg(result.chart(), path.stem), meaning


def main():
    """Run what was asked for, or what has changed."""
    OUT.mkdir(parents=True, exist_ok=True)
    index = OUT / "index.json"
    cached = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {}
    examples = {path.stem: path for path in sorted(EXAMPLES.glob("*.py"))}
    for name, path in examples.items():
        if name in sys.argv[1:] or (not sys.argv[1:] and cached.get(name, {}).get("digest") != digest(path)):
            picture, meaning = run(path)
            (OUT / f"{name}.svg").write_text(picture + "\n", encoding="utf-8")
            cached[name] = {"digest": digest(path), "meaning": meaning}
            print(f"{name}: {len(picture)} characters; {meaning}", flush=True)
            index.write_text(json.dumps({key: cached[key] for key in examples if key in cached}, indent=1) + "\n")


if __name__ == "__main__":
    main()
