"""The gate shape_stability: every length goes to its bucket, and once warmed up nothing is compiled for any of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from pytest_torchcompile.gates import Place, Tried
from pytest_torchcompile.layer import shape_stabilizer as shapes
from pytest_torchcompile.ledger import Ledger, observe
from pytest_torchcompile.state.torch_state import isolated

__all__ = ["tried"]

BUCKETS: Final = (4, 8, 16)
WORDS: Final = 30


class Reader(nn.Module):
    """Token ids and a mask, both (B, S) -> (B, S, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(WORDS, 6), nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Scores for each token, and zero for padding."""
        return self.head(self.norm(self.table(input_ids))) * attention_mask[..., None]


def tried(place: Place) -> Iterator[Tried]:
    """The buckets, the compiled model under each kind of dynamic shapes, and that a recompile would be seen."""
    yield Tried("boundaries", _wrong_boundaries())
    for name, dynamic in (("auto", None), ("static", False), ("dynamic", True)):
        with isolated([]):
            yield Tried(f"{name} shapes", _unstable_shapes(place, dynamic))
    with isolated([]):
        yield Tried("a recompile is seen", _unseen_recompiles(place))


def _make_batch(length: int, place: Place) -> dict[str, Tensor]:
    ids = torch.randint(1, WORDS, (3, length), device=place.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _bucket_of(length: int) -> int:
    return min(bucket for bucket in BUCKETS if bucket >= length)


def _wrong_boundaries() -> str:
    """Every length from 1 on, on both sides, and one that is too long."""
    # Left: decoders are padded there, so that the last token stays the last.
    for side in ("right", "left"):
        stabilizer = shapes.ShapeStabilizer(BUCKETS, side=side)
        for length in range(1, BUCKETS[-1] + 1):
            batch = _make_batch(length, Place())
            padded = stabilizer.bucket_batch(batch)
            found = {name: tuple(tensor.shape) for name, tensor in padded.items()}
            expected = (3, _bucket_of(length))
            if set(found.values()) != {expected}:
                return f"length {length} became {found}, expected {expected}"
            tokens = int(padded["attention_mask"].sum())
            if tokens != 3 * length:
                return f"length {length} ({side}): the mask shows {tokens} tokens"
            unpadded = stabilizer.unpad(padded, batch)
            if not all(torch.equal(unpadded[name], batch[name]) for name in batch):
                return f"length {length} ({side}): unpad did not give back what was padded"
    try:
        stabilizer.bucket_batch(_make_batch(BUCKETS[-1] + 1, Place()))
    except ValueError as error:
        # Who reads it must see both sizes: the largest bucket, and what does not fit into it.
        if all(str(size) in str(error) for size in (BUCKETS[-1], BUCKETS[-1] + 1)):
            return ""
        return f"the error for a length that is too long names not both: {error}"
    return f"length {BUCKETS[-1] + 1} was taken, and the largest bucket is {BUCKETS[-1]}"


def _unstable_shapes(place: Place, dynamic: bool | None) -> str:
    torch.manual_seed(1)
    stabilizer, model = shapes.ShapeStabilizer(BUCKETS), Reader().to(place.device).eval()
    compiled = torch.compile(model, backend=place.backend, dynamic=dynamic)

    def make_sample(S: int) -> dict[str, Tensor]:  # noqa: N803 -- dims have capital letters
        return _make_batch(S, place)

    with torch.no_grad():
        # One compile for each bucket, before the lengths between them come.
        warmed = stabilizer.warmup(compiled, make_sample)
        if not warmed.ok:
            return f"the warm-up is not: {warmed}"
        for length in range(1, BUCKETS[-1] + 1):
            batch = _make_batch(length, place)
            with observe() as seen:
                output = stabilizer.unpad(compiled(**stabilizer.bucket_batch(batch)), batch)
            if wrong := _wrong_in_call(seen):
                return f"length {length}: {wrong}"
            if not torch.allclose(output, model(**batch), atol=1e-4, rtol=1e-4):
                return f"length {length}: padded and cut it gives another result than alone"
    return ""


def _wrong_in_call(seen: Ledger) -> str:
    """What should not have happened in one call."""
    if seen.compiles:
        return f"compiled again after the warm-up: {seen.compiles[0].function}, {seen.compiles[0].reason}"
    if not seen.graph_runs:
        return "no compiled code ran"
    return ""


def _unseen_recompiles(place: Place) -> str:
    """Without padding each length is a compile: if that were not seen, nothing above would mean anything."""
    compiled = torch.compile(Reader().to(place.device).eval(), backend=place.backend, dynamic=False)
    with torch.no_grad(), observe() as seen:
        for length in (5, 6, 7):
            compiled(**_make_batch(length, place))
    if len(seen.recompiles) == 2:
        return ""
    return f"three lengths without padding show {len(seen.recompiles)} recompiles"
