"""Linear and cross-entropy in one, against float64 arithmetic, through Triton's interpreter on a CPU and compiled on a
GPU; the memory it takes, and bad input."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from cs336_systems.kernels import linear_cross_entropy as module
from cs336_systems.kernels import support
from cs336_systems.kernels.linear_cross_entropy import chunk_rows, linear_cross_entropy
from tests.attention_helpers import IGNORE_INTERPRETER, PeakMemory
from tests.cross_entropy_helpers import check_against_float64, draw, loss_and_gradients, plain
from tests.kernel_helpers import DTYPES, rows_far_apart

pytestmark = IGNORE_INTERPRETER


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("n_tokens", "vocab_size", "tokens_a_chunk"),
    [(1, 1, 1), (5, 3, 2), (7, 129, 3), (6, 64, 6), (9, 100, 100), (3, 4099, 2)],
)
def test_matches_float64(n_tokens, vocab_size, tokens_a_chunk, dtype, device):
    x, weight, targets = draw(n_tokens, vocab_size, 24, dtype, device)
    row_bytes = -(-vocab_size // 64) * 64 * dtype.itemsize
    check_against_float64(x, weight, targets, chunk_bytes=tokens_a_chunk * row_bytes)


def test_leading_dimensions_and_int32_targets(device):
    x, weight, targets = draw(6, 33, 8, torch.float32, device)
    loss = linear_cross_entropy(x.view(2, 3, 8), weight, targets.view(2, 3).int())
    torch.testing.assert_close(loss, plain(x, weight, targets))


def test_views(device):
    x, weight, targets = draw(8, 30, 12, torch.float32, device)
    check_against_float64(x[1::2, ::3], weight[::2, 1::3], targets[::2] // 2)


@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_ignored_tokens_count_for_nothing(ignore_index, device):
    x, weight, targets = draw(9, 5, 8, torch.float32, device)
    targets[2:5] = ignore_index
    check_against_float64(x, weight, targets, ignore_index=ignore_index, chunk_bytes=2 * 64 * 4)


def test_without_any_token_that_counts(device):
    x, weight, targets = draw(3, 5, 8, torch.float32, device)
    for tokens in (0, 3):
        loss, dx, dweight = loss_and_gradients(
            linear_cross_entropy, x[:tokens], weight, torch.full_like(targets[:tokens], -100)
        )
        assert loss.isnan()
        assert dx.tolist() == torch.zeros(tokens, 8).tolist()
        assert dweight.tolist() == torch.zeros(5, 8).tolist()


@pytest.mark.parametrize("shift", [3e4, -3e4])
def test_large_logits(shift, device):
    x, weight, targets = draw(4, 50, 8, torch.float32, device)
    with torch.no_grad():
        x[:, 0], weight[:, 0] = 1.0, shift
    check_against_float64(x, weight, targets)


@pytest.mark.parametrize("direction", [1, -1])
def test_a_maximum_that_grows_along_the_row(direction, device):
    logits = direction * torch.linspace(-6, 6, 9000, device=device).view(1, -1)
    targets, losses = torch.tensor([17], device=device), torch.empty(1, device=device)
    near = logits.clone().requires_grad_()
    expected = F.cross_entropy(near, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), near)
    module._launch_cross_entropy(logits, targets, losses, -100, True)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(logits, gradient)


def test_what_is_not_finite_shows_in_the_loss(device):
    x, weight, targets = draw(4, 50, 8, torch.float32, device)
    with torch.no_grad():
        x[1, 2] = float("nan")
    assert linear_cross_entropy(x, weight, targets).isnan()
    # A logit of -inf is a probability of 0.
    logits = torch.tensor([[0.0, 1.0, float("-inf")]] * 3, device=device)
    losses = torch.empty(3, device=device)
    targets = torch.tensor([0, 1, 0], device=device)
    expected = F.cross_entropy(logits, targets, reduction="none")
    module._launch_cross_entropy(logits, targets, losses, -100, True)
    torch.testing.assert_close(losses, expected)
    assert logits[:, 2].tolist() == [0.0] * 3


def test_offsets_pass_2_to_the_31(device, monkeypatch):
    logits, losses = rows_far_apart(monkeypatch, device, 8), torch.empty(3, device=device)
    targets = torch.tensor([1, 7, 3], device=device)
    near = logits.float().clone().requires_grad_()
    expected = F.cross_entropy(near, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), near)
    module._launch_cross_entropy(logits, targets, losses, -100, True)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(logits, gradient.half())


def test_small_float16_gradients_do_not_vanish_before_they_are_scaled(device):
    # Probabilities of 1/4096, over 1024 tokens, are below what float16 holds; a scaled loss brings them back.
    x = torch.zeros(1024, 4, dtype=torch.float16, device=device)
    weight = torch.ones(4096, 4, dtype=torch.float16, device=device)
    targets = torch.zeros(1024, dtype=torch.int64, device=device)
    x[:, 0] = 1.0
    if device == "cpu":
        x, targets = x[:4], targets[:4]
    _, _, dweight = loss_and_gradients(linear_cross_entropy, x, weight, targets, scale=1024.0)
    torch.testing.assert_close(
        dweight[1:, 0].float(), torch.full((4095,), 1024 / 4096, device=device), rtol=1e-3, atol=0
    )
    assert dweight[0, 0].item() == pytest.approx(1024 * (1 / 4096 - 1), rel=1e-3)


def test_logits_never_exist_whole(device):
    """One chunk's logits, the two gradients, and little else."""
    n_tokens, vocab_size, d_model, rows = 24, 1024, 4, 3
    x, weight, targets = draw(n_tokens, vocab_size, d_model, torch.float32, device)
    chunk_bytes = rows * vocab_size * 4
    with PeakMemory() as memory, torch.no_grad():
        module._linear_cross_entropy(x, weight, targets, -100, chunk_bytes, torch.float32, True, True)
    gradients = 4 * (x.numel() + weight.numel())
    assert memory.peak_bytes <= 1.2 * (chunk_bytes + gradients)
    assert memory.peak_bytes < n_tokens * vocab_size * 4 / 2


def test_every_element_of_the_results_is_written(device, monkeypatch):
    new_empty = torch.Tensor.new_empty

    def poisoned(*args, **options):
        made = new_empty(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    x, weight, targets = draw(7, 100, 8, torch.float32, device)
    with torch.no_grad():
        results = module._linear_cross_entropy(x, weight, targets, -100, 3 * 128 * 4, torch.float32, True, True)
    assert not any(result.isnan().any() for result in results)


def test_two_runs_agree_bit_for_bit(device):
    x, weight, targets = draw(6, 100, 16, torch.float32, device)
    first, second = (loss_and_gradients(linear_cross_entropy, x, weight, targets) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("n_tokens", "vocab_size", "chunk_bytes", "rows"),
    [
        (32_768, 151_936, 2**30, 3_328),
        (4_096, 10_000, 2**30, 4_096),
        (1_000, 64, 128 * 300, 256),
        (1_000, 64, 128 * 100, 100),
        (10, 64, 128 * 7, 5),
        (0, 64, 128, 1),
    ],
)
def test_chunks(n_tokens, vocab_size, chunk_bytes, rows):
    assert chunk_rows(n_tokens, vocab_size, 2, chunk_bytes) == rows


@pytest.mark.parametrize("target", [-1, 10, 2**40])
def test_a_target_out_of_range(target):
    x, weight, targets = draw(4, 10, 8, torch.float32, "cpu")
    targets[1] = target
    with pytest.raises(ValueError, match=f"a target is {target}; .* 10, or ignore_index, -100"):
        linear_cross_entropy(x, weight, targets)


@pytest.mark.parametrize(
    ("x", "weight", "targets", "options", "message"),
    [
        (torch.ones(3, 4), torch.ones(5, 3), torch.zeros(3).long(), {}, r"\(3, 4\), \(5, 3\) and \(3,\)"),
        (torch.ones(3, 4), torch.ones(5, 4), torch.zeros(2).long(), {}, r"\(3, 4\), \(5, 4\) and \(2,\)"),
        (torch.ones(3, 4), torch.ones(4), torch.zeros(3).long(), {}, r"\(3, 4\), \(4,\) and \(3,\)"),
        (torch.ones(3, 4), torch.ones(0, 4), torch.zeros(3).long(), {}, "vocabulary must not be empty"),
        (torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3), {}, "targets is torch.float32"),
        (torch.ones(3, 4).double(), torch.ones(5, 4).double(), torch.zeros(3).long(), {}, "x is torch.float64"),
        (
            torch.ones(3, 4),
            torch.ones(5, 4).half(),
            torch.zeros(3).long(),
            {},
            "torch.float32 and weight torch.float16",
        ),
        (torch.ones(3, 4), torch.ones(5, 4, device="meta"), torch.zeros(3).long(), {}, "x on cpu, weight on meta"),
        (torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3).long(), {"chunk_bytes": 255}, "chunk_bytes is 255; .* 256"),
    ],
)
def test_bad_input(x, weight, targets, options, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(x, weight, targets, **options)


def test_a_cpu_without_the_interpreter_is_told_what_to_set(monkeypatch):
    from cs336_systems.attention import implementations

    monkeypatch.setattr(implementations, "_TRITON_IS_INTERPRETED", False)
    assert "TRITON_INTERPRET=1" in str(support.why_not("cpu"))
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2).long())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_large_on_a_gpu(dtype):
    x, weight, targets = draw(1500, 10_007, 256, dtype, "cuda")
    check_against_float64(x, weight, targets, chunk_bytes=400 * 10_048 * dtype.itemsize)


@pytest.mark.gpu
def test_peak_memory_on_a_gpu():
    x, weight, targets = draw(8192, 50_000, 256, torch.bfloat16, "cuda")
    linear_cross_entropy(x[:512], weight, targets[:512]).backward()  # cuBLAS's workspace
    x.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(x, weight, targets, chunk_bytes=2**26).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2**26 + 4 * weight.numel() + 2 * (x.numel() + weight.numel()) + 2**22
    assert peak < 2 * 8192 * 50_000 / 4  # a quarter of the logits
