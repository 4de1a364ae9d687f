"""Run the notebooks' sources, docs/notebooks/*.py, cell by cell, and write each with its results as .ipynb.

PYTHONPATH=src python docs/generate_notebooks.py [NAME ...]

A line `# %%` begins a cell of code, `# %% [markdown]` one of text. Needs no Jupyter.
"""

import ast
import contextlib
import io
import json
import re
import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "notebooks"
COLAB = "https://colab.research.google.com/github/normgauge/normgauge/blob/main/docs/notebooks"


def cells(text):
    """Return kind and source of every cell."""
    parts = re.split(r"^# %%( \[markdown\])?\n", text, flags=re.MULTILINE)[1:]
    for mark, body in zip(parts[::2], parts[1::2], strict=True):
        source = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if mark else body
        yield ("markdown" if mark else "code"), source.strip()


def run_cell(source, names):
    """Run a cell and return its outputs as a notebook keeps them: what was printed, then the last expression."""
    tree, printed, outputs = ast.parse(source), io.StringIO(), []
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    if value is not None:
        data = {"text/plain": str(value)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_()
        outputs.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    return outputs


def notebook(path):
    """Return a notebook, executed."""
    torch.set_default_dtype(torch.float32)
    names, made = {"__name__": "notebook"}, []
    badge = f"[Open in Colab]({COLAB}/{path.stem}.ipynb)"
    for number, (kind, source) in enumerate(cells(path.read_text(encoding="utf-8"))):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source}
        if number == 0:
            cell["source"] += f"\n\n{badge}"
        if kind == "code":
            cell |= {"execution_count": None, "outputs": [] if source.startswith("%") else run_cell(source, names)}
        made.append(cell)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def main():
    """Write those asked for, or all."""
    for path in sorted(FOLDER.glob("*.py")):
        if not sys.argv[1:] or path.stem in sys.argv[1:]:
            text = json.dumps(notebook(path), indent=1, ensure_ascii=False)
            path.with_suffix(".ipynb").write_text(text + "\n", encoding="utf-8")
            print(path.stem, len(text))


if __name__ == "__main__":
    main()
