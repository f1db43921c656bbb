"""Empty caches: where processes find no code that another one has compiled, so that seconds of compiling are cold. No
torch.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

__all__ = ["empty_caches"]


@contextlib.contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """Variables of the environment for a process whose compile caches are empty; they are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="pytest-torchcompile-caches-") as folder:
        yield {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
