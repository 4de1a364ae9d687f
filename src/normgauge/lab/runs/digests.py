"""What a run rests on beside its settings: digests of a user's own code and data, so that a change of them is seen."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from normgauge.errors import DataError, InputError
from normgauge.lab import data as datasets
from normgauge.lab import models
from normgauge.lab.imports import code_digests
from normgauge.records import Spec
from normgauge.store import canonical

#: Of a spec: module -> digest of a user's own model, and the digest of a user's own data. Others have neither.
CODE, DATA = "code", "data_digest"
#: Knobs that may name functions of a user.
FUNCTIONS = ("model", "optimizer", "train_step", "loss", "metric")


def own_digests(specs: Iterable[Spec], dataset: datasets.Dataset) -> dict[str, Any]:
    """Return what belongs to the identity of runs on a user's own code or data; nothing for what is published."""
    code: dict[str, str] = {}
    for spec in specs:
        code |= _own_code(spec)
    return ({CODE: code} if code else {}) | ({DATA: data_digest(dataset)} if datasets.is_own(dataset.name) else {})


def _own_code(spec: Spec) -> dict[str, str]:
    paths = [str(spec.get(knob, "")) for knob in FUNCTIONS]
    files = models.file_digests(paths[0]) if models.is_own(paths[0]) and ":" not in paths[0] else {}
    return {**files, **{name: digest for path in paths if ":" in path for name, digest in code_digests(path).items()}}


def data_digest(dataset: datasets.Dataset) -> str:
    """Return 16 hex digits of the SHA-256 over shapes, types and bytes of all splits.

    Examples:
        >>> gaussian = datasets.load("gaussian")
        >>> data_digest(gaussian) == data_digest(datasets.load("gaussian"))
        True
    """
    total = hashlib.sha256(f"{dataset.task} {dataset.classes}".encode())
    for split in (dataset.train, dataset.validation, dataset.test):
        for tensor in split:
            total.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()[:16]


def check_digests(spec: Spec, dataset: datasets.Dataset) -> None:
    """Refuse to run a spec on other code or data than it names, as a worker on another machine may have."""
    code = spec.get(CODE, {})
    if any(code.get(module) != digest for module, digest in (_own_code(spec) if code else {}).items()):
        rule, problem = "its source must be the one the comparison was started with", "another one"
        step = "Do not edit it while runs go on, and give every machine the same; then run the same command again"
        raise InputError(f"model {spec['model']!r}", rule, problem, step)
    if DATA in spec and spec[DATA] != data_digest(dataset):
        rule, problem = "the data must be the same whenever they are loaded", "others than at the start"
        raise DataError(f"data {dataset.name!r}", rule, problem, "Draw them by a fixed seed")


def changes_since(stored: Iterable[Spec], specs: Sequence[Spec]) -> list[str]:
    """Name what changed since runs were stored that differ from the specs in their digests only.

    Examples:
        >>> changes_since([{"lr": 1, "code": {"net": "a"}}], [{"lr": 1, "code": {"net": "b"}}])
        ['the code of net']
    """
    wanted = {_without_digests(spec): spec for spec in specs if CODE in spec or DATA in spec}
    changed: dict[str, None] = {}
    for old in stored if wanted else ():
        new = wanted.get(_without_digests(old))
        if new is not None:
            before, after = old.get(CODE, {}), new.get(CODE, {})
            for module in sorted({*before, *after}):
                if before.get(module) != after.get(module):
                    changed[f"the code of {module}"] = None
            if old.get(DATA) != new.get(DATA):
                changed[f"the data {new['data']}"] = None
    return list(changed)


def _without_digests(spec: Mapping[str, Any]) -> str:
    return canonical({key: value for key, value in spec.items() if key not in (CODE, DATA)})
