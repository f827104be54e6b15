"""The oracle itself, against PyTorch's attention and against arithmetic that can be done by hand."""

import math

import pytest
import torch
from torch.nn import functional as F

from cs336_systems.attention.reference import attention_reference, causal_mask
from tests.attention_helpers import make_inputs


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "n_queries", "n_keys"), [(4, 4, 9, 9), (4, 2, 5, 11), (3, 1, 11, 5)])
def test_agrees_with_pytorch(is_causal, heads, kv_heads, n_queries, n_keys):
    q, k, v = make_inputs(2, heads, n_queries, 8, kv_heads=kv_heads, n_keys=n_keys, dtype=torch.float64)
    o, _ = attention_reference(q, k, v, is_causal)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(o, expected)
    for gradient, other in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, expected)), strict=True):
        torch.testing.assert_close(gradient, other)


def test_logsumexp_by_hand():
    q = torch.tensor([[[2.0], [1.0]]])
    k = torch.tensor([[[1.0], [3.0], [5.0]]])
    o, lse = attention_reference(q, k, k, scale=0.5)
    scores = [[1.0, 3.0, 5.0], [0.5, 1.5, 2.5]]
    expected = [math.log(sum(math.exp(s) for s in row)) for row in scores]
    torch.testing.assert_close(lse[0], torch.tensor(expected))
    output = [sum(math.exp(s - total) * key for s, key in zip(row, (1, 3, 5), strict=True))
              for row, total in zip(scores, expected, strict=True)]  # fmt: skip
    torch.testing.assert_close(o[0, :, 0], torch.tensor(output))


def test_a_group_of_query_heads_reads_its_key_head():
    q, k, v = make_inputs(1, 4, 3, 8, kv_heads=2)
    o, _ = attention_reference(q, k, v)
    for head in range(4):
        alone, _ = attention_reference(q[:, head], k[:, head // 2], v[:, head // 2])
        torch.testing.assert_close(o[:, head], alone)


def test_three_dimensions_are_one_head():
    q, k, v = make_inputs(2, 5, 8, n_keys=7)
    o, lse = attention_reference(q, k, v, is_causal=True)
    with_heads = attention_reference(q[:, None], k[:, None], v[:, None], is_causal=True)
    torch.testing.assert_close((o[:, None], lse[:, None]), with_heads)


@pytest.mark.parametrize("n_keys", [0, 4])
def test_a_query_with_nothing_to_attend(n_keys):
    q, k, v = make_inputs(1, 2, 3, 8, n_keys=n_keys)
    mask = torch.ones(3, n_keys, dtype=torch.bool)
    mask[1] = False
    o, lse = attention_reference(q, k, v, mask=mask)
    empty = [0, 1, 2] if n_keys == 0 else [1]
    assert (o[:, :, empty] == 0).all()
    assert (lse[:, :, empty] == -math.inf).all()
    # The output's gradient reaches every row, the logsumexp's only rows where it is finite.
    (o.square().sum() + o.sum() + lse[lse.isfinite()].sum()).backward()
    for x in (q, k, v):
        assert x.grad.isfinite().all()
    assert (q.grad[:, :, empty] == 0).all()


def test_dropout_keeps_what_it_is_told_and_rescales():
    q, k, _ = make_inputs(1, 4, 4)
    eye = torch.eye(4).expand(1, 4, 4)  # with unit vectors for values the output is the probabilities
    probabilities, lse = attention_reference(q, k, eye)
    keep = torch.rand(1, 4, 4) > 0.5
    dropped, lse_dropped = attention_reference(q, k, eye, dropout_p=0.5, keep=keep)
    torch.testing.assert_close(dropped, probabilities * keep * 2)
    torch.testing.assert_close(lse, lse_dropped)


def test_causal_mask():
    assert causal_mask(2, 3).tolist() == [[True, False, False], [True, True, False]]
    assert causal_mask(3, 1).tolist() == [[True], [True], [True]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype):
    q, k, v = make_inputs(1, 3, 8, dtype=dtype)
    o, lse = attention_reference(q, k, v)
    assert o.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
