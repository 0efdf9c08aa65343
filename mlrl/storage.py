"""Writing files so that they are there whole or not at all, with errors that name the path."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mlrl.errors import StorageError

_REMEDIES = {
    errno.ENOSPC: "Make room on that disk, or give a folder on another one",
    errno.EDQUOT: "Make room within your quota, or give a folder on another disk",
    errno.EACCES: "Allow writing there, or give another folder",
    errno.EPERM: "Allow writing there, or give another folder",
    errno.EROFS: "Give a folder on a disk that can be written",
}


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turns an error of the operating system while `path` is written into a `StorageError` that names it."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        # Rust's writers (safetensors, tokenizers) raise kinds of their own, whose text ends in the system's "os error"
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        number = getattr(error, "errno", None)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        remedy = next((text for code, text in _REMEDIES.items() if code == number or f"os error {code})" in reason), "")
        remedy = remedy or "Give a folder that can be written"
        message = f"{path}: cannot be written ({reason}). {remedy}; what was written before is whole."
        raise StorageError(message) from error


def write_whole(path: str | Path, text: str) -> None:
    """Writes a text file so that it is there whole, or stays as it was; folders above it are made.

    Raises:
        StorageError: it cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(text, encoding="utf-8", errors="backslashreplace")
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def whole_files(folder: str | Path) -> Iterator[Path]:
    """A new folder to write files into, which then take their places in `folder`; after a failure none of them does.

    Raises:
        StorageError: they cannot be written.
    """
    folder = Path(folder)
    partial = folder / ".partial"
    with writing(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            for file in sorted(path for path in partial.rglob("*") if path.is_file()):
                place = folder / file.relative_to(partial)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
