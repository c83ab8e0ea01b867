"""Writing safe from a crash at any moment: a file or folder is there completely, or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file to write. When the block ends the file is on the disk and takes the place of `path`; after an error the
    file is gone."""
    draft = path.with_name(f"{path.name}.draft")
    try:
        with create(draft) as file:
            yield file
            sync(file)
        draft.replace(path)
        sync_folder(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def create(path: Path) -> BinaryIO:
    """Open a new or emptied file, for the owner alone to read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")


def make_folder(path: Path, *, must_be_new: bool = False) -> None:
    """Make a folder with all folders above, for the owner alone to read."""
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=not must_be_new)


def write(path: Path, content: bytes) -> None:
    """Write a small file: after a crash the content is the old or the new one."""
    with replaced(path) as file:
        file.write(content)


def sync(file: BinaryIO) -> None:
    """Return when the content of a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(source: Path, target: Path) -> None:
    """Give a folder of synced files the final name."""
    sync_folder(source)
    source.rename(target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)
