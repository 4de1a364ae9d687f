"""`normgauge advise package.module:factory`: what to change in a training, with evidence, within a budget."""

import json
from typing import Annotated, Any

import typer


def advise(
    target: Annotated[str, typer.Argument(help="package.module:factory; factory(norm) or factory() returns a module.")],
    data: Annotated[str, typer.Option(help="digits, text, ..., a folder, or package.module:function.")] = "digits",
    optimizer: Annotated[
        str, typer.Option(help="package.module:function; function(model) returns the optimizer.")
    ] = "",
    loss: Annotated[str, typer.Option(help="package.module:function; function(output, target).")] = "",
    minutes: Annotated[float, typer.Option(help="Budget of the races.")] = 5.0,
    steps: Annotated[int, typer.Option(help="Steps of a training run.")] = 200,
    batch: Annotated[int, typer.Option(help="Samples per step; 0: the data's own, or 64.")] = 0,
    norm: Annotated[str, typer.Option(help="The factory's normalizer as given.")] = "",
    out: Annotated[str, typer.Option(help="Folder in which runs are kept, to go on later.")] = "normgauge-out",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Say which normalizer, rate and decay to train with, what not to change, and what it could not decide."""
    from normgauge.lab.advise import advise as give_advice
    from normgauge.lab.data import load
    from normgauge.lab.imports import import_function

    named = {"loss": loss, "optimizer": optimizer}
    own: dict[str, Any] = {knob: import_function(knob, name, "a function") for knob, name in named.items() if name}
    factory = import_function("model", target, "a function factory(norm)")
    more: dict[str, Any] = {"steps": steps, "batch": batch or None, "norm": norm or None, "out": out}
    found = give_advice(factory, load(data), budget=60 * minutes, **own, **more)
    typer.echo(json.dumps(found.document(), indent=2) if as_json else str(found))
