"""ResultStore: results in a folder that several runs may write to at once, and that may be copied anywhere.

An entry is one file, written beside its place and renamed, so that a reader never meets half of it. Its first line is
the hash of the rest: what was torn or edited is no entry. Nothing in the folder is changed once it is there. What
several entries share, such as the list of installed files, is a file of its own that is named by its hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

__all__ = ["LARGEST", "OLDEST", "ResultStore"]

LARGEST: Final = 256 << 20
"""Bytes of the whole folder, above which the entries that were used longest ago go."""
OLDEST: Final = 30 * 24 * 3600.0
"""Seconds since an entry was last used, after which it goes."""
_VARIANTS: Final = 8
"""Entries of one cell that are looked at, the last used first: of the branches that one works on."""
_LISTS: Final = "lists"


class ResultStore:
    """The folder. Whatever goes wrong with it, a result is not found or not kept, and nobody is told a wrong one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lists: dict[str, Any] = {}

    def entries(self, name: str) -> Iterator[dict[str, Any]]:
        """The entries in the folder ``name``, the last used first. Each has its own file's name as ``file``."""
        files: list[tuple[float, Path]] = []
        for file in self.folder.joinpath(name).glob("*.entry"):
            with contextlib.suppress(OSError):
                files.append((file.stat().st_mtime, file))
        for _, file in sorted(files, reverse=True)[:_VARIANTS]:
            content = _read_file(file)
            if content is not None:
                yield {**content, "file": str(file)}

    def keep(self, name: str, content: dict[str, Any]) -> bool:
        """Keep an entry in the folder ``name``; whether it could be written."""
        data = _encode(content)
        return self._write(self.folder / name / f"{hashlib.sha256(data).hexdigest()[:32]}.entry", data)

    def mark_used(self, entry: dict[str, Any]) -> None:
        """Take note that an entry was of use, so that it goes later than others."""
        with contextlib.suppress(OSError):
            os.utime(entry["file"])

    def keep_list(self, content: Any) -> str:
        """Keep what several entries share; returns its name, or an empty text where it can't be written."""
        data = _encode(content)
        name = hashlib.sha256(data).hexdigest()
        file = self._list_file(name)
        if name not in self._lists and not self._write(file, data):
            return ""
        self._lists[name] = content
        return name

    def read_list(self, name: str) -> Any:
        """What :meth:`keep_list` has kept by this name; None where it is gone."""
        if name not in self._lists:
            file = self._list_file(name)
            self._lists[name] = _read_file(file)
            with contextlib.suppress(OSError):
                os.utime(file)
        return self._lists[name]

    def tidy(self, largest: int = LARGEST, oldest: float = OLDEST) -> int:
        """Remove what was not used for long, and what is too much; returns how many files went."""
        files: list[tuple[float, int, Path]] = []
        for file in self.folder.rglob("*"):
            with contextlib.suppress(OSError):
                if file.is_file() and file.suffix in (".entry", ".part"):
                    status = file.stat()
                    files.append((status.st_mtime, status.st_size, file))
        left = sum(size for _, size, _ in files)
        removed = 0
        for used, size, file in sorted(files):
            is_torn = file.suffix == ".part" and time.time() - used > 3600
            if left <= largest and time.time() - used <= oldest and not is_torn:
                continue
            with contextlib.suppress(OSError):
                file.unlink()
                left -= size
                removed += 1
        return removed

    def _list_file(self, name: str) -> Path:
        return self.folder / _LISTS / f"{name}.entry"

    def _write(self, file: Path, data: bytes) -> bool:
        """Write a file whole or not at all."""
        beside = file.with_name(f"{file.stem}.{os.getpid()}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(data)
            beside.replace(file)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            return False
        return True


def _encode(content: Any) -> bytes:
    packed = zlib.compress(json.dumps(content, sort_keys=True).encode(), 1)
    return hashlib.sha256(packed).hexdigest().encode() + b"\n" + packed


def _read_file(file: Path) -> Any:
    """The content of a file; None for one that is gone, or is not as it was written."""
    try:
        digest, _, packed = file.read_bytes().partition(b"\n")
        if hashlib.sha256(packed).hexdigest().encode() != digest:
            return None
        return json.loads(zlib.decompress(packed))
    except (OSError, ValueError, zlib.error):
        return None
