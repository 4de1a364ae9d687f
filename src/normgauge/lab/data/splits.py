"""Data as tensors in memory: digits, text, Gaussian regression, CIFAR, Fashion-MNIST, an image folder, a user's own."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from normgauge.errors import DataError, MissingDataError, require, unknown_name
from normgauge.lab.data.catalogue import KNOWN, open_folder, open_known
from normgauge.lab.data.prepared import Prepared
from normgauge.lab.imports import call_function
from normgauge.rng import generator

Task = Literal["classification", "regression"]


@dataclass(frozen=True)
class Dataset:
    """Three splits held in memory as tensors: train to learn, validation to tune, test to report.

    Attributes:
        name: how the dataset is called.
        task: "classification" (integer targets) or "regression".
        train: (inputs, targets).
        validation: (inputs, targets); learning rates are chosen on it.
        test: (inputs, targets); never used for a choice.
        classes: the number of outputs a model needs.
        own_loss: `loss(outputs, targets)` in the place of cross-entropy or squared error.
        metric: `metric(outputs, targets) -> float` on a whole split, what a user judges by.
    """

    name: str
    task: Task
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int
    own_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    metric: Callable[[Tensor, Tensor], Any] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train[0].shape[1:])

    @property
    def is_plain(self) -> bool:
        """Whether it is judged as usual: one label for each sample, no loss or metric of a user's own."""
        return self.own_loss is None and self.metric is None and self.train[1].ndim == 1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return cross-entropy or mean squared error, a mean over the samples.

        Targets (samples, positions), as of text, go with outputs (samples, positions, classes): a mean over all of
        them. The regression loss is |output - target|^2 summed over components and averaged over samples, as in S1.
        """
        if self.own_loss is not None:
            return self.own_loss(output, target)
        if self.task == "classification":
            return torch.nn.functional.cross_entropy(output.flatten(0, target.ndim - 1), target.flatten())
        return (output - target).square().flatten(1).sum(dim=1).mean()


def digits() -> Dataset:
    """Return scikit-learn's bundled 8x8 digits: 1797 images, 10 classes, standardized.

    The split (1149 / 288 / 360) is fixed, so that runs differ by their own seed only.
    """
    sklearn_data = require("sklearn.datasets", "lab", "the digits data")
    bunch = sklearn_data.load_digits()
    inputs = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1)
    targets = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(targets), generator=generator(0))
    parts = order[:1149], order[1149:1437], order[1437:]
    mean, deviation = inputs[parts[0]].mean(), inputs[parts[0]].std()
    inputs = (inputs - mean) / deviation
    train, validation, test = ((inputs[part], targets[part]) for part in parts)
    return Dataset("digits", "classification", train, validation, test, classes=10)


def gaussian() -> Dataset:
    """Return S1's regression: x ~ N(0, I_10), target A x with A a 10x10 Gaussian matrix, 1000 training samples.

    References: santurkar2018.
    """
    source = generator(0)
    matrix = torch.randn(10, 10, generator=source)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(count, 10, generator=source)
        return inputs, inputs @ matrix.T

    return Dataset("gaussian", "regression", draw(1000), draw(500), draw(500), classes=10)


ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # a token is the index of a character here
_RULES = re.compile(r"^[ |+*=~-]{8,}\n?", re.MULTILINE)  # lines under titles and in tables
_PLAIN = str.maketrans("\u201c\u201d\u2018\u2019\u2013\u2014", "\"\"''--")


def text(context: int = 64) -> Dataset:
    """Return the help texts that every Python carries (`help("topics")`), as characters: predict the next one.

    Topics stand in alphabetical order and repeat each other, so of equal paragraphs the first stays; lines that draw
    tables go: about 360,000 characters, tokens of `ALPHABET` (96; others become "?"). Inputs are rows of `context`
    tokens, targets the same rows one further. Of every ten blocks of 16 rows the ninth is held out for validation and
    the tenth for test. Each version of Python has its own texts: runs carry a digest of them.

    Raises:
        MissingDataError: where Python was installed without them.

    Examples:
        >>> inputs, targets = text().train
        >>> bool((inputs[:, 1:] == targets[:, :-1]).all()), "".join(ALPHABET[token] for token in inputs[0, :22])
        (True, 'The "assert" statement')
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        rule, step = "Python must have its help texts", "Install it whole"
        raise MissingDataError("data 'text'", rule, str(error), step) from error
    unique: dict[str, str] = {}
    for part in "\n\n".join(topics[name].translate(_PLAIN) for name in sorted(topics)).split("\n\n"):
        unique.setdefault(" ".join(part.split()), _RULES.sub("", part))
    whole = "\n\n".join(filter(str.strip, unique.values())).encode("ascii", "replace")
    codes = np.frombuffer(whole, dtype=np.uint8).astype(np.int64)
    tokens = torch.from_numpy(np.where(codes == 10, 0, np.where((codes < 32) | (codes > 126), ord("?"), codes) - 31))
    count = (len(tokens) - 1) // context
    inputs, targets = (tokens[shift : shift + count * context].view(count, context) for shift in (0, 1))
    block = torch.arange(count) // 16 % 10
    train, validation, test = ((inputs[part], targets[part]) for part in (block < 8, block == 8, block == 9))
    return Dataset("text", "classification", train, validation, test, classes=len(ALPHABET))


_MADE: dict[str, Callable[[], Dataset]] = {"digits": digits, "gaussian": gaussian, "text": text}
_SUBSET = re.compile(r":(\d+)(?:/(\d+))?(?:/(\d+))?$")
# A validation split of this share is cut from the training images, which the published sets do not split further.
_VALIDATION_SHARE = 10


def names() -> tuple[str, ...]:
    """Return the names `load` knows."""
    return (*_MADE, *KNOWN)


def is_own(name: str) -> bool:
    """Say whether a dataset's name does not say what is in it: a user's folder or function, the text of a Python.

    Examples:
        >>> [is_own(name) for name in ("digits", "cifar10:4000/500/500", "./photos", "mymodule:function", "text")]
        [False, False, True, True, True]
    """
    return name == "text" or _SUBSET.sub("", name) not in names()


def load(name: str) -> Dataset:
    """Return a dataset by name; nothing is downloaded.

    Images are uint8 on disk and become float32 here, standardized per channel by the mean and standard deviation of
    the training split. The splits are drawn once, by a fixed seed, so that runs differ by their own seed only.

    Args:
        name: digits, gaussian or text; cifar10, cifar100 or fashion-mnist, brought by `normgauge data`; the path of a
            folder or archive of images (it must contain a slash); or `package.module:function`, whose function returns
            a `Dataset` or three pairs (inputs, targets) for training, validation and test. For images,
            `name:TRAIN/VALIDATION/TEST` takes that many of each, as in `cifar10:10000/1000/2000`; what is left out is
            a fifth of TRAIN.

    Raises:
        UnknownNameError: for a name that is not known, with the nearest one.
        MissingDataError: for a known dataset that is not on this machine.
        DataError: when a subset is larger than the set, or a user's function or folder gives no data.
    """
    if name in _MADE:
        return _MADE[name]()
    subset = _SUBSET.search(name)
    whole = name[: subset.start()] if subset else name
    if whole in KNOWN:
        prepared = open_known(whole)
    elif "/" in whole or os.sep in whole:
        prepared = open_folder(Path(whole))
    elif ":" in name and subset is None:
        return _load_from_function(name)
    else:
        raise unknown_name("data", name, names(), "Or pass package.module:function, or a path with a slash")
    counts = _counts(name, prepared, subset)
    stamp = prepared.path.stat()
    return _split(name, str(prepared.path), counts, (stamp.st_mtime_ns, stamp.st_size))


def _counts(name: str, prepared: Prepared, subset: re.Match[str] | None) -> tuple[int, int, int]:
    """Return how many training, validation and test images to take."""
    there, testing = prepared.train, len(prepared.rows) - prepared.train
    if subset is None:
        held = there // _VALIDATION_SHARE
        return there - held, held, testing
    train = int(subset[1])
    held, tested = (int(subset[part]) if subset[part] else max(train // 5, 1) for part in (2, 3))
    if min(train, held, tested) < 1 or train + held > there or tested > testing:
        rule = f"training and validation together hold 1 to {there} images, test 1 to {testing}"
        raise DataError(f"data {name!r}", rule, f"{train} + {held} and {tested}", "Ask for fewer")
    return train, held, tested


@lru_cache(maxsize=2)  # the runs of a sweep share their data; two, so that a study on two sets does not thrash
def _split(name: str, path: str, counts: tuple[int, int, int], stamp: tuple[int, int]) -> Dataset:
    """Cut the splits out of the file by a fixed permutation and standardize them by the training split."""
    del stamp  # part of the key only: a file that was fetched anew is read anew
    rows = np.load(path, mmap_mode="r", allow_pickle=False)
    there = int(np.count_nonzero(rows["test"] == 0))
    order = torch.randperm(there, generator=generator(0)).numpy()
    others = there + torch.randperm(len(rows) - there, generator=generator(1)).numpy()
    chosen = order[: counts[0]], order[counts[0] : counts[0] + counts[1]], others[: counts[2]]
    parts = []
    for part in map(np.sort, chosen):
        pixels = torch.from_numpy(rows["pixels"][part].astype(np.float32))  # torch computes little with 16 bits
        parts.append((pixels, torch.from_numpy(rows["label"][part].astype(np.int64))))
    inputs = parts[0][0]
    mean = inputs.mean(dim=(0, 2, 3), keepdim=True)
    deviation = inputs.std(dim=(0, 2, 3), keepdim=True).clamp_min(1e-6)
    for images, _ in parts:
        images.sub_(mean).div_(deviation)
    train, validation, test = parts
    return Dataset(name, "classification", train, validation, test, classes=int(rows["label"].max()) + 1)


def _load_from_function(path: str) -> Dataset:
    product = call_function("data", path, "a function that returns data")
    if isinstance(product, Dataset):
        return _check_splits(replace(product, name=path))  # the name is how a worker process finds it again
    try:
        train, validation, test = ((inputs, targets) for inputs, targets in product)
        if not all(isinstance(part, Tensor) for pair in (train, validation, test) for part in pair):
            raise TypeError
    except (TypeError, ValueError) as error:
        rule = "the function must return three pairs of tensors (inputs, targets): training, validation, test"
        step = "Return them, or a normgauge.lab.data.Dataset"
        raise DataError(f"data {path!r}", rule, type(product).__name__, step) from error
    targets = train[1]
    task: Task = "regression" if targets.is_floating_point() else "classification"
    classes = (targets.shape[1] if targets.ndim > 1 else 1) if task == "regression" else _highest(targets) + 1
    return _check_splits(Dataset(path, task, train, validation, test, classes))


def _check_splits(data: Dataset) -> Dataset:
    """Return a user's dataset with labels as torch wants them; what no training could use is refused by name."""
    for split in ("train", "validation", "test"):
        inputs, targets = getattr(data, split)
        problem = _problem(data, inputs, targets)
        if problem:
            rule, got, remedy = problem
            raise DataError(f"data {data.name!r}, {split} split", rule, got, remedy)
    if data.task == "regression":
        return data
    train, validation, test = ((x, y.long()) for x, y in (data.train, data.validation, data.test))
    return replace(data, train=train, validation=validation, test=test)


def _problem(data: Dataset, inputs: Tensor, targets: Tensor) -> tuple[str, str, str] | None:
    """Return rule, what came and the next step where a split cannot be trained or tested on."""
    if inputs.ndim == 0 or targets.ndim == 0 or not len(inputs) or len(inputs) != len(targets):
        counts = " and ".join(str(len(part) if part.ndim else "a single number") for part in (inputs, targets))
        return "there is one target for each input, and at least one", counts, "Check how the split is cut"
    if inputs.shape[1:] != data.train[0].shape[1:]:
        rule = f"inputs have the shape of those of training, {tuple(data.train[0].shape[1:])}"
        return rule, str(tuple(inputs.shape[1:])), "Prepare all splits alike"
    for name, part in (("inputs", inputs), ("targets", targets)):
        bad = int((~torch.isfinite(part)).sum()) if part.is_floating_point() or part.is_complex() else 0
        if bad:
            return "data are finite", f"{bad} of {part.numel()} numbers in the {name} nan or infinite", "Clean the data"
    if data.task == "regression":
        if not targets.is_floating_point() or targets.ndim < 2:
            remedy = "Return targets[:, None]; labels of classes are integers: targets.long()"
            return "targets of a regression are floats (samples, components, ...)", str(tuple(targets.shape)), remedy
        return None
    if targets.is_floating_point() or targets.is_complex():
        return "labels of classes are integers", f"targets of {targets.dtype}", "Return targets.long()"
    if int(targets.min()) < 0 or _highest(targets) >= data.classes:
        rule = f"labels lie between 0 and {data.classes - 1}, the highest of training"
        return rule, f"labels from {int(targets.min())} to {_highest(targets)}", "Check the labels"
    return None


def _highest(labels: Tensor) -> int:
    return int(labels.max()) if labels.numel() else -1
