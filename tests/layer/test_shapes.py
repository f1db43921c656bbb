"""BucketConfig and ShapeStabilizer: what is padded with what, what is refused, and that it keeps shapes few."""

from __future__ import annotations

import re
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_torchcompile import BucketConfig, ShapeStabilizer, observe

pytestmark = pytest.mark.needs_torch
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
    ({"input_ids": ids(), "labels": torch.ones(2, 3, 3)}, "labels has the shape (2, 3, 3); expected (batch, length)"),
    ({"input_ids": ids(), "mask": torch.ones(2, 1, 3, 9)}, "mask (its keys) has length 9, longer than the largest"),
    ({"input_ids": ids(), "mask": torch.ones(2, 1, 9, 3)}, "mask (its queries) has length 9, longer than the largest"),
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


# masks of more than two dimensions, other values, the other side


def test_attention_masks():
    """Added keys are hidden, added queries see the real keys; one query is broadcast and stays one."""
    causal = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    padded = EIGHT.bucket_batch({"ids": ids(), "attn_mask": causal})["attn_mask"]
    assert padded.shape == (2, 1, 4, 4)
    assert padded[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    added = EIGHT.bucket_batch({"ids": ids(), "attn_mask": torch.zeros(2, 3, 3)})["attn_mask"]
    low = torch.finfo(torch.float32).min
    assert added[0].tolist() == [[0, 0, 0, low]] * 4
    weights = EIGHT.bucket_batch({"ids": ids(), "attn_mask": torch.ones(2, 3, 3)})["attn_mask"]
    assert weights[0].tolist() == [[1, 1, 1, 0]] * 4
    broadcast = EIGHT.bucket_batch({"ids": ids(), "attn_mask": torch.ones(2, 1, 1, 3)})["attn_mask"]
    assert broadcast.shape == (2, 1, 1, 4)
    cross = EIGHT.bucket_batch({"ids": ids(), "attn_mask": torch.ones(2, 1, 6, 3)})["attn_mask"]
    assert cross.shape == (2, 1, 8, 4)


def test_padding_masks_say_what_is_ignored():
    """torch's own: True, or -inf where it is added. What can mean either is refused."""
    for name in ("src_key_padding_mask", "encoder_padding_mask", "Pad_Mask"):
        padded = EIGHT.bucket_batch({"ids": ids(), name: torch.zeros(2, 3, dtype=torch.bool)})
        assert padded[name].tolist() == [[False, False, False, True]] * 2
    added = torch.tensor([[0.0, 0.0, float("-inf")]] * 2)
    for mask in (added, torch.zeros(2, 3)):
        padded = EIGHT.bucket_batch({"ids": ids(), "tgt_key_padding_mask": mask})["tgt_key_padding_mask"]
        assert padded.tolist() == [[*row, float("-inf")] for row in mask.tolist()]
    causal = torch.ones(2, 1, 3, 3, dtype=torch.bool).triu(1)
    padded = EIGHT.bucket_batch({"ids": ids(), "padding_mask": causal})["padding_mask"]
    assert padded[0, 0].int().tolist() == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1]]
    for mask in (ids(), torch.ones(2, 3)):
        with pytest.raises(ValueError, match=r"does not say what it ignores; .*pad_values=\{'padding_mask': \.\.\.\}"):
            EIGHT.bucket_batch({"ids": ids(), "padding_mask": mask})
    asked = ShapeStabilizer((4,), pad_values={"padding_mask": 1})
    assert asked.bucket_batch({"ids": ids(), "padding_mask": ids()})["padding_mask"].tolist() == [[1, 1, 1, 1]] * 2


def test_a_padding_mask_changes_nothing():
    """The real tokens of torch's own encoder get what they had."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x, mask = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, False, False]])
    stabilizer = ShapeStabilizer((4,), pad_values={"x": 7.0})
    padded = stabilizer.bucket_batch({"ids": ids(), "x": x, "src_key_padding_mask": mask})
    found = layer(padded["x"], src_key_padding_mask=padded["src_key_padding_mask"])
    expected = layer(x, src_key_padding_mask=mask)
    torch.testing.assert_close(stabilizer.unpad(found, 3)[~mask], expected[~mask])


@pytest.mark.parametrize(("name", "row", "pad"), [
    ("attention_mask", [0.0, 0.0, -1e9], torch.finfo(torch.float32).min),
    ("attention_mask", [0.0, 0.0, 0.0], torch.finfo(torch.float32).min),
    ("attention_mask", [1.0, 1.0, 0.0], 0.0), ("loss_mask", [0.0, 0.0, 0.0], 0.0), ("loss_mask", [0.5, 2.0, 0.0], 0.0),
])  # fmt: skip
def test_floating_masks_of_two_dimensions(name, row, pad):
    """One that is added to the scores hides what is padded by the lowest number; one of weights by zero."""
    assert EIGHT.bucket_batch({"ids": ids(), name: torch.tensor([row])})[name].tolist() == [[*row, pad]]


@pytest.mark.parametrize("name", ["label_ids", "target_ids", "lm_labels_ids", "labels"])
def test_labels_are_no_ids(name):
    """Whatever they are called, the loss must ignore what is padded."""
    assert EIGHT.bucket_batch({"ids": ids(), name: ids()})[name].tolist() == [[1, 1, 1, -100]] * 2


@pytest.mark.parametrize("kind", ["bool", "added"])
def test_a_padded_mask_changes_nothing(kind):
    """Attention under a padded mask gives the real tokens what they had, and nothing that is not finite."""
    causal = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    mask = causal if kind == "bool" else torch.zeros(2, 1, 3, 3).masked_fill(~causal, float("-inf"))
    x = torch.randn(2, 1, 3, 5)
    batch = {"ids": ids(), "mask": mask, "x": x.transpose(1, 2)}
    for side in ("left", "right"):
        stabilizer = ShapeStabilizer((4, 8), side=side, pad_values={"x": 7.0})
        padded = stabilizer.bucket_batch(batch)
        wide = padded["x"].transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(wide, wide, wide, padded["mask"])
        assert out.isfinite().all()
        expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)
        torch.testing.assert_close(stabilizer.unpad(out.transpose(1, 2), 3).transpose(1, 2), expected)


def test_values_of_ones_own():
    """pad_values come before what a name says, take tensors of any dtype and of more dimensions, None leaves alone."""
    stabilizer = ShapeStabilizer((4,), pad_values={"embeds": -1.5, "labels": 0, "token_type_ids": None, "extra": 2})
    padded = stabilizer.bucket_batch({"ids": ids(), "embeds": torch.ones(2, 3, 5), "labels": ids(),
                                      "token_type_ids": ids(), "extra": ids()})
    assert padded["embeds"].shape == (2, 4, 5)
    assert (padded["embeds"][0, 3] == -1.5).all()
    assert [padded[name].shape[1] for name in ("labels", "token_type_ids", "extra")] == [4, 3, 4]
    assert (padded["labels"][0, 3], padded["extra"][0, 3]) == (0, 2)
    with pytest.raises(ValueError, match=re.escape("ids is torch.int64, which cannot hold 0.5, the value")):
        ShapeStabilizer((4,), pad_values={"ids": 0.5}).bucket_batch({"ids": ids()})
    with pytest.raises(ValueError, match=re.escape("extra has the shape (2,); expected (batch, length, ...)")):
        stabilizer.bucket_batch({"ids": ids(), "extra": torch.ones(2)})


def test_the_left_side():
    """Generation wants the last token last."""
    stabilizer = ShapeStabilizer(BucketConfig((4,), pad_token_id=9), side="left")
    padded = stabilizer.bucket_batch({"ids": ids(), "mask": ids()})
    assert (padded["ids"][0].tolist(), padded["mask"][0].tolist()) == ([9, 1, 1, 1], [0, 1, 1, 1])
    assert stabilizer.unpad(torch.arange(8).view(2, 4), 3).tolist() == [[1, 2, 3], [5, 6, 7]]
    with pytest.raises(ValueError, match="side='both': expected 'right' or 'left'"):
        ShapeStabilizer((4,), side="both")


def test_batches_inside_of_batches():
    """Dicts go by their own keys, tensors in a tuple by the name of the tuple."""
    padded = EIGHT.bucket_batch({"text": {"input_ids": ids(), "n": 1}, "labels": (ids(), [ids(5)]), "image": ids()})
    assert padded["text"]["input_ids"].shape == (2, 4)
    assert (padded["labels"][0].shape, padded["labels"][1][0].shape) == ((2, 4), (2, 8))
    assert padded["labels"][1][0][0, 7] == -100
    assert padded["image"].shape == (2, 3)


# and back


@dataclass
class Output:
    logits: torch.Tensor
    pooled: torch.Tensor
    loss: float = 0.0


def test_unpad_cuts_an_output():
    """Every tensor of the bucket's size in that dimension, in any structure; the rest stays."""
    made = EIGHT.unpad({"a": Output(torch.ones(2, 4, 7), torch.ones(2, 9), 1.0), "b": [torch.ones(2, 4)]}, ids())
    assert (made["a"].logits.shape, made["a"].pooled.shape, made["a"].loss) == ((2, 3, 7), (2, 9), 1.0)
    assert made["b"][0].shape == (2, 3)
    assert EIGHT.unpad(torch.ones(4, 7, 2), 3, dim=0).shape == (3, 7, 2)
    assert EIGHT.unpad(torch.ones(2, 7, 4), {"x": 1, "text": {"input_ids": ids()}}, dim=-1).shape == (2, 7, 3)
    whole = torch.ones(2, 4, 7)
    assert EIGHT.unpad(whole, 4) is whole


@pytest.mark.parametrize("decoder", ["decoder_input_ids", "labels"])
def test_an_encoder_and_a_decoder(decoder):
    """Each output goes by the bucket that it has; where two lengths share one, nobody knows."""
    batch = {"input_ids": ids(7), decoder: ids(3)}
    made = EIGHT.unpad({"enc": torch.ones(2, 8, 5), "logits": torch.ones(2, 4, 9), "n": torch.ones(2, 5)}, batch)
    assert [tuple(made[name].shape) for name in made] == [(2, 7, 5), (2, 3, 9), (2, 5)]
    assert EIGHT.unpad(torch.ones(2, 4, 9), batch).shape == (2, 3, 9)
    assert EIGHT.unpad(torch.ones(2, 8), {"input_ids": ids(7), decoder: ids(7)}).shape == (2, 7)
    both = {"input_ids": ids(7), decoder: ids(5)}
    with pytest.raises(ValueError, match="an output has 8 in dimension 1, the bucket of sequences of length 5 and 7"):
        EIGHT.unpad(torch.ones(2, 8), both)
    assert EIGHT.unpad(torch.ones(2, 8), 5).shape == (2, 5)
    with pytest.raises(ValueError, match="no tensor has the bucket's size, 4 or 8, in dimension 1"):
        EIGHT.unpad(torch.ones(2, 9), batch)


@pytest.mark.parametrize(("value", "batch", "text"), [
    (torch.ones(2, 7), 3, "no tensor has the bucket's size, 4, in dimension 1 (shapes: (2, 7))"),
    ({}, 3, "no tensor has the bucket's size, 4, in dimension 1 (shapes: there are none)"),
    (torch.ones(2, 7), 9, "the batch has length 9, longer than the largest bucket, 8"),
    (torch.ones(2, 7), {"x": ids()}, "no token ids"),
    (torch.ones(2, 7), torch.ones(2), "the batch has no token ids, so its length is not known"),
])  # fmt: skip
def test_what_cannot_be_unpadded(value, batch, text):
    """Nothing is returned uncut in silence."""
    with pytest.raises(ValueError, match=re.escape(text)):
        EIGHT.unpad(value, batch)


NAMED = ["input_ids", "decoder_input_ids", "attention_mask", "cross_mask", "labels", "token_type_ids", "weights", "n"]
Pair = namedtuple("Pair", "input_ids labels")


@st.composite
def tensors(draw, name):
    """A tensor as one finds it under a name."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(0, 20))
    shape = (rows, length)
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    if name.endswith("mask"):
        dtype = draw(st.sampled_from([torch.bool, torch.int64, torch.float32, torch.bfloat16]))
        shape = draw(st.sampled_from([(rows, length), (rows, 1, 1, length), (rows, 1, length, length),
                                      (rows, 2, draw(st.integers(0, 20)), length)]))
    if name == "labels" and draw(st.booleans()):
        shape = (rows,)
    if name == "weights":
        shape, dtype = draw(st.lists(st.integers(0, 20), max_size=4)), torch.float32
    return torch.randint(0, 2 if name.endswith("mask") else 50, tuple(shape)).to(dtype)


@st.composite
def batches(draw, depth=1):
    """A batch of any form that has token ids."""
    names = ["input_ids", *draw(st.lists(st.sampled_from(NAMED[1:]), unique=True))]
    held = {name: draw(tensors(name)) if name != "n" else draw(st.integers()) for name in names}
    form = draw(st.sampled_from(["dict", "tensor", "tuple", "list", "named", "nested"]))
    if form == "tensor":
        return held["input_ids"]
    if form in ("tuple", "list"):
        mask = torch.ones_like(held["input_ids"], dtype=torch.bool)
        return (held["input_ids"], mask) if form == "tuple" else [held["input_ids"], mask]
    if form == "named":
        return Pair(held["input_ids"], draw(tensors("labels")))
    if form == "nested" and depth:
        return {"inner": draw(batches(depth - 1)), **held}
    return held


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return one == other


@given(batch=batches(), sizes=st.sets(st.integers(1, 40), min_size=1), side=st.sampled_from(["left", "right"]),
       value=st.integers(0, 9))
def test_unpad_undoes_pad(batch, sizes, side, value):
    """unpad(bucket_batch(x), x) is x, bit by bit, for every form of batch, every list of buckets and both sides."""
    stabilizer = ShapeStabilizer(BucketConfig(sorted({*sizes, 40}), value), side=side, pad_values={"weights": None})
    padded = stabilizer.bucket_batch(batch)
    assert equal(stabilizer.unpad(padded, batch), batch)


def test_bounds_of_a_dynamic_dimension():
    """min and max are handed to torch, and a size outside of them is refused at once."""
    marked = EIGHT.mark_dynamic_dims({"ids": ids(5)}, min=2, max=64)["ids"]
    assert (marked._dynamo_dynamic_range != set(), hasattr(marked, "_dynamo_dynamic_indices")) == (True, True)
    with pytest.raises(ValueError, match=re.escape("(2, 65) has 65 in dimension 1, which is outside of min=2, max=64")):
        EIGHT.mark_dynamic_dims(ids(65), min=2, max=64)
    assert runs(EIGHT.mark_dynamic_dims(ids(length), min=2, max=64) for length in (5, 6, 64)) == (1, 0)
