"""`normgauge doctor package.module:factory`: findings about a model one can import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normgauge.cli._console import console
from normgauge.cli._symmetries import call_factory, random_inputs
from normgauge.errors import InputError

if TYPE_CHECKING:  # torch is imported by the verbs that need it, so that --help stays quick
    from normgauge.doctor import Checkup


def doctor(
    target: Annotated[
        str, typer.Argument(help="package.module:factory of a module, (module, batch) or Objective.")
    ] = "",
    example: Annotated[bool, typer.Option("--example", help="Look at the sick model of the package.")] = False,
    data: Annotated[str, typer.Option(help="package.module:function returning a batch or a loader of batches.")] = "",
    input: Annotated[str, typer.Option(help="Without data: shape of one input, such as 3x32x32.")] = "",
    tokens: Annotated[int, typer.Option(help="Without data: vocabulary, for models that read integers.")] = 0,
    batch: Annotated[int, typer.Option(help="Without data: samples in the random batch.")] = 32,
    optimizer: Annotated[str, typer.Option(help="package.module:function(model) that returns the optimizer.")] = "",
    against: Annotated[str, typer.Option(help="package.module:factory of another implementation.")] = "",
    ignore: Annotated[list[str] | None, typer.Option(help="Leave out: NG14, or NG14:layer1.* (repeatable)")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few gradients only.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show all findings in full.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print a SARIF log and nothing else.")] = False,
    html: Annotated[str, typer.Option(help="Write a page to this file as well.")] = "",
    fix: Annotated[str, typer.Option(help="Folder for the repaired state dict and the table of repairs.")] = "",
) -> None:
    """Find what is wrong with a model's normalization, prove it, explain it, fix it."""
    if bool(target) == example or (as_json and sarif):
        step = "Name a factory, or pass --example; choose --json or --sarif"
        raise InputError("doctor", "it looks at one model and prints one document", target or "nothing", step)
    inputs = (input, tokens, batch)
    checkup = _examine(target, data, inputs, optimizer, against, quick=quick, ignore=ignore or [])
    if as_json or sarif:
        typer.echo(json.dumps(checkup.sarif(target.partition(":")[0]), indent=2) if sarif else checkup.to_json())
    else:
        console().print(checkup.text(everything=everything))
    if html:
        from normgauge.documents import write_whole
        from normgauge.report import checkup_page

        title = "Checkup of the example" if example else f"Checkup of {target}"
        left = "".join(f" Not looked at: {name} ({why})." for name, why in checkup.left_out.items())
        footer = f"{len(checkup.checks)} checks, {checkup.cost}.{left}"
        page = checkup_page(map(vars, checkup), title=title, summary=checkup.meaning(), footer=footer)
        write_whole(Path(html), page)
    if fix:
        _write_fix(checkup, Path(fix), quiet=as_json or sarif)
    raise typer.Exit(0 if checkup.healthy else 1)


def _examine(target: str, data: str, inputs: tuple[str, int, int], optimizer: str, against: str, **how: Any) -> Checkup:
    from torch import nn

    from normgauge.doctor import checkup, sick_model
    from normgauge.lab.imports import call_function
    from normgauge.objective import Objective

    if not target:
        model, pair, own = sick_model()
        return checkup(model, pair, optimizer=own, **how)
    subject, given, loader = call_factory(target, ""), None, None
    if isinstance(subject, tuple) and len(subject) == 2:
        subject, given = subject
    if not isinstance(subject, (nn.Module, Objective)):
        step = "Return a module, (module, batch) or an Objective"
        raise InputError(f"doctor {target}", "the factory returns a model", type(subject).__name__, step)
    if data:
        given = call_function("data", data, "a function that returns a batch")
        if not isinstance(given, (tuple, dict)) and hasattr(given, "__iter__") and not hasattr(given, "ndim"):
            loader, given = given, next(iter(given))
    model = subject.model if isinstance(subject, Objective) else subject
    trainer = call_function("optimizer", optimizer, "function(model)", model) if optimizer else None
    real = isinstance(subject, Objective) or given is not None
    if not real:
        given = random_inputs(*inputs, 0)
    other = call_factory(against, "") if against else None
    other = other[0] if isinstance(other, tuple) else getattr(other, "model", other)
    return checkup(subject, given, optimizer=trainer, loader=loader, against=other, real=real, **how)


def _write_fix(checkup: Checkup, folder: Path, *, quiet: bool) -> None:
    import torch

    surgery = checkup.fix()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(surgery.model.state_dict(), folder / "state_dict.pt")
    torch.save(surgery.model, folder / "model.pt")
    rows = [{k: str(v) for k, v in row.items()} for row in surgery.rows]
    (folder / "repairs.json").write_text(json.dumps(rows, indent=2))
    if not quiet:
        typer.echo(str(surgery))
        typer.echo(f"written: {folder}/state_dict.pt, model.pt (the whole module: settings too), repairs.json")
