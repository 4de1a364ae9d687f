"""`normgauge symmetries package.module:factory --input 3x32x32`: the table for a model one can import."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normgauge.cli._console import console
from normgauge.errors import InputError

if TYPE_CHECKING:  # torch is imported by the verbs that need it, so that --help stays quick
    import torch

    from normgauge.objective import Objective


def symmetries(
    target: Annotated[str, typer.Argument(help="package.module:factory of a module or an Objective.")],
    input: Annotated[str, typer.Option(help="Shape of one input without the batch, such as 3x32x32.")] = "",
    tokens: Annotated[int, typer.Option(help="Vocabulary, for models that read integers.")] = 0,
    batch: Annotated[int, typer.Option(help="Samples in the random batch.")] = 32,
    mode: Annotated[str, typer.Option(help="Train or eval.")] = "train",
    norm: Annotated[str, typer.Option(help="Normalizer, for a factory(norm) as compare takes it.")] = "",
    of: Annotated[str, typer.Option(help="Outputs or loss (loss needs a factory of an Objective)")] = "outputs",
    seed: Annotated[int, typer.Option(help="Of inputs and probes.")] = 0,
    explain_: Annotated[bool, typer.Option("--explain", help="Print sentences per layer as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Print which changes of the parameters leave the model's outputs unchanged."""
    from normgauge.symmetry import symmetries as find_symmetries

    objective = load_objective(target, input, tokens=tokens, batch=batch, mode=mode, of=of, seed=seed, norm=norm)
    table = find_symmetries(objective, of=of, seed=seed)  # type: ignore[arg-type]
    if as_json:
        rows = table._rows()
        summary = {"dimension": table.dimension, "matrix_dimension": table.matrix_dimension, "mode": table.mode}
        typer.echo(json.dumps({**summary, "unobserved": table.unobserved, "families": rows}))
        return
    typer.echo(str(table))
    if explain_:
        console().print(table.explain())


def load_objective(
    target: str, shape: str, *, tokens: int, batch: int, mode: str, of: str, seed: int, norm: str = ""
) -> Objective:
    """Import a factory and make the objective the table is about."""
    import torch
    from torch import nn

    from normgauge.objective import Objective

    product = call_factory(target, norm)
    if isinstance(product, Objective):
        return product.replace(mode=mode)  # type: ignore[arg-type]
    if not isinstance(product, nn.Module):
        rule = "the factory returns a module or an Objective"
        raise InputError(f"symmetries {target}", rule, type(product).__name__, "Return one")
    if of == "loss":
        rule = "--of loss needs to know the loss"
        raise InputError(f"symmetries {target}", rule, "a module", "Return an Objective instead")
    inputs = random_inputs(shape, tokens, batch, seed)
    zeros = torch.zeros(batch)
    return Objective(product, lambda out, _: _first_tensor(out).square().mean(), (inputs, zeros), mode=mode)  # type: ignore[arg-type]


def _first_tensor(output: Any) -> torch.Tensor:
    """Return the first floating tensor of an output: only its existence matters here."""
    if hasattr(output, "square"):
        return output
    return _first_tensor(next(iter(output.values() if hasattr(output, "values") else output)))


def call_factory(target: str, norm: str) -> Any:
    """Call the factory without arguments, or with the name of a normalizer where it asks for one or one is given."""
    from normgauge.lab.imports import call_function, import_function

    factory = import_function("model", target, "a factory that returns a model")
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError) as error:
        rule = "the target is a function that returns a model"
        raise InputError(f"symmetries {target}", rule, str(error), "Name one") from error
    named = [item for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]
    required = [item.name for item in named if item.default is item.empty]
    if len(required) > 1 or (required and not norm) or (norm and not parameters):
        got = f"factory({', '.join(item.name for item in parameters)}) and --norm {norm!r}"
        step = "Pass --norm batch, or give its arguments defaults" if required else "Leave --norm out"
        raise InputError(f"symmetries {target}", "the factory takes nothing, or the name of a normalizer", got, step)
    return call_function("model", target, "a factory", *([norm] if norm else []))


def random_inputs(shape: str, tokens: int, batch: int, seed: int) -> torch.Tensor:
    import torch

    from normgauge.rng import generator

    try:
        sizes = tuple(int(size) for size in shape.split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or batch < 1:
        step = "Pass the shape of one input without the batch"
        raise InputError("symmetries", "--input is a shape like 3x32x32", repr(shape), step)
    if tokens:
        return torch.randint(0, tokens, (batch, *sizes), generator=generator(seed))
    return torch.randn(batch, *sizes, generator=generator(seed), dtype=torch.get_default_dtype())
