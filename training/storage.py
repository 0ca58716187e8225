"""Files that are either whole or not there: manifests, atomic writes and publication by rename.

Every folder that a stage publishes holds `manifest.json`: each file's size and sha256. A reader that
verifies it knows that nothing was cut short.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

MANIFEST = "manifest.json"


class CorruptFolder(RuntimeError):
    """A published folder or checkpoint whose files do not match its manifest."""


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(path: Path) -> str:
    """Hex sha256 that identifies a file's bytes, or a folder's (names and bytes, manifests included).

    Python's `__pycache__` is passed over: it comes and goes while the sources stay the same.
    """
    if path.is_file():
        return sha256_file(path)
    entries = {p.relative_to(path).as_posix(): sha256_file(p) for p in _files(path)}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Atomic replacement of a text file (UTF-8)."""
    with replacing(path) as file:
        file.write(text)


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file (UTF-8) to write, which takes the place of `path` at the end; on any error `path` is untouched."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """Parse a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_manifest(folder: Path) -> dict[str, Any]:
    """List every file of `folder` with size (bytes) and sha256 in its manifest.json; returns the manifest."""
    manifest = {
        "files": {
            p.relative_to(folder).as_posix(): {"size": p.stat().st_size, "sha256": sha256_file(p)}
            for p in _files(folder)
            if p.name != MANIFEST
        }
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Check every file of `folder` against its manifest, which is returned.

    Raises CorruptFolder naming the first file that is missing, cut short or changed.
    """
    try:
        manifest = read_json(folder / MANIFEST)
    except FileNotFoundError:
        raise CorruptFolder(f"{folder}: has no {MANIFEST}; it was not published whole") from None
    except json.JSONDecodeError as error:
        raise CorruptFolder(f"{folder / MANIFEST}: not valid JSON: {error}") from None
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CorruptFolder(f"{path}: missing, though {MANIFEST} lists it")
        size = path.stat().st_size
        if size != expected["size"]:
            raise CorruptFolder(
                f"{path}: {size} bytes, {MANIFEST} says {expected['size']}; the file was cut short or changed"
            )
        if sha256_file(path) != expected["sha256"]:
            raise CorruptFolder(f"{path}: its sha256 differs from {MANIFEST}; the file was changed")
    return manifest


@contextmanager
def publishing(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`; on success it gets a manifest, reaches the disk and becomes `target`.

    Until the last rename `target` is untouched; on any error (a full disk included) the temporary folder is
    removed and the error goes on.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        write_manifest(temporary)
        _sync(temporary)
        if target.exists():
            old = target.with_name(f".{target.name}.{os.getpid()}.old")
            target.rename(old)
            temporary.rename(target)
            shutil.rmtree(old)
        else:
            temporary.rename(target)
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(
        p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.relative_to(folder).parts
    )


def _sync(folder: Path) -> None:
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
