"""The register of normalizers: each one declared as data, looked up by name, built by its declaration."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

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
    "gain": get_args(Gain),
    "eps_place": get_args(EpsPlace),
}


def _check_words(record: Any) -> None:
    for item in fields(record):
        value = getattr(record, item.name)
        if item.name in _WORDS and value not in _WORDS[item.name]:
            rule = f"{item.name} is one of {', '.join(_WORDS[item.name])}"
            raise InputError(type(record).__name__, rule, repr(value), "Use one of these words")


@dataclass(frozen=True, slots=True)
class Invariance:
    """One change that leaves the output of a normalizer as it was.

    Args:
        of: `input`, the tensor given to the normalizer; `weights`, those of the layer before it together with
            their bias (placement activation) or the raw weights of the layer itself (placement weights).
        kind: `scale` multiplies by a positive factor. `shift` adds: to an input, one number per block; to the weights
            before an activation normalizer, one vector to every row of the block (and one number to their biases);
            to the raw weights of a weight normalizer, one number to every entry of the block.
        per: the block that may have its own factor: `row` (channel, unit), `column` (input of raw weights), `group` (of
            channels), `tensor` (one for all), `sample`, `sample_row`, `sample_group`.
        flips: of a scale, whether a negative factor flips the sign of the normalized output (before gain and bias)
            and does nothing else.
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
    flips: bool = True
    exact: bool = True
    modes: tuple[Mode, ...] = ("train", "eval")
    spatial: tuple[int, ...] = (0, 1, 2, 3)

    def __post_init__(self) -> None:
        """Refuse words outside the vocabulary: a law nobody tests is not a law."""
        _check_words(self)

    def __str__(self) -> str:
        """Return the law in words."""
        sign = "" if self.kind == "shift" else "positive "
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
        needed = "parametrize" if self.placement == "weights" else "make"
        if getattr(self, needed) is None:
            self._refuse(f"placement {self.placement!r} needs {needed}", "None", "Give the function that builds it")

    def _refuse(self, rule: str, got: str, step: str) -> NoReturn:
        raise InputError(f"normalizer {self.name!r}", rule, got, step)

    def layer(self, channels: int, spatial: int) -> torch.nn.Module:
        """Return a fresh layer for inputs `(batch, channels, *space)` with `spatial` axes of space."""
        if self.make is None:
            self._refuse("layer() is for activations", "placement 'weights'", "Use wrap(module) on the Linear or Conv")
        if channels < 1 or spatial not in (0, 1, 2, 3):
            rule, got = "channels is at least 1 and spatial is 0, 1, 2 or 3", f"channels={channels}, spatial={spatial}"
            self._refuse(rule, got, "Count the axes after (batch, channels)")
        return self.make(channels, spatial)

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Normalize the weights of a Linear or Conv layer in place and return it."""
        if self.parametrize is None:
            step = "Put layer(channels, spatial) behind the Linear or Conv layer"
            self._refuse("wrap() is for placement 'weights'", f"placement {self.placement!r}", step)
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() < 2:
            rule = "wrap() needs a module with a weight of at least two axes, as Linear and Conv have"
            self._refuse(rule, type(module).__name__, "Wrap the Linear or Conv layer itself")
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

_OURS = tomllib.loads(Path(__file__).with_name("normalizers.toml").read_text(encoding="utf-8"))
_DECLARATIONS: dict[str, Declaration] = {}
FAMILIES: dict[str, Callable[[str], Declaration]] = {}  # `get("name:options")` builds from the text after the colon


def register(declaration: Declaration) -> Declaration:
    """Add a declaration to the register and return it."""
    taken = declaration.name in _DECLARATIONS
    if taken or ":" in declaration.name:
        got = f"{declaration.name!r}, {'already registered' if taken else 'with a colon'}"
        rule = "a normalizer needs a name of its own, without a colon"
        raise InputError("registry.register", rule, got, "Choose another name")
    _DECLARATIONS[declaration.name] = declaration
    return declaration


def declare(name: str, **builder: Any) -> None:
    """Register one of our own, whose words and laws stand in `normalizers.toml`, with its `make` or `parametrize`."""
    facts = {"placement": "activation", **_OURS[name], **builder}
    laws = [Invariance(**_tuples(law)) for law in facts.pop("invariances", ())]
    register(Declaration(name=name, invariances=tuple(laws), **_tuples(facts)))


def _tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


def names() -> tuple[str, ...]:
    """Return the names of all registered normalizers, "none" first, the others in alphabetical order.

    Examples:
        >>> {"none", "batch", "layer"} <= set(names())
        True
    """
    return tuple(sorted(_DECLARATIONS, key=lambda name: (name != "none", name)))


def get(name: str) -> Declaration:
    """Return the declaration of a name, or of a design point such as `stat:center=median,scale=rms`.

    An unknown name is refused with the nearest known one (UnknownNameError).

    Examples:
        >>> get("layer").statistics
        'sample'
    """
    if name in _DECLARATIONS:
        return _DECLARATIONS[name]
    family, colon, options = name.partition(":")
    if colon and family in FAMILIES:
        return FAMILIES[family](options)
    raise unknown_name("normalizer", name, _DECLARATIONS, "Your own: ng.nn.registry.register(Declaration(...)) first")


declare("none", make=lambda channels, spatial: torch.nn.Identity())
