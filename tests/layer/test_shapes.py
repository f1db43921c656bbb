"""BucketConfig and ShapeStabilizer: what is padded with what, what is refused, and that it keeps shapes few."""

from __future__ import annotations

import re
from collections import namedtuple

import pytest
import torch

from pytest_torchcompile import BucketConfig, ShapeStabilizer, observe

EIGHT = ShapeStabilizer(buckets=BucketConfig((4, 8), pad_token_id=9))


def ids(length=3, dtype=torch.int64):
    return torch.ones(2, length, dtype=dtype)


@pytest.mark.parametrize(("length", "expected"), [(0, 4), (1, 4), (4, 4), (5, 8), (8, 8)])
def test_the_next_bucket(length, expected):
    """A length goes to the smallest bucket that holds it, itself included."""
    assert EIGHT.bucket_batch(ids(length)).shape == (2, expected)


def test_what_each_tensor_is_padded_with():
    """Ids with pad_token_id, masks and type ids with 0, labels with -100, on the right; the rest stays as it is."""
    batch = {"input_ids": ids(), "attention_mask": ids(dtype=torch.bool), "labels": ids(), "token_type_ids": ids(),
             "decoder_input_ids": ids(6), "weights": ids(), "name": "a"}
    padded = EIGHT.bucket_batch(batch)
    assert list(padded) == list(batch)
    assert padded["input_ids"].tolist() == [[1, 1, 1, 9]] * 2
    assert padded["attention_mask"].tolist() == [[True, True, True, False]] * 2
    assert padded["attention_mask"].dtype is torch.bool
    assert padded["labels"].tolist() == [[1, 1, 1, -100]] * 2
    assert padded["token_type_ids"].tolist() == [[1, 1, 1, 0]] * 2
    assert padded["decoder_input_ids"].tolist() == [[1, 1, 1, 1, 1, 1, 9, 9]] * 2
    assert padded["weights"] is batch["weights"]
    assert padded["name"] == "a"


def test_tuples_keep_their_type():
    """A tuple goes by place, a named tuple by field; a list stays a list; classes of samples are not padded."""
    Batch = namedtuple("Batch", "labels input_ids")
    a, mask, labels = EIGHT.bucket_batch((ids(), torch.ones(2, 3), ids()))
    assert (a[0, 3], mask[0, 3], labels[0, 3]) == (9, 0, -100)
    named = EIGHT.bucket_batch(Batch(torch.tensor([5, 6]), ids()))
    assert type(named) is Batch
    assert (named.labels.tolist(), named.input_ids[0, 3]) == ([5, 6], 9)
    (only,) = EIGHT.bucket_batch([ids()])
    assert only.shape == (2, 4)
    _, labels = EIGHT.bucket_batch((ids(), ids()), names=("input_ids", "labels"))
    assert labels[0, 3] == -100


def test_a_batch_that_fits_is_not_copied():
    """A tensor that has a bucket's length is returned itself; the batch that was given is never changed."""
    batch = {"input_ids": ids(4), "labels": ids(3)}
    padded = EIGHT.bucket_batch(batch)
    assert padded["input_ids"] is batch["input_ids"]
    assert batch["labels"].shape == (2, 3)


@pytest.mark.parametrize(("batch", "text"), [
    (ids(9), "input_ids has length 9, longer than the largest bucket, 8; cut it, or add a bucket"),
    ({"input_ids": ids(), "labels": ids(9)}, "labels has length 9, longer than the largest bucket, 8"),
    (torch.ones(3), "input_ids has the shape (3,); expected (batch, length)"),
    ({"input_ids": ids(), "attention_mask": torch.ones(2, 1, 3, 3)}, "attention_mask has the shape (2, 1, 3, 3); "),
    (torch.ones(2, 3), "input_ids is torch.float32; expected whole numbers"),
    ({"input_ids": ids(), "labels": ids(dtype=torch.uint8)}, "labels is torch.uint8, which cannot hold -100"),
    ({"input_ids": ids(), "labels": ids(dtype=torch.bool)}, "labels is torch.bool, which cannot hold -100"),
    ({"x": ids()}, "no token ids in the batch (x); expected a name like input_ids"),
    ((), "no token ids in the batch (it is empty)"),
    ((ids(), ids() * 7), "the second tensor is no mask: it holds other values than 0 and 1; say what it is, for"),
    ((ids(),) * 4, "4 values, and only 3 names (input_ids, attention_mask, labels); say what each is with names="),
    ("text", "a batch of type str; expected a tensor, a tuple or a dict"),
])  # fmt: skip
def test_what_is_refused(batch, text):
    """Nothing is padded on a guess: each text names the tensor, what was found and what is expected."""
    with pytest.raises(ValueError, match=re.escape(text)):
        EIGHT.bucket_batch(batch)


@pytest.mark.parametrize(("given", "text"), [
    ({"buckets": ()}, "buckets=(): expected at least one length"),
    ({"buckets": 128}, "buckets=128: expected lengths, for example (128, 256)"),
    ({"buckets": "128"}, "buckets='128': expected lengths, for example (128, 256)"),
    ({"buckets": (0, 4)}, "buckets=(0, 4): 0 is no length; expected whole numbers from 1 on"),
    ({"buckets": (True, 4)}, "buckets=(True, 4): True is no length"),
    ({"buckets": (4, 4)}, "buckets=(4, 4): 4 comes after 4; expected each larger than the one before"),
    ({"pad_token_id": -1}, "pad_token_id=-1: expected a token id, a whole number from 0 on"),
    ({"pad_token_id": None}, "pad_token_id=None: expected a token id, a whole number from 0 on"),
])  # fmt: skip
def test_mistakes_in_the_config(given, text):
    """Each text names the field, its value and what is allowed."""
    with pytest.raises(ValueError, match=re.escape(text)):
        BucketConfig(**given)


def test_the_config_is_frozen():
    """The defaults are the documented ones; a list becomes a tuple; nothing can be set afterwards."""
    assert BucketConfig() == BucketConfig([256, 512, 1024, 2048], 0)
    assert ShapeStabilizer().config == BucketConfig()
    with pytest.raises(AttributeError):
        BucketConfig().pad_token_id = 1


def runs(batches):
    """Compiles of a small model over the batches."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: (x * 2).sum(), backend="eager", dynamic=None)
    with observe() as seen:
        for batch in batches:
            compiled(batch)
    torch.compiler.reset()
    return len(seen.compiles), len(seen.recompiles)


def test_buckets_keep_compiles_few():
    """Lengths of one bucket are one shape: one compile; without the stabilizer there are two."""
    assert runs(map(ids, (5, 6, 7))) == (2, 1)
    assert runs(EIGHT.bucket_batch(ids(length)) for length in (5, 6, 7)) == (1, 0)


def test_marked_dims_do_not_recompile():
    """With the length marked in each batch the first compile serves all lengths."""
    assert runs(EIGHT.mark_dynamic_dims(ids(length)) for length in (5, 6, 7)) == (1, 0)
    assert runs(EIGHT.mark_dynamic_dims(ids(length), dim=-1) for length in (5, 6, 7)) == (1, 0)


def test_what_is_marked():
    """Every tensor that has the dimension, but sizes of 0 and 1, which would not compile marked; the batch returns."""
    batch = {"input_ids": ids(), "labels": torch.ones(2), "nested": [ids(5)], "one": ids(1), "n": 3}
    assert EIGHT.mark_dynamic_dims(batch) is batch
    marked = [hasattr(t, "_dynamo_dynamic_indices")
              for t in (batch["input_ids"], batch["labels"], batch["nested"][0], batch["one"])]
    assert marked == [True, False, True, False]
    with pytest.raises(ValueError, match="no tensor of the batch has a dimension 2"):
        EIGHT.mark_dynamic_dims(batch, dim=2)
