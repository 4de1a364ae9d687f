"""Data that are broken, hostile or deeper than 8 bits: read right, or refused with a sentence before training."""

import gzip
import io
import json
import os
import struct
import sys
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from normgauge.errors import DataError, InputError
from normgauge.lab import data
from normgauge.lab.data import containers, layouts, prepared, splits
from normgauge.lab.data.catalogue import open_folder
from normgauge.lab.imports import import_function

pillow = pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMGAUGE_DATA", str(tmp_path / "cache"))
    splits._split.cache_clear()


def png(array):
    stream = io.BytesIO()
    pillow.fromarray(array).save(stream, "PNG")
    return stream.getvalue()


def class_folders(root, image, files=2):
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(files):
                (root / split / name / f"{number}.png").write_bytes(image)
    return root


def test_sixteen_bits_of_grey_stay(tmp_path):
    values = np.array([[0, 255, 256], [1000, 40_000, 65_535]], dtype=np.uint16)
    place = class_folders(tmp_path / "deep", png(values))
    rows = open_folder(place).rows
    assert rows["pixels"].dtype == np.uint16 and np.array_equal(rows["pixels"][0, 0], values)
    (place / "train/cat/1.png").write_bytes(png((values // 2).astype(np.uint16)))
    loaded = data.load(f"{place}:2/1/2")
    assert loaded.train[0].dtype == torch.float32 and float(loaded.train[0].std()) > 0.5
    (place / "train/cat/1.png").write_bytes(png((values // 256).astype(np.uint8)))
    with pytest.raises(DataError, match="one size and depth"):
        open_folder(place)


def test_values_that_no_depth_holds_are_refused(tmp_path):
    stream = io.BytesIO()
    pillow.fromarray(np.array([[0.5, 2.5]], dtype=np.float32)).save(stream, "TIFF")
    with pytest.raises(DataError, match="8 or 16 bits"):
        layouts.read(class_folders(tmp_path / "floats", stream.getvalue()))


def test_pictures_with_too_many_pixels_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    place = class_folders(tmp_path / "bombs", png(np.zeros((64, 65), np.uint8)))
    monkeypatch.setattr(layouts, "MOST_PIXELS", 4096)
    with pytest.raises(DataError, match="65 x 64 pixels, more than 4,096"):
        layouts.read(place)
    monkeypatch.setattr(layouts, "MOST_PIXELS", 2**20)
    monkeypatch.setattr(layouts, "LARGEST_SUM", 3 * 64 * 65)
    with pytest.raises(DataError, match="when decoded"):
        layouts.read(place)


@pytest.mark.parametrize("kind", ["folder", "zip", "tar.gz"])
@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [("LARGEST_SUM", 200, "all files of it"), ("LARGEST_FILE", 60, "one file of it"), ("MOST_FILES", 5, "files")],
)
def test_containers_have_limits(tmp_path, monkeypatch, kind, limit, value, words):
    place = class_folders(tmp_path / "images", png(np.zeros((4, 4), np.uint8)))
    if kind == "zip":
        with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(place.rglob("*.png")):
                archive.write(file, file.relative_to(place))
        place = tmp_path / "a.zip"
    elif kind == "tar.gz":
        with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
            archive.add(place, ".")
        place = tmp_path / "a.tar.gz"
    assert len(layouts.read(place).pixels) == 8
    monkeypatch.setattr(containers, limit, value)
    with pytest.raises(DataError, match=words):
        layouts.read(place)


def test_a_bomb_beside_the_images_is_not_unpacked(tmp_path, monkeypatch):
    """To find the next member of a compressed tar everything before it is unpacked, wanted or not."""
    monkeypatch.setattr(containers, "LARGEST_SUM", 2**16)
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        member = tarfile.TarInfo("zeros.bin")
        member.size = 2**17
        archive.addfile(member, io.BytesIO(bytes(2**17)))
    with pytest.raises(DataError, match="all files of it may hold 0 MiB when unpacked"):
        layouts.read(tmp_path / "a.tgz")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_pipes_and_devices_are_refused_instead_of_read(tmp_path):
    place = class_folders(tmp_path / "images", png(np.zeros((4, 4), np.uint8)))
    os.mkfifo(place / "train" / "cat" / "pipe.png")
    with pytest.raises(DataError, match=r"pipe\.png .*regular file"):
        layouts.read(place)
    (place / "train/cat/pipe.png").unlink()
    (place / "train/cat/endless.png").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"endless\.png .*regular file"):
        layouts.read(place)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="folder or an archive"):
        layouts.read(tmp_path / "pipe")


def idx(array, kind=8):
    return bytes((0, 0, kind, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_files(root, **changed):
    root.mkdir(exist_ok=True)
    images, labels = np.zeros((6, 4, 4), np.uint8), np.arange(6, dtype=np.uint8) % 3
    parts = {"train-images-idx3-ubyte": idx(images), "train-labels-idx1-ubyte": idx(labels)}
    parts |= {"t10k-images-idx3-ubyte": idx(images), "t10k-labels-idx1-ubyte": idx(labels)}
    for name, content in {**parts, **{key.replace("_", "-"): value for key, value in changed.items()}}.items():
        (root / name).write_bytes(content)
    return root


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (idx(np.arange(6, dtype=np.uint8) % 3, kind=9), "the magic number 00000901 instead of 00000801"),
        (idx(np.arange(5, dtype=np.uint8) % 3), "5 labels for 6 images"),
        (idx(np.full(6, 7, np.uint8)), "labels from 0 to 7, those of training from 0 to 2"),
        (idx(np.zeros((6, 1), np.uint8)), "magic number 00000802"),
        (b"\0\0", "magic number"),
    ],
)
def test_idx_files_that_lie_are_refused(tmp_path, content, words):
    assert len(layouts.read(idx_files(tmp_path / "fine")).pixels) == 12
    with pytest.raises(DataError, match=words):
        layouts.read(idx_files(tmp_path / "lies", t10k_labels_idx1_ubyte=content))


def test_a_packed_idx_file_is_unpacked_to_a_limit(tmp_path, monkeypatch):
    place = idx_files(tmp_path / "packed")
    name = "train-images-idx3-ubyte"
    (place / f"{name}.gz").write_bytes(gzip.compress((place / name).read_bytes()))
    (place / name).unlink()
    assert len(layouts.read(place).pixels) == 12
    monkeypatch.setattr(layouts, "LARGEST_FILE", 50)
    with pytest.raises(DataError, match="more than 0 MiB"):
        layouts.read(place)


def test_labels_of_strips_are_a_list_of_classes(tmp_path):
    strip = png(np.zeros((3, 1024, 3), np.uint8))
    place = tmp_path / "strips"
    place.mkdir()
    for name in ("data_batch_1.png", "test_batch.png"):
        (place / name).write_bytes(strip)
    (place / "test_lables.json").write_text("[0, 1, 0]")
    for labels in ("[0, 1", "[0, 1]", "[0, -1, 2]", '["a", "b", "c"]', "[0.5, 1, 2]", "{}"):
        (place / "train_lables.json").write_text(labels)
        with pytest.raises(DataError, match="label"):
            layouts.read(place)


def test_a_kept_file_that_changed_on_disk_is_not_data(tmp_path):
    images = layouts.Images(np.arange(64, dtype=np.uint8).reshape(4, 1, 4, 4), np.array([0, 1, 0, 1]), 2)
    written = prepared.write(images, tmp_path, "mine", "a test")
    assert prepared.read(tmp_path, "mine").source == "a test"
    content = bytearray(written.path.read_bytes())
    content[-1] ^= 1
    written.path.write_bytes(content)
    assert prepared.read(tmp_path, "mine") is None
    prepared.write(images, tmp_path, "mine", "a test")
    note = written.path.with_suffix(".json")
    assert prepared.read(tmp_path, "mine") is not None
    note.write_text(json.dumps({"source": "a test"}))
    assert prepared.read(tmp_path, "mine") is None, "nothing to compare with"


X, Y = "torch.randn(6, 3)", "(torch.arange(6) % 2)"


@pytest.mark.parametrize(
    ("splits_of", "words"),
    [
        (f"[({X} / 0 * 0, {Y}), ({X}, {Y}), ({X}, {Y})]", "finite. Got 18 of 18 numbers in the inputs"),
        (f"[({X}, {Y}), ({X}, {Y}), ({X}.log(), {Y})]", "test split: data are finite"),
        (f"[({X}, torch.full((6, 1), math.nan))] * 3", "6 of 6 numbers in the targets"),
        (f"[({X}, torch.randn(6))] * 3", r"floats \(samples, components, ...\). Got \(6,\). Return targets\[:, None\]"),
        (f"[({X}, {Y} - 1)] * 3", "labels lie between 0 and 0, the highest of training. Got labels from -1 to 0"),
        (f"[({X}, {Y}), ({X}, {Y} + 1), ({X}, {Y})]", "validation split: labels lie between 0 and 1"),
        (f"[({X}, {Y}[:5])] * 3", "one target for each input, and at least one. Got 6 and 5"),
        (f"[({X}, {Y}), ({X}[:0], {Y}[:0]), ({X}, {Y})]", "validation split: there is one target"),
        (f"[({X}, {Y}), (torch.randn(6, 4), {Y}), ({X}, {Y})]", r"shape of those of training, \(3,\)"),
        (f"[({X}, {Y}), ({X}, {Y}.float()), ({X}, {Y})]", "labels of classes are integers"),
        (f"[({X}.tolist(), {Y})] * 3", "three pairs of tensors"),
        ("5", "three pairs of tensors"),
        (f"Dataset('d', 'classification', *[({X}, {Y})] * 3, classes=1)", "labels lie between 0 and 0"),
    ],
)  # fmt: skip
def test_own_data_that_cannot_be_trained_on_are_named_before_training(tmp_path, monkeypatch, splits_of, words):
    name = f"own_data_{abs(hash(splits_of))}"
    head = "import math, torch\nfrom normgauge.lab.data import Dataset\n"
    (tmp_path / f"{name}.py").write_text(f"{head}def splits():\n    return {splits_of}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(DataError, match=words):
        data.load(f"{name}:splits")


def test_labels_of_any_integers_become_those_torch_wants(tmp_path, monkeypatch):
    (tmp_path / "own_bools.py").write_text(f"import torch\ndef splits():\n    return [({X}, ({Y}).bool())] * 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loaded = data.load("own_bools:splits")
    assert loaded.classes == 2 and loaded.train[1].dtype == torch.int64


def test_the_folder_cannot_shadow_a_library(tmp_path, monkeypatch):
    """A file `json.py` beside the model is neither what json imports nor silently something else."""
    (tmp_path / "json.py").write_text("def factory(norm):\n    return None\n")
    (tmp_path / "my_own_model.py").write_text("import json\ndef factory(norm):\n    return json.dumps(norm)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert import_function("model", "my_own_model:factory", "a factory")("x") == '"x"'
    assert sys.path[-1] == str(tmp_path)
    with pytest.raises(InputError, match=r"json\.py must not have the name of a library"):
        import_function("model", "json:factory", "a factory")
