"""`normgauge data`: which data are here, and how to bring the others."""

import json
from pathlib import Path
from typing import Annotated

import typer

from normgauge.cli._console import console
from normgauge.records import format_table, without_empty_columns


def data(
    name: Annotated[
        str | None, typer.Argument(help="cifar10, cifar100, fashion-mnist or digits; none: a list.")
    ] = None,
    dir: Annotated[Path | None, typer.Option(help="Folder or archive of the data; or a new folder for them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")] = False,
) -> None:
    """Bring a dataset to this machine once, check it, and say where it is; without a name, list them."""
    from normgauge.lab import data as datasets

    notes = console(stderr=True)
    rows: list[dict[str, str | None]] = []
    if name is not None and name not in BUILT_IN:
        dataset = datasets.fetch(name, dir, say=notes.print)
        words = f"{dataset.train:,} + {len(dataset.rows) - dataset.train:,} images from {dataset.source}"
        rows = [_row(name, "ready", words, dataset.path)]
        if dataset.path.parent != datasets.data_folder():
            notes.print(f"To use them from there: export NORMGAUGE_DATA={dataset.path.parent.resolve()}")
    else:
        rows = [_row(own, "ready", words, None) for own, words in BUILT_IN.items() if name in (None, own)]
        states = [datasets.state(downloadable) for downloadable in datasets.KNOWN] if name is None else []
        rows += [_row(one.name, one.status, one.sentence, one.path) for one in states]
    if as_json:
        typer.echo(json.dumps(rows if name is None else rows[0]))
        return
    typer.echo(format_table(without_empty_columns(rows)))


def _row(name: str, status: str, sentence: str, path: Path | None) -> dict[str, str | None]:
    return {"name": name, "status": status, "sentence": sentence, "path": str(path) if path else None}


# Made on the spot or shipped with an installed package; nothing to fetch.
BUILT_IN = {
    "digits": "1,797 grey images of 8x8 in 10 classes, part of scikit-learn",
    "text": "Python's own help texts as characters, 360,000 of them: predict the next one",
    "gaussian": "the Gaussian regression of paper S1, made from a seed",
}
