"""Image folders and archives of them: index, crops, workers, resuming, bad files."""

from __future__ import annotations

import io
import multiprocessing
import os
import resource
import signal
import struct
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.lab.data import CorruptData, DataNotFound, FolderBatches, FolderSet, Position
from gossamer.lab.data.batches import epoch_plan
from gossamer.lab.data.files import tar_files
from gossamer.lab.data.folder import advice_on_lost_workers, load_folder
from gossamer.lab.data.pixels import centre_crop, crop_box, decode, random_crop_flip

Image = pytest.importorskip("PIL.Image")
EpsImagePlugin = pytest.importorskip("PIL.EpsImagePlugin")


def png(value: int, width: int = 20, height: int = 16) -> bytes:
    random = np.random.default_rng(value)
    stream = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def files() -> dict[str, bytes]:
    content = {f"train/{c}/{i}.png": png(i + 10 * n) for n, c in enumerate(("bee", "ant")) for i in range(5)}
    content |= {f"val/{c}/{i}.png": png(i + 100 * n) for n, c in enumerate(("bee", "ant")) for i in range(2)}
    return content | {"train/ant/notes.txt": b"not an image"}


def write_folder(root: Path, content: dict[str, bytes]) -> Path:
    for name, image in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(image)
    return root


def write_archive(path: Path, content: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, image in content.items():
            info = tarfile.TarInfo(f"some/{name}")
            info.size = len(image)
            tar.addfile(info, io.BytesIO(image))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> FolderSet:
    return load_folder(write_folder(tmp_path / "images", files()))


def loader(dataset: FolderSet, **options: object) -> FolderBatches:
    settings: dict[str, object] = {"training": True, "size": 8, "resize": 10, "seed": 3} | options
    return FolderBatches(dataset, dataset.train, 3, **settings)  # type: ignore[arg-type]


def test_folder_and_archive_have_the_same_index(tmp_path: Path, folder: FolderSet) -> None:
    archive = load_folder(write_archive(tmp_path / "images.tar", files()))
    assert archive.name == folder.name == "images"
    assert archive.class_names == folder.class_names == ("ant", "bee")
    for a, b in ((archive.train, folder.train), (archive.validation, folder.validation)):
        assert a.names == b.names
        assert a.labels.tolist() == b.labels.tolist()
        assert [a.read(i) for i in range(len(a))] == [b.read(i) for i in range(len(b))]
    assert len(folder.train) == 10
    assert folder.train.labels.tolist() == [0] * 5 + [1] * 5
    assert folder.train.read(0) == files()["train/ant/0.png"]


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_training_images_can_be_held_out(tmp_path: Path, kind: str) -> None:
    if kind == "folder":
        dataset = load_folder(write_folder(tmp_path / "images", files()))
    else:
        dataset = load_folder(write_archive(tmp_path / "images.tar", files()))
    split = dataset.split(4)
    assert split.held_out is not None
    assert (len(split.train), len(split.held_out)) == (6, 4)
    assert sorted(split.train.names + split.held_out.names) == list(dataset.train.names)
    assert split.validation is dataset.validation
    assert dataset.split(4).held_out.names == split.held_out.names  # type: ignore[union-attr]
    assert dataset.split(4, seed=1).held_out.names != split.held_out.names  # type: ignore[union-attr]
    for part in (split.train, split.held_out):
        for index, name in enumerate(part.names):
            assert part.labels[index] == dataset.class_names.index(name.partition("/")[0])
            assert part.read(index) == files()[f"train/{name}"]
    for count in (0, 10):
        with pytest.raises(ValueError, match=f"expected 1 to 9 images to hold out of images, got {count}"):
            dataset.split(count)


def test_known_names_are_found_in_the_search_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataNotFound, match="give its path as root, data_root of a run"):
        load_folder()
    write_folder(tmp_path / "named" / "imagenet", files())
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path / "named"))
    assert load_folder().num_classes == 2
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_folder("~/named/imagenet").num_classes == 2


def test_what_is_no_image_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match="which is neither"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(DataNotFound, match="expected images under train/<class>/"):
        load_folder(tmp_path)
    strange = write_folder(tmp_path / "strange", files() | {"val/wasp/0.png": png(1)})
    with pytest.raises(CorruptData, match="classes wasp are in val but not in train: put"):
        load_folder(strange)
    with pytest.raises(CorruptData, match="not an uncompressed tar archive"):
        load_folder(write_archive(tmp_path / "packed.tar", files(), "w:gz"))
    (tmp_path / "imagenette-mini.tar").write_bytes(b"short")
    with pytest.raises(CorruptData, match="truncated: expected 15749120 bytes, got 5"):
        load_folder(tmp_path / "imagenette-mini.tar")


def test_what_is_no_file_is_no_image(tmp_path: Path) -> None:
    """A pipe or a device would be read without end; a link to an image is one."""
    root = write_folder(tmp_path / "images", files())
    os.mkfifo(root / "train" / "bee" / "pipe.png")
    (root / "train" / "bee" / "zeros.png").symlink_to("/dev/zero")
    (root / "train" / "bee" / "folder.png").mkdir()
    (root / "train" / "bee" / "nowhere.png").symlink_to("nowhere")
    (root / "train" / "bee" / "linked.png").symlink_to("1.png")
    before = {f"{label}/{number}.png" for label in ("bee", "ant") for number in range(5)}
    assert set(load_folder(root).train.names) == before | {"bee/linked.png"}


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "images.tar", files() | {"train/bee/zz.png": png(1, 100, 100)})
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"some/train/bee/zz.png") + 1000])
    with pytest.raises(CorruptData, match=r"truncated inside some/train/bee/zz\.png|not an uncompressed tar"):
        load_folder(path)


# Workers are forked; from Python 3.12 on, that warns in a process with threads, which every torch process is.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_workers_and_interruptions_change_nothing(folder: FolderSet) -> None:
    alone = loader(folder)
    assert len(alone) == 3
    stream = [(alone.state, images, labels) for _ in range(2) for images, labels in alone]
    assert stream[0][1].shape == (3, 3, 8, 8)
    assert alone.state == Position(2, 0)
    with_workers = loader(folder, workers=2)
    for (_, a, x), (b, y) in zip(stream, with_workers, strict=False):
        assert torch.equal(a, b)
        assert torch.equal(x, y)
    assert with_workers.state == Position(1, 0)
    for number in range(len(stream) - 1):
        resumed = loader(folder)
        resumed.state = stream[number][0]
        images, labels = next(iter(resumed))
        assert torch.equal(images, stream[number + 1][1])
        assert torch.equal(labels, stream[number + 1][2])
    assert not torch.equal(stream[0][1], stream[3][1])


def test_evaluation_is_the_centre_in_order(folder: FolderSet) -> None:
    evaluation = FolderBatches(folder, folder.validation, 3, training=False, size=8, resize=16, channels_last=True)
    got = list(evaluation)
    assert [len(labels) for _, labels in got] == [3, 1]
    assert torch.cat([labels for _, labels in got]).tolist() == [0, 0, 1, 1]
    # The shorter side is 16 already, so the expected centre needs no scaling.
    pixels = np.asarray(Image.open(io.BytesIO(folder.validation.read(0))))[4:12, 6:14]
    expected = (pixels / 255 - np.array(folder.mean)) / np.array(folder.std)
    torch.testing.assert_close(got[0][0][0].permute(1, 2, 0).double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
    assert got[0][0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_signal_to_all_processes_of_a_run_leaves_the_workers_at_work(
    folder: FolderSet, number: signal.Signals
) -> None:
    stream = iter(loader(folder, workers=1))
    next(stream)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, number)
    worker.join(0.5)
    assert worker.is_alive()
    assert len(list(stream)) == len(loader(folder)) - 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_image_is_named(tmp_path: Path, workers: int) -> None:
    content = files()
    content["train/bee/3.png"] = content["train/bee/3.png"][:60]
    dataset = load_folder(write_folder(tmp_path / "images", content))
    with pytest.raises(CorruptData, match=r"^\S+train/bee/3\.png is not a readable image \(.*\); replace it"):
        list(FolderBatches(dataset, dataset.train, 10, training=True, size=8, resize=8, workers=workers))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_an_image_that_is_gone_is_named(tmp_path: Path, kind: str, workers: int) -> None:
    if kind == "folder":
        dataset = load_folder(write_folder(tmp_path / "images", files()))
        (tmp_path / "images" / "train" / "bee" / "3.png").unlink()
        named = r"images/train/bee/3\.png"
    else:
        dataset = load_folder(write_archive(tmp_path / "images.tar", files()))
        (tmp_path / "images.tar").unlink()
        named = r"images\.tar:\w+/\d\.png"
    with pytest.raises(OSError, match=rf"^\S+{named} was there .* cannot be read now \(No such file.*; restore it"):
        list(FolderBatches(dataset, dataset.train, 10, training=True, size=8, resize=8, workers=workers))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_no_worker_outlives_an_error(folder: FolderSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ignore the signal with which Python ends what is left of them, so that it would wait for them forever."""

    def unforeseen(content: bytes, name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr("gossamer.lab.data.folder.decode", unforeseen)
    with pytest.raises(KeyError) as kept:  # and with it the traceback, and with that the loader
        list(loader(folder, workers=2))
    assert not multiprocessing.active_children()
    assert kept.value is not None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_worker_that_was_killed_comes_with_advice(folder: FolderSet) -> None:
    def lose_a_worker() -> None:
        for _ in loader(folder, workers=1):
            for worker in multiprocessing.active_children():
                worker.kill()
                worker.join()

    with pytest.raises(RuntimeError, match=r"has died.*DataLoader worker .*\): set fewer workers=.*, or set workers=0"):
        advice_on_lost_workers()(lose_a_worker)()
    with pytest.raises(RuntimeError, match=r"^of another kind$"), advice_on_lost_workers():
        raise RuntimeError("of another kind")


def test_no_other_program_is_started_for_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(
        EpsImagePlugin, "Ghostscript", lambda *given: started.append(given) or Image.new("RGB", (9, 9)).im
    )
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    with Image.open(io.BytesIO(script)) as image:
        image.load()
    assert len(started) == 1  # what Pillow does with it
    with pytest.raises(CorruptData, match=r"bee/1\.jpg is not a readable image"):
        decode(script, "bee/1.jpg")
    assert len(started) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": -1}, "workers ≥ 0"),
        ({"seed": -1}, "seed ≥ 0"),
        ({"size": 9, "resize": 8}, "size ≤ resize"),
    ],
)
def test_impossible_settings_are_errors(folder: FolderSet, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader(folder, **options)
    with pytest.raises(ValueError, match="lower batch_size"):
        FolderBatches(folder, folder.train, 11, training=True)
    with pytest.raises(ValueError, match="another batch size"):
        loader(folder).state = Position(0, 3)


def test_crop_boxes_have_the_announced_shares_and_shapes() -> None:
    random = np.random.default_rng(0)
    boxes = np.array([crop_box(400, 300, random) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    assert left.min() >= 0
    assert top.min() >= 0
    assert right.max() <= 400
    assert bottom.max() <= 300
    width, height = right - left, bottom - top
    share, shape = width * height / 120_000, width / height
    assert 0.078 < share.min() < 0.1
    assert share.max() > 0.9
    assert 0.73 < shape.min() < 0.78
    assert 1.3 < shape.max() < 1.37
    assert np.log(shape).mean() == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize(("size", "expected"), [((1000, 10), (493, 0, 506, 10)), ((10, 1000), (0, 493, 10, 506))])
def test_an_image_too_narrow_for_any_crop_gives_its_centre(
    size: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert crop_box(*size, np.random.default_rng(0), area=(0.9, 1.0)) == expected


def outcome(path: Path) -> tuple[object, ...] | None:
    """What an archive is taken to hold; None where it is refused."""
    try:
        dataset = load_folder(path)
    except (CorruptData, DataNotFound):
        return None
    parts = (dataset.train, dataset.validation)
    return tuple((part.names, part.labels.tolist(), part.spans.tolist()) for part in parts if part.spans is not None)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_no_flipped_bit_in_an_archive_loses_an_image(tmp_path: Path, form: int) -> None:
    """Every bit of headers, padding and end; those of the images themselves are a matter of their own formats."""
    names = ("train/a/1.png", "train/b/2.png", "val/a/3.png", "README")
    with tarfile.open(tmp_path / "x.tar", "w", format=form) as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 30
            tar.addfile(info, io.BytesIO(bytes(range(30))))
    content = (tmp_path / "x.tar").read_bytes()[: 1024 * len(names) + 1024]
    (tmp_path / "x.tar").write_bytes(content)
    whole = outcome(tmp_path / "x.tar")
    assert whole is not None
    random = np.random.default_rng(0)
    for bit in random.choice(8 * len(content), 1500, replace=False):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << (bit % 8)
        (tmp_path / "x.tar").write_bytes(flipped)
        assert outcome(tmp_path / "x.tar") in (None, whole)
    for end in range(0, len(content) - 1024, 256):
        (tmp_path / "x.tar").write_bytes(content[:end])
        assert outcome(tmp_path / "x.tar") is None


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_archives_of_every_format_are_read_as_tar_reads_them(tmp_path: Path, form: int) -> None:
    deep = "/".join(["folder" * 5] * 4)
    names = [f"{deep}/train/{c}/{i}.png" for c in ("a", "b" * 60) for i in range(3)] + [f"{deep}/val/a/1.PNG"]
    if form != tarfile.USTAR_FORMAT:
        names += [f"train/ä{'ü' * 80}/{'x' * 90}.png"]
    with tarfile.open(tmp_path / "x.tar", "w", format=form) as tar:
        tar.addfile(folder := tarfile.TarInfo("train"))
        folder.type = tarfile.DIRTYPE
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = 100 * number, 1.5 if form == tarfile.PAX_FORMAT else 1
            tar.addfile(info, io.BytesIO(bytes([number]) * info.size))
    with tarfile.open(tmp_path / "x.tar") as tar:
        expected = [(each.name, each.offset_data, each.size) for each in tar if each.isreg()]
    assert [*tar_files(tmp_path / "x.tar")] == expected


def test_equal_names_in_two_folders_of_an_archive_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in ("one/train/a/1.png", "two/train/a/1.png", "one/val/a/1.png"):
            tar.addfile(tarfile.TarInfo(name))
    twice = r"train/a/1\.png twice \(one/train/a/1\.png and two/train/a/1\.png\); create the archive again"
    with pytest.raises(CorruptData, match=twice):
        load_folder(tmp_path / "x.tar")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_an_image_that_is_a_link_is_not_lost_from_an_archive(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in ("train/a/1.png", "train/a/2.png", "val/a/1.png"):
            info = tarfile.TarInfo(name)
            if name == "train/a/2.png":
                info.type, info.linkname = kind, "train/a/1.png"
            tar.addfile(info)
    with pytest.raises(CorruptData, match=r"expected train/a/2\.png to be an ordinary file, got a link"):
        load_folder(tmp_path / "x.tar")


def hostile_archives() -> dict[str, bytes]:
    def header(name: str, size: bytes, kind: bytes = b"0") -> bytes:
        block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
        block[124:136], block[156:157], block[148:156] = size, kind, b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return bytes(block)

    negative = (-1024).to_bytes(12, "big", signed=True)
    records = b"".join(b"6 a=b\n" for _ in range(160_000))
    empty = b"0" * 11 + b"\0"
    return {
        "files after the end": header("train/a/0.png", empty)
        + bytes(1024)
        + header("val/a/1.png", empty)
        + bytes(1024),
        "a member of negative size": header("train/a/1.png", negative) + bytes(1024),
        "a second one": header("train/a/0.png", b"0" * 11 + b"\0") + header("train/a/1.png", negative) + bytes(1024),
        "minus in octal": header("train/a/1.png", b"-0000002000\0") + bytes(1024),
        "larger than the file": header("train/a/1.png", b"\x80" + b"\xff" * 11) + bytes(1024),
        "a sparse file": header("train/a/1.png", b"0" * 11 + b"\0", b"S") + bytes(1024),
        "very many extended headers": header("x", b"%011o\0" % len(records), b"x") * 3 + records + bytes(1024),
        "an endless name": header("x", b"%011o\0" % (2 << 20), b"L") + b"a" * (2 << 20) + bytes(1024),
    }


@pytest.mark.parametrize("case", hostile_archives())
def test_hostile_archives_are_refused_at_once(tmp_path: Path, case: str) -> None:
    (tmp_path / "x.tar").write_bytes(hostile_archives()[case])
    started = time.perf_counter()
    with pytest.raises(CorruptData, match=r"expected|not an uncompressed tar archive"):
        load_folder(tmp_path / "x.tar")
    assert time.perf_counter() - started < 5


def test_a_crop_is_cut_and_mirrored_as_drawn() -> None:
    image = decode(png(1, 12, 12), "x")
    seen = set()
    for seed in range(20):
        random = np.random.default_rng(seed)
        box = crop_box(12, 12, random)
        mirrored = bool(random.integers(2))
        scaled = np.asarray(image.resize((6, 6), Image.Resampling.BILINEAR, box=box))
        expected = scaled[:, ::-1] if mirrored else scaled
        got = random_crop_flip(image, 6, np.random.default_rng(seed))
        assert np.array_equal(got.transpose(1, 2, 0), expected)
        seen.add(mirrored)
    assert seen == {True, False}


def test_grey_and_transparent_images_become_colour() -> None:
    for mode in ("L", "RGBA", "P"):
        stream = io.BytesIO()
        Image.new(mode, (5, 4)).save(stream, "PNG")
        assert centre_crop(decode(stream.getvalue(), "x"), 4, 4).shape == (3, 4, 4)


@pytest.mark.parametrize("size", [(50, 30), (31, 200), (8, 8), (100, 3)])
def test_the_centre_is_that_of_the_scaled_image(size: tuple[int, int]) -> None:
    image = decode(png(1, *size), "x")
    shorter = min(size)
    width, height = (max(16, round(side * 16 / shorter)) for side in size)
    left, top = (width - 12) // 2, (height - 12) // 2
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    expected = np.asarray(scaled.crop((left, top, left + 12, top + 12)), dtype=int)
    got = centre_crop(image, 12, 16).transpose(1, 2, 0)
    assert np.abs(got - expected).max() <= 2  # of 255: Pillow has the corners of a box in single precision


@pytest.mark.parametrize("size", [(1, 6000), (6000, 1)])
def test_a_very_long_image_takes_little_memory(size: tuple[int, int]) -> None:
    """Scaled before it is cropped, one of 1 × 6,000 pixels takes 1.6 GB."""
    stream = io.BytesIO()
    Image.new("RGB", size, "red").save(stream, "PNG")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for pixels in (
        centre_crop(decode(stream.getvalue(), "x"), 224, 256),
        random_crop_flip(decode(stream.getvalue(), "x"), 224, np.random.default_rng(0)),
    ):
        assert pixels.shape == (3, 224, 224)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # in kilobytes


def test_an_image_of_far_more_pixels_than_bytes_is_refused() -> None:
    stream = io.BytesIO()
    Image.new("1", (2100, 2100)).save(stream, "PNG")
    content = stream.getvalue()
    with pytest.raises(CorruptData, match=r"^x: expected an image of 1 to 4,194,304 pixels .* 2,100 × 2,100; scale it"):
        decode(content, "x")
    header = b"BM" + struct.pack("<IIIIiiHHIIIIII", 1 << 20, 0, 54, 40, 9000, 9000, 1, 24, 0, 0, 0, 0, 0, 0)
    with pytest.raises(CorruptData, match=r"1 to 67,108,864 pixels .* got 9,000 × 9,000"):
        decode(header + bytes(1 << 20), "x")


def test_missing_pillow_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    content = png(1)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'gossamer\[data\]'"):
        decode(content, "x")


def test_real_imagenette(shared_data: Path) -> None:
    dataset = load_folder(shared_data / "imagenette-mini.tar")
    assert dataset.num_classes == 10
    assert dataset.class_names[0] == "n01440764"
    assert torch.bincount(dataset.train.labels).tolist() == [100] * 10
    assert torch.bincount(dataset.validation.labels).tolist() == [40] * 10
    images, labels = next(iter(FolderBatches(dataset, dataset.train, 16, training=True)))
    assert images.shape == (16, 3, 224, 224)
    assert 0.5 < images.std().item() < 2
    assert labels.shape == (16,)


def test_every_image_is_cropped_anew_in_every_epoch_and_for_every_seed(folder: FolderSet) -> None:
    def crops(seed: int) -> dict[tuple[int, int], torch.Tensor]:
        result = {}
        batches = loader(folder, seed=seed)
        for epoch in range(2):
            order = epoch_plan(10, seed=seed, epoch=epoch).order.tolist()
            images = torch.cat([images for images, _ in batches])
            result |= {(epoch, index): image for index, image in zip(order, images, strict=False)}
        return result

    first, again, other = crops(3), crops(3), crops(4)
    assert all(torch.equal(first[key], again[key]) for key in first)
    both = {index for epoch, index in first if epoch == 0} & {index for epoch, index in first if epoch == 1}
    assert len(both) >= 8
    assert not any(torch.equal(first[0, index], first[1, index]) for index in both)
    assert not any(torch.equal(first[key], other[key]) for key in first.keys() & other.keys())


def test_processes_that_share_a_batch_decode_only_their_part(folder: FolderSet) -> None:
    whole = list(loader(folder))
    first = list(loader(folder, slice_of=lambda count: slice(0, count // 2)))
    second = list(loader(folder, slice_of=lambda count: slice(count // 2, count)))
    assert [len(labels) for _, labels in first + second] == [1, 1, 1, 2, 2, 2]
    for all_of_it, left, right in zip(whole, first, second, strict=True):
        for part in range(2):
            assert torch.equal(all_of_it[part], torch.cat([left[part], right[part]]))
