"""`normgauge advise package.module:factory`: what to change in a training, with evidence, within a budget."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def advise(
    target: Annotated[str, typer.Argument(help="package.module:factory; factory(norm) or factory() returns a module")],
    data: Annotated[str, typer.Option(help="digits, text, ..., a folder, or package.module:function")] = "digits",
    optimizer: Annotated[str, typer.Option(help="package.module:function; function(model) returns the optimizer")] = "",
    loss: Annotated[str, typer.Option(help="package.module:function; function(output, target)")] = "",
    minutes: Annotated[float, typer.Option(help="budget of the races")] = 5.0,
    steps: Annotated[int, typer.Option(help="steps of a training run")] = 200,
    batch: Annotated[int, typer.Option(help="samples per step; 0: the data's own, or 64")] = 0,
    norm: Annotated[str, typer.Option(help="the factory's normalizer as given")] = "",
    out: Annotated[str, typer.Option(help="folder in which runs are kept, to go on later")] = "normgauge-out",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")] = False,
) -> None:
    """Say which normalizer, rate and decay to train with, what not to change, and what it could not decide."""
    from normgauge.lab.advise import advise as give_advice
    from normgauge.lab.data import load
    from normgauge.lab.imports import import_function

    found = give_advice(
        import_function("model", target, "a function factory(norm)"),
        load(data),
        loss=import_function("loss", loss, "a function") if loss else None,
        optimizer=import_function("optimizer", optimizer, "a function") if optimizer else None,
        budget=60 * minutes,
        steps=steps,
        batch=batch or None,
        norm=norm or None,
        out=out,
    )
    typer.echo(json.dumps(found.document(), indent=2) if as_json else str(found))
