"""An exception of a user's own code, shown as the user would want it: from the first line of theirs on."""

import os
import sys
import sysconfig
from pathlib import Path
from types import TracebackType

_OURS = str(Path(__file__).parent) + os.sep
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def show_users_error(error: Exception) -> bool:
    """Prints an exception without the frames that led to the user's code; False where none of that is in it."""
    script = os.path.abspath(sys.argv[0])
    frames = error.__traceback__
    while frames is not None and not _is_users(frames, script):
        frames = frames.tb_next
    in_their_file = isinstance(error, SyntaxError) and error.filename and _is_users_file(error.filename, script)
    if frames is None and not in_their_file:
        return False
    error = error.with_traceback(frames)
    sys.excepthook(type(error), error, frames)  # with several processes, this ends all of them
    return True


def _is_users(frames: TracebackType, script: str) -> bool:
    return _is_users_file(frames.tb_frame.f_code.co_filename, script)


def _is_users_file(file: str, script: str) -> bool:
    if file.startswith("<"):  # the import system
        return False
    file = os.path.abspath(file)
    return file != script and not file.startswith((_OURS, *_INSTALLED))
