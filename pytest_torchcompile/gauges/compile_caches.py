"""compile_caches: what torch's own counters say of its caches of compiled graphs: found there, or compiled."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheCounts", "count_caches"]


@dataclass(frozen=True)
class CacheCounts:
    """Lookups of graphs since the counters were last cleared."""

    hits: int
    misses: int
    """With those that went past the cache: each is a compile."""


def count_caches() -> CacheCounts:
    """Read them, of Inductor's cache and of AOTAutograd's.

    ``torch._dynamo.utils.counters``, groups ``inductor`` and ``aot_autograd``, keys ``fxgraph_cache_*`` and
    ``autograd_cache_*`` (torch/_inductor/codecache.py, torch/_functorch/_aot_autograd/autograd_cache.py; read in
    torch 2.13). A counter that a torch lacks is 0, so a check asks that hits and misses together are some.
    """
    from torch._dynamo.utils import counters

    hits = misses = 0
    for group, prefix in (("inductor", "fxgraph_cache"), ("aot_autograd", "autograd_cache")):
        counted = counters[group]
        hits += counted[f"{prefix}_hit"]
        misses += counted[f"{prefix}_miss"] + counted[f"{prefix}_bypass"]
    return CacheCounts(hits, misses)
