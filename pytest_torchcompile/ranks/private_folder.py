"""A folder with a name that everybody can guess, in which nobody but this user can have put anything.

In ``/tmp`` another user may have made it first, or a link in its place, so that what is written there would change
files elsewhere. Whatever is opened here is looked at after it was opened, and no link is followed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytest_torchcompile.errors import TorchcompileError

__all__ = ["PrivateFolder"]

_WAY_OUT: Final = "have it removed, or set TMPDIR to a folder of your own"


@dataclass(frozen=True)
class PrivateFolder:
    """An open folder of mode 0700; names of files are relative to it."""

    path: Path
    descriptor: int

    @classmethod
    def open(cls, path: Path, inside: PrivateFolder | None = None) -> PrivateFolder:
        """Open the folder, and make it if need be. With ``inside``, ``path`` is a name in that folder.

        Raises :class:`~pytest_torchcompile.errors.TorchcompileError` where it is a link or another user's.
        """
        above = None
        full_path = path
        if inside is not None:
            above = inside.descriptor
            full_path = inside.path / path
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700, dir_fd=above)
        status = os.stat(path, dir_fd=above, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no folder"
            raise TorchcompileError(f"{full_path} is {what}; expected a folder of this user; {_WAY_OUT}")
        # It may have become a link meanwhile, so that the open has to refuse one too.
        how = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = cls(full_path, os.open(path, how, dir_fd=above))
        try:
            folder._refuse_strangers()
        except BaseException:
            folder.close()
            raise
        return folder

    def close(self) -> None:
        """Close the folder; files of it that are open stay so."""
        os.close(self.descriptor)

    def open_file(self, name: str) -> int:
        """A descriptor of a file, for reading and writing; made if need be.

        Raises :class:`~pytest_torchcompile.errors.TorchcompileError` for what is no file of this user.
        """
        # Without waiting: a FIFO of this name has nobody at its other end.
        how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = os.open(name, how, 0o600, dir_fd=self.descriptor)
        except OSError as error:
            # Of a link: ELOOP, or EMLINK on BSD.
            raise TorchcompileError(f"{self.path / name} can't be opened: {error.strerror}; expected a file of this "
                                    f"user; {_WAY_OUT}") from None
        status = os.fstat(file)
        # A second name of the file would be a stranger's: nobody here makes one.
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_nlink > 1:
            os.close(file)
            raise TorchcompileError(f"{self.path / name} is no file of this user alone; {_WAY_OUT}")
        return file

    def file_names(self) -> list[str]:
        """What is in the folder, in order."""
        return sorted(os.listdir(self.descriptor))

    def remove_file(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def _refuse_strangers(self) -> None:
        status = os.fstat(self.descriptor)
        if status.st_uid != os.getuid():
            raise TorchcompileError(f"{self.path} belongs to user {status.st_uid}, and this is user {os.getuid()}; "
                                    f"{_WAY_OUT}")
        if status.st_mode & 0o077:
            # Made by an earlier version, under the user's umask.
            os.fchmod(self.descriptor, 0o700)
