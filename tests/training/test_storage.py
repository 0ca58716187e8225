import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from training import storage
from training.storage import CorruptFolder, digest_of, publishing, replacing, verify, write_json


def publish(target, **files):
    with publishing(target) as folder:
        for name, text in files.items():
            (folder / name).write_text(text)


def test_a_published_folder_verifies_and_leaves_nothing_else(tmp_path):
    publish(tmp_path / "out", a="1", b="22")
    manifest = verify(tmp_path / "out")
    assert {n: f["size"] for n, f in manifest["files"].items()} == {"a": 1, "b": 2}
    assert os.listdir(tmp_path) == ["out"]


def test_publication_replaces_the_old_folder_whole(tmp_path):
    publish(tmp_path / "out", a="1")
    publish(tmp_path / "out", b="2")
    assert set(verify(tmp_path / "out")["files"]) == {"b"}
    assert os.listdir(tmp_path) == ["out"]


def test_an_error_while_writing_leaves_the_old_folder(tmp_path):
    publish(tmp_path / "out", a="1")

    def interrupted():
        with publishing(tmp_path / "out") as folder:
            (folder / "a").write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space"):
        interrupted()
    assert (tmp_path / "out" / "a").read_text() == "1"
    assert os.listdir(tmp_path) == ["out"]


def test_a_full_disk_leaves_the_old_folder(tmp_path):
    """A real full disk: a small tmpfs (needs the right to mount)."""
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        publish(disk / "out", a="1")
        with pytest.raises(OSError, match="No space"):
            publish(disk / "out", a="x" * 2**21)
        assert (disk / "out" / "a").read_text() == "1"
        assert os.listdir(disk) == ["out"]
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "a").write_text("123"), "3 bytes, manifest.json says 4"),
        (lambda f: (f / "a").write_text("1235"), "sha256 differs"),
        (lambda f: (f / "a").unlink(), "missing"),
        (lambda f: (f / storage.MANIFEST).unlink(), "has no manifest.json"),
        (lambda f: (f / storage.MANIFEST).write_text("{"), "not valid JSON"),
    ],
)
def test_damage_is_found_and_named(tmp_path, damage, message):
    publish(tmp_path / "out", a="1234")
    damage(tmp_path / "out")
    with pytest.raises(CorruptFolder, match=message):
        verify(tmp_path / "out")


def test_digest_sees_names_and_bytes(tmp_path):
    for name, content in [("x", "1"), ("y", "1"), ("z", "2")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / ("a" if name == "x" else "b")).write_text(content)
    assert len({digest_of(tmp_path / n) for n in "xyz"}) == 3


def test_json_without_nan(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert os.listdir(tmp_path) == []


def test_threads_that_replace_one_file_leave_one_of_their_texts(tmp_path):
    both_write = threading.Barrier(2)

    def write(text):
        with replacing(tmp_path / "file") as file:
            file.write(text)
            both_write.wait(10)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, ["first", "other"]))
    assert (tmp_path / "file").read_text() in ("first", "other")
    assert os.listdir(tmp_path) == ["file"]
