"""`normgauge surgery fold package.module:factory --checkpoint in.safetensors --out out.safetensors`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from normgauge.cli._symmetries import load_objective
from normgauge.errors import InputError, unknown_name

_VERBS = {verb: f"{verb}_norms" for verb in ("fold", "swap", "freeze", "guard", "split", "recalibrate")}
_VERBS |= {"strip": "strip_biases", "canonicalize": "canonicalize", "layer-to-rms": "layer_to_rms"}
_VERBS |= {"rotate": "rotate_stream", "prune": "prune_norms"}


def surgery(
    operation: Annotated[str, typer.Argument(help=", ".join(_VERBS))],
    target: Annotated[str, typer.Argument(help="package.module:factory of a module or an Objective.")],
    out: Annotated[Path, typer.Option(help="New weights, .safetensors or .pt; a recipe is written beside them.")],
    checkpoint: Annotated[Path | None, typer.Option(help="Weights to begin with, .safetensors or .pt.")] = None,
    input: Annotated[str, typer.Option(help="Shape of one input without the batch, such as 3x32x32.")] = "",
    tokens: Annotated[int, typer.Option(help="Vocabulary, for models that read integers.")] = 0,
    batch: Annotated[int, typer.Option(help="Samples in the random example.")] = 8,
    data: Annotated[str, typer.Option(help="package.module:loader, for recalibrate.")] = "",
    to: Annotated[str, typer.Option(help="Normalizer, for swap.")] = "",
    where: Annotated[str, typer.Option(help="Glob of modules, for swap, freeze, guard, split, recalibrate.")] = "",
    rotation: Annotated[str, typer.Option(help="Random, pca or hadamard.")] = "random",
    by: Annotated[str, typer.Option(help="Gamma, similar, random or correlation, for prune.")] = "correlation",
    share: Annotated[float, typer.Option(help="Of the channels, for prune.")] = 0.5,
    untie: Annotated[bool, typer.Option("--untie", help="Let tied weights part: fold, layer-to-rms, rotate.")] = False,
    seed: Annotated[int, typer.Option(help="Of the example and of what is random.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Change the normalization of a trained network, with proof; exit code 1 where nothing could be done."""
    if operation not in _VERBS:
        raise unknown_name("operation", operation, _VERBS)
    import normgauge.surgery as room
    from normgauge.lab.imports import call_function

    objective = load_objective(target, input, tokens=tokens, batch=batch, mode="eval", of="outputs", seed=seed)
    model, example = objective.model, next(iter(objective.batches()))[1][0]
    if checkpoint is not None:
        result = model.load_state_dict(room.load_weights(checkpoint), strict=False)
        if result.unexpected_keys or len(result.missing_keys) > len(dict(room.ties(model))):
            got = f"missing {result.missing_keys[:3]}, unexpected {result.unexpected_keys[:3]}"
            step = "Give the checkpoint of this factory's model"
            raise InputError(f"surgery {target}", "the checkpoint fits the model", got, step)
    options: dict[str, Any] = {"example": example}
    if operation in ("swap", "freeze", "guard", "split", "recalibrate") and where:
        options["where"] = where
    if operation in ("fold", "layer-to-rms", "rotate"):
        options["untie"] = untie
    arguments: tuple[Any, ...] = ()
    if operation == "swap":
        arguments = (to,)
    elif operation == "rotate":
        arguments, options["seed"] = (rotation,), seed
    elif operation == "prune":
        arguments, options["seed"] = (by, share), seed
    elif operation == "recalibrate":
        del options["example"]
        arguments = (call_function("data", data, "a function that returns batches") if data else [example],)
    done = getattr(room, _VERBS[operation])(model, *arguments, **options)
    recipe = room.save(done, out, factory=target)
    if as_json:
        facts = {"operation": done.operation, "proof": done.proof, "change": done.change, "refused": list(done.refused)}
        typer.echo(json.dumps({**facts, "weights": str(out), "recipe": str(recipe)}))
    else:
        typer.echo(str(done))
        typer.echo(f"weights {out}, recipe {recipe}", err=True)
    if all("left alone" in row["what"] for row in done.rows):
        sys.exit(1)
