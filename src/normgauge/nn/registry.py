"""The register of normalizers: each one declared as data, looked up by name, built by its declaration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch

from normgauge.errors import InputError, unknown_name

Placement = Literal["none", "activation", "weights"]
Source = Literal["none", "batch", "sample", "group", "weights", "running"]
Per = Literal["row", "column", "group", "tensor", "sample", "sample_row", "sample_group"]
Gain = Literal["", "w", "1+w", "none"]
EpsPlace = Literal["", "inside", "outside", "none"]
Mode = Literal["train", "eval"]

_WORDS: dict[str, tuple[str, ...]] = {
    "placement": get_args(Placement),
    "statistics": get_args(Source),
    "of": ("input", "weights"),
    "kind": ("scale", "shift"),
    "per": get_args(Per),
    "sign": ("any", "positive"),
    "gain": get_args(Gain),
    "eps_place": get_args(EpsPlace),
}


def _check_words(record: Any) -> None:
    for item in fields(record):
        value = getattr(record, item.name)
        if item.name in _WORDS and value not in _WORDS[item.name]:
            raise InputError(
                type(record).__name__,
                f"{item.name} is one of {', '.join(_WORDS[item.name])}",
                repr(value),
                "Use one of these words, or extend the vocabulary in nn/registry.py",
            )


@dataclass(frozen=True, slots=True)
class Invariance:
    """One change that leaves the output of a normalizer as it was.

    Args:
        of: `input`, the tensor given to the normalizer; `weights`, those of the layer before it together with
            their bias (placement activation) or the raw weights of the layer itself (placement weights).
        kind: `scale` multiplies by a factor. `shift` adds: to an input, one number per block; to the weights before
            an activation normalizer, one vector to every row of the block (and one number to their biases); to the
            raw weights of a weight normalizer, one number to every entry of the block.
        per: the block that may have its own factor: `row` (channel, unit), `column` (input of raw weights), `group` (of
            channels), `tensor` (one for all), `sample`, `sample_row`, `sample_group`.
        sign: `positive`, promised for positive factors; `any`, for every factor but zero. Shifts take any sign.
        flips: for a positive scale, whether a negative factor flips the sign of the normalized output (before gain
            and bias) and does nothing else.
        exact: True, for every eps; False, only for eps = 0, and nearly where the scale is far above eps.
        modes: the modes in which it holds.
        spatial: the numbers of spatial axes for which it holds.

    Examples:
        >>> print(Invariance("weights", "scale", "row", exact=False, modes=("train",)))
        positive scale of the weights per row (eps = 0; train)
    """

    of: Literal["input", "weights"]
    kind: Literal["scale", "shift"]
    per: Per
    sign: Literal["any", "positive"] = "positive"
    flips: bool = True
    exact: bool = True
    modes: tuple[Mode, ...] = ("train", "eval")
    spatial: tuple[int, ...] = (0, 1, 2, 3)

    def __post_init__(self) -> None:
        """Refuse words outside the vocabulary: a law nobody tests is not a law."""
        _check_words(self)

    def __str__(self) -> str:
        """Return the law in words."""
        sign = "" if self.kind == "shift" else "any " if self.sign == "any" else "positive "
        limits = ([] if self.exact else ["eps = 0"]) + (list(self.modes) if len(self.modes) == 1 else [])
        limits += ["without space"] if self.spatial == (0,) else []
        tail = f" ({'; '.join(limits)})" if limits else ""
        return f"{sign}{self.kind} of the {self.of} per {self.per.replace('_', ' and ')}{tail}"


@dataclass(frozen=True, slots=True)
class Declaration:
    r"""A normalizer as data: what it averages, where its statistics come from, what it is invariant to.

    Args:
        name: the word users type.
        title: the words a table shows.
        placement: `activation` (a layer after a linear map), `weights` (a change of a layer's weights) or `none`.
        axes: what is averaged, in words.
        statistics: source of the statistics while training: batch, sample, group, weights, running or none.
        invariances: the laws, driven by the conformance suite, the docs and the claims.
        behaviour: one sentence on training and evaluation.
        formula: LaTeX of the forward map.
        cite: keys of `references.bib`.
        make: `(channels, spatial) -> Module`, for placement activation and none.
        parametrize: `(module) -> Module`, for placement weights.
        spatial: numbers of spatial axes for which the laws are declared; elsewhere `behaviour` says what happens.
        smallest: the fewest values per channel (batch times space) that training needs.
        noise: True where the output in training also depends on random numbers.
        detached: True where part of the map counts as a constant in the gradient, which then is no derivative.
        gain: how a gain is stored, `w`, `1+w` or `none`, in the words of `ng.identify`; empty: not declared.
        eps_place: of eps, `inside` the root, `outside` of it, or `none`; empty: not declared.

    Examples:
        >>> get("batch").layer(channels=3, spatial=2)(torch.randn(8, 3, 4, 4)).shape
        torch.Size([8, 3, 4, 4])
    """

    name: str
    title: str
    placement: Placement
    axes: str
    statistics: Source
    behaviour: str
    formula: str
    cite: tuple[str, ...]
    invariances: tuple[Invariance, ...] = ()
    make: Callable[[int, int], torch.nn.Module] | None = field(default=None, repr=False)
    parametrize: Callable[[torch.nn.Module], torch.nn.Module] | None = field(default=None, repr=False)
    spatial: tuple[int, ...] = (0, 1, 2, 3)
    smallest: int = 1
    noise: bool = False
    detached: bool = False
    gain: Gain = ""
    eps_place: EpsPlace = ""

    def __post_init__(self) -> None:
        """Refuse words outside the vocabulary and a declaration that cannot be built."""
        _check_words(self)
        wanted = self.parametrize if self.placement == "weights" else self.make
        if wanted is None:
            needed = "parametrize" if self.placement == "weights" else "make"
            raise InputError(
                f"Declaration({self.name!r})",
                f"placement {self.placement!r} needs {needed}",
                f"{needed}=None",
                "Give the function that builds the normalizer",
            )

    def layer(self, channels: int, spatial: int) -> torch.nn.Module:
        """Return a fresh layer for inputs `(batch, channels, *space)` with `spatial` axes of space.

        Raises:
            InputError: for a weight normalizer, and for sizes that make no layer.
        """
        if self.make is None:
            raise InputError(
                f"normalizer {self.name!r}",
                "layer() is for placement 'activation' and 'none'",
                f"placement {self.placement!r}",
                "Use wrap(module) on the Linear or Conv layer",
            )
        if channels < 1 or spatial not in (0, 1, 2, 3):
            raise InputError(
                f"normalizer {self.name!r}",
                "channels is at least 1 and spatial is 0, 1, 2 or 3",
                f"channels={channels}, spatial={spatial}",
                "Count the axes after (batch, channels)",
            )
        return self.make(channels, spatial)

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Normalize the weights of a Linear or Conv layer in place and return it.

        Raises:
            InputError: for an activation normalizer, and for a module without a weight.
        """
        if self.parametrize is None:
            raise InputError(
                f"normalizer {self.name!r}",
                "wrap() is for placement 'weights'",
                f"placement {self.placement!r}",
                "Put layer(channels, spatial) behind the Linear or Conv layer",
            )
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() < 2:
            raise InputError(
                f"normalizer {self.name!r}",
                "wrap() needs a module with a weight of at least two axes, as Linear and Conv have",
                type(module).__name__,
                "Wrap the Linear or Conv layer itself",
            )
        return self.parametrize(module)


@dataclass(frozen=True, slots=True)
class BlockPlacement:
    r"""Where normalizers N stand around a residual branch f of a stream x, and what a scale-invariant N hides by that.

    Args:
        name: the word users type.
        formula: LaTeX of the block.
        cite: keys of `references.bib`.
        before: N stands before the branch, which then does not see the scale of the stream.
        behind: N stands behind the branch, and the block does not see the scale of the branch's last matrix.
        around: N stands behind the sum, and the stream leaves with the size of N's output.
        interpolates: the block moves x a learned share of the way to the branch's output instead of adding it.
    """

    name: str
    formula: str
    cite: tuple[str, ...]
    before: bool = False
    behind: bool = False
    around: bool = False
    interpolates: bool = False


_SPHERE = r"N(x + \alpha (N(f(x)) - x))"
PLACEMENTS: dict[str, BlockPlacement] = {
    place.name: place
    for place in (
        BlockPlacement("pre", r"x + f(N(x))", ("xiong2020",), before=True),
        BlockPlacement("post", r"N(x + f(x))", ("vaswani2017",), around=True),
        BlockPlacement("sandwich", r"x + N(f(N(x)))", ("ding2021",), before=True, behind=True),
        BlockPlacement("output", r"x + N(f(x))", ("olmo2024",), behind=True),
        BlockPlacement("sphere", _SPHERE, ("loshchilov2025",), behind=True, around=True, interpolates=True),
    )
}

_DECLARATIONS: dict[str, Declaration] = {}
_FAMILIES: dict[str, Callable[[str], Declaration]] = {}


def register(declaration: Declaration) -> Declaration:
    """Add a declaration to the register and return it.

    Raises:
        InputError: if the name is taken, or contains a colon (reserved for design points of a family).
    """
    taken = declaration.name in _DECLARATIONS
    if taken or ":" in declaration.name:
        raise InputError(
            "registry.register",
            "a normalizer needs a name of its own, without a colon",
            f"{declaration.name!r}, {'already registered' if taken else 'with a colon'}",
            "Choose another name",
        )
    _DECLARATIONS[declaration.name] = declaration
    return declaration


def register_family(name: str, build: Callable[[str], Declaration]) -> None:
    """Let `get("name:options")` build design points of a family; `build` gets the text after the colon.

    Raises:
        InputError: if the family exists.
    """
    if name in _FAMILIES:
        raise InputError(
            "registry.register_family", "a family needs a name of its own", repr(name), "Choose another name"
        )
    _FAMILIES[name] = build


def names() -> tuple[str, ...]:
    """Return the names of all registered normalizers, "none" first, the others in alphabetical order.

    Examples:
        >>> {"none", "batch", "layer"} <= set(names())
        True
    """
    return tuple(sorted(_DECLARATIONS, key=lambda name: (name != "none", name)))


def get(name: str) -> Declaration:
    """Return the declaration of a name, or of a design point such as `stat:center=median,scale=rms`.

    Raises:
        UnknownNameError: naming the nearest known normalizer.

    Examples:
        >>> get("layer").statistics
        'sample'
    """
    if name in _DECLARATIONS:
        return _DECLARATIONS[name]
    family, colon, options = name.partition(":")
    if colon and family in _FAMILIES:
        return _FAMILIES[family](options)
    raise unknown_name("normalizer", name, _DECLARATIONS, "Your own: ng.nn.registry.register(Declaration(...)) first")
