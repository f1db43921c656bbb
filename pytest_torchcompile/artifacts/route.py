"""A route: how compiled code gets into another process. To add one: a file in ``routes/``, its name here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.loading import one_line

if TYPE_CHECKING:
    from torch import nn

    from pytest_torchcompile.contract.history_run import Program
    from pytest_torchcompile.fuzz.drawn_call import Sequence

__all__ = ["ROUTES", "Refused", "Route", "asked_of_torch", "load_route", "version_of"]

ROUTES: Final = ("warm_folder", "cache_artifacts", "aot_compile", "precompile", "aot_inductor")
"""All routes, in the order in which they are tried."""
_FOLDER: Final = Path(__file__).parent


class Refused(Exception):
    """Torch makes no artifact of the model, or does not take the one that there is; the text is what it said."""


@contextmanager
def asked_of_torch() -> Iterator[None]:
    """Around the calls of torch that make or take an artifact, and around nothing else.

    What is raised within is torch's word on the model, and becomes :class:`Refused`. What is raised outside of it is a
    mistake of this package, or of the user's functions.
    """
    try:
        yield
    except Refused:
        raise
    except Exception as why:
        # Each route has its own ways to say that a model is none for it.
        raise Refused(one_line(why.with_traceback(_below_routes(why.__traceback__)))) from why


def _below_routes(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without this package's own frames, which would be named as the user's line."""
    while trace is not None and _FOLDER in Path(trace.tb_frame.f_code.co_filename).parents:
        trace = trace.tb_next
    return trace


@dataclass(frozen=True)
class Route:
    """One way to ship."""

    name: str
    ship: Callable[[Program, Sequence, Path], None]
    """``ship(program, declared, folder)``, in the first process: compiles for the declared calls, and writes. Raises
    :class:`Refused` where torch does not."""
    load: Callable[[Path], Callable[[nn.Module], Callable[..., Any]] | None]
    """``load(folder)``, in the second process: what makes a callable of a module; None: ``torch.compile`` does. Raises
    :class:`Refused` where torch does not take it."""
    missing: Callable[[tuple[int, int], bool], str]
    """``missing(version, trains)``: why this torch has no such route for the program; empty where it has."""
    cached: bool = False
    """Dynamo traces anew and asks its guards, and caches hold the rest: then no miss is expected. Else the artifact is
    called, which was made of the first call alone and may have dropped guards."""
    takes_module: bool = True
    """The artifact may be called for a module in training and in evaluation; else for what it was made of alone."""
    moved: bool = False
    """The second process begins with an empty cache folder."""


@cache
def load_route(name: str) -> Route:
    """The route of that name; loads torch."""
    route: Route = importlib.import_module(f"pytest_torchcompile.artifacts.routes.{name}").ROUTE
    return route


def version_of(text: str) -> tuple[int, int]:
    """``2.13.0+cpu``: (2, 13)."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
