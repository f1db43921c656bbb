"""Strategy: which of the allowed cells a matrix runs: all, a covering array, or a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import yaml

from pytest_torchcompile.plan.covering import cover
from pytest_torchcompile.plan.reader import Reader

__all__ = ["KEYS", "KINDS", "Strategy", "choose", "read_strategy"]

KINDS: Final = ("full", "pairwise", "sample")
KEYS: Final = {
    "pairwise": {"strength": "how many values of different axes must meet in some cell; plain pairwise: 2"},
    "sample": {"n": "how many cells", "seed": "which of them (default 0)"},
}
STRENGTHS: Final = (1, 6)


@dataclass(frozen=True)
class Strategy:
    """What is run of the cells that the rules leave."""

    kind: Literal["full", "pairwise", "sample"] = "full"
    strength: int = 2
    n: int = 0
    seed: int = 0

    def __str__(self) -> str:
        details = {
            "full": "",
            "pairwise": f" of strength {self.strength}" if self.strength != 2 else "",
            "sample": f" of {self.n}, seed {self.seed}",
        }
        return f"{self.kind}{details[self.kind]}"


def read_strategy(reader: Reader, node: yaml.Node | None) -> Strategy:
    """Read the key ``strategy``: ``full``, ``pairwise``, or a mapping with settings."""
    if node is None:
        return Strategy()
    if isinstance(node, yaml.ScalarNode):
        name = reader.name(node, "a strategy", KINDS)
        if name == "sample":
            reader.wrong(node, "strategy: sample needs its size; expected {sample: {n: 200, seed: 1}}")
        return Strategy("pairwise" if name == "pairwise" else "full")
    found = reader.fields(node, "strategy", KEYS)
    if len(found) > 1:
        reader.wrong(node, f"strategy: found {' and '.join(found)}, expected one of them")
    if "pairwise" in found:
        given = reader.fields(found["pairwise"], "pairwise", KEYS["pairwise"], ("strength",))
        least, most = STRENGTHS
        strength = [reader.number(each, "strength", least=least, most=most) for each in given.values()]
        return Strategy("pairwise", strength=int((strength or [2])[0] or 2))
    if "sample" in found:
        given = reader.fields(found["sample"], "sample", KEYS["sample"], ("n",))
        sizes = {key: reader.integer(each, f"{key} of sample", least=int(key == "n")) or 0
                 for key, each in given.items()}
        return Strategy("sample", **sizes)
    return Strategy()


def choose(strategy: Strategy, rows: Sequence[Sequence[int]], ids: Sequence[str],
           ranks: Sequence[int]) -> list[int]:
    """Return the indices of the cells to run, ascending.

    ``rows`` are the cells as numbers, ``ids`` their ids; ``ranks``: of two cells that cover the same, a
    covering array takes the one of the lower rank (cells that run before cells that skip).
    """
    if strategy.kind == "full":
        return list(range(len(rows)))
    if strategy.kind == "sample":
        # By hash, not by a generator: a cell stays in the sample when others come and go.
        hashes = [hashlib.sha256(f"{strategy.seed} {cell}".encode()).digest() for cell in ids]
        return sorted(sorted(range(len(rows)), key=hashes.__getitem__)[: strategy.n])
    groups = [[k for k in range(len(rows)) if ranks[k] == rank] for rank in sorted(set(ranks))]
    chosen = cover([[rows[k] for k in group] for group in groups], strategy.strength)
    return sorted(group[k] for group, taken in zip(groups, chosen, strict=True) for k in taken)
