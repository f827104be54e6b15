"""Which configuration the FlashAttention-2 kernels run in: tile sizes, warps and pipeline depth, by GPU architecture,
head_dim, dtype and pass.

The tables below are all that a user's call looks at: every process and every rank chooses the same. Hopper's rows were
measured on an H200; the others are the largest tiles that fit a card's shared memory and registers, and the tests
compile every one of them for every architecture. For another card, `triton_autotune.py` measures, when asked to.
"""

from typing import Literal, NamedTuple

import torch

Pass = Literal["forward", "dkdv", "dk", "dv", "dq", "fused"]


class KernelConfig(NamedTuple):
    """How a kernel is cut into tiles and compiled."""

    block_own: int  # rows of the tile that a program owns: queries in forward and dq, keys in dkdv
    block_step: int  # rows of the tiles that it steps through
    num_warps: int
    num_stages: int
    use_tma: bool = False  # fetch the stepped-through tiles by tensor descriptor (sm_90)
    max_registers: int | None = None  # a thread, where warps specialise


# What the backward pass launches after a preprocess, if any: ("dkdv", …) or ("dv", …) and ("dk", …), then ("dq", …); or
# all at once: ("fused", …).
Passes = tuple[tuple[Pass, KernelConfig], ...]


class Gpu(NamedTuple):
    """What a choice depends on of the card."""

    name: str
    arch: int  # compute capability, 90 for sm_90; 0 is Triton's interpreter
    n_sm: int
    shared_memory_bytes: int  # that one program can have


INTERPRETER = Gpu("Triton's interpreter", 0, 1, 1 << 30)


class Problem(NamedTuple):
    """One call, as the kernels and the choice of their configuration see it."""

    batch: int
    heads: int
    group: int  # query heads to a key/value head
    n_queries: int
    n_keys: int
    head_dim: int
    block_d: int  # head_dim padded to a power of two, at least 16, for tl.dot
    dtype: torch.dtype
    is_causal: bool
    scale: float
    dropout_p: float
    dropout_scale: float  # 1 / (1 - dropout_p)
    precision: str  # tl.dot's input_precision, or "fp16x3"
    gpu: Gpu

    @property
    def parts(self) -> int:
        """How many tensors stand for each operand: 2 where float32 is split into pairs of float16."""
        return 2 if self.precision == "fp16x3" else 1


def _rows(table: dict[Pass, list[tuple[int, int, int, int]]], use_tma: bool) -> dict[tuple[Pass, int], KernelConfig]:
    return {
        (name, block_d): KernelConfig(*row, use_tma)
        for name, rows in table.items()
        for block_d, row in zip((16, 32, 64, 128, 256), rows, strict=True)
    }


# Rows: (block_own, block_step, num_warps, num_stages) for head_dim up to 16, 32, 64, 128, 256.
_HOPPER_16_BIT = _rows(
    {
        "forward": [(64, 64, 4, 3), (64, 64, 4, 3), (64, 128, 4, 3), (64, 64, 4, 3), (64, 32, 4, 2)],
        "dkdv": [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 1)],
        "dq": [(64, 64, 4, 2), (64, 64, 4, 2), (128, 64, 8, 3), (128, 64, 8, 3), (64, 32, 8, 1)],
        "fused": [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 1)],
    },
    use_tma=True,
)
_HOPPER_PARTS = _rows(
    {
        "forward": [(64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2), (32, 16, 8, 1)],
        "dkdv": [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 8, 2), (16, 32, 8, 1)],
        "dq": [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (16, 32, 4, 1)],
        "fused": [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 8, 2), (16, 32, 8, 1)],
    },
    use_tma=True,
)
# Accumulators of dK and dV together leave room for tiles of 32 keys only. Apart they compute the scores twice, in tiles
# of 128.
_HOPPER_PARTS |= {
    ("dv", 128): KernelConfig(128, 64, 8, 2, use_tma=True),
    ("dk", 128): KernelConfig(128, 32, 8, 2, use_tma=True),
}
_HOPPER_TF32 = _rows(
    {
        "forward": [(64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 3), (16, 32, 8, 1), (16, 16, 8, 1)],
        "dkdv": [(64, 32, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2), (16, 32, 8, 1), (16, 16, 8, 1)],
        "dq": [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1), (16, 32, 8, 1), (16, 16, 8, 1)],
        "fused": [(32, 32, 4, 2), (32, 32, 4, 2), (64, 32, 8, 2), (16, 32, 8, 1), (16, 16, 8, 1)],
    },
    use_tma=True,
)
_HOPPER_16_BIT_POINTERS = _rows(
    {
        "forward": [(64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (64, 32, 4, 2)],
        "dkdv": [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1)],
        "dq": [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 8, 1)],
        "fused": [(32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 2), (32, 32, 8, 1)],
    },
    use_tma=False,
)
_ANY_16_BIT = _rows(
    {
        "forward": [(64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 2), (64, 64, 8, 1)],
        "dkdv": [(64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1)],
        "dq": [(64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 64, 8, 2), (64, 32, 8, 1)],
        "fused": [(64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 2), (64, 64, 8, 2), (32, 32, 8, 1)],
    },
    use_tma=False,
)
_ANY_TF32 = _rows(
    {
        "forward": [(64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)],
        "dkdv": [(32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)],
        "dq": [(32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)],
        "fused": [(32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)],
    },
    use_tma=False,
)
_ANY_PARTS = _rows(
    {
        "forward": [(64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 1), (16, 16, 4, 1)],
        "dkdv": [(32, 32, 4, 2), (32, 32, 4, 2), (64, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1)],
        "dq": [(32, 32, 4, 2), (32, 32, 4, 2), (64, 32, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1)],
        "fused": [(32, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 1), (32, 32, 8, 1), (16, 16, 8, 1)],
    },
    use_tma=False,
)
# Triton 3.6 has no tensor-core products for sm_75: its dots are scalar, and tiles of 64 spill.
_TURING_ROWS = [(32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)]
_TURING_16_BIT = _rows({name: _TURING_ROWS for name in ("forward", "dkdv", "dq", "fused")}, use_tma=False)
# More than two warps would exchange float32 operands of 256 columns through more shared memory than the card has.
_TURING_32_BIT = _TURING_16_BIT | {(name, 256): KernelConfig(16, 16, 2, 1) for name in ("dkdv", "fused")}
_INTERPRETER = KernelConfig(32, 32, 4, 1)
_INLINE_D_QUERIES = 256


def wants_tma(problem: Problem, *, is_backward: bool) -> bool:
    """Whether tensor descriptors pay: they save address arithmetic, and cost the host some µs each where memory has
    moved since the last call (two in the forward pass, five in the backward). In bfloat16 with one head of 128 they
    make backward take 20 µs instead of 31 at length 512, 28 instead of 54 at 1,024 (with D computed apart)."""
    n_scores = problem.batch * problem.heads * problem.n_queries * problem.n_keys
    if problem.dtype.itemsize == 2:
        enough = 1 << 18 if is_backward else 1 << 20
    else:
        enough = 1 << 24 if is_backward else 1 << 26
    return problem.gpu.arch == 90 and n_scores >= enough


def choose(name: Pass, problem: Problem, use_tma: bool) -> KernelConfig:
    """The configuration of one pass; use_tma says that descriptors can and shall be used."""
    arch = problem.gpu.arch
    if arch == 0:
        return _INTERPRETER
    is_16_bit = problem.dtype.itemsize == 2
    if arch < 80:
        table = _TURING_16_BIT if is_16_bit else _TURING_32_BIT
    elif problem.parts == 2:
        table = _HOPPER_PARTS if use_tma else _ANY_PARTS
    elif use_tma:
        table = _HOPPER_16_BIT if is_16_bit else _HOPPER_TF32
    elif arch == 90 and is_16_bit:
        table = _HOPPER_16_BIT_POINTERS
    else:
        table = _ANY_16_BIT if is_16_bit else _ANY_TF32
    return table[name, problem.block_d]


def choose_backward(problem: Problem, use_tma: bool) -> Passes:
    """One launch for dK, dV and dQ where the programs of either would leave much of the card idle, else two, or three
    where dK and dV do not fit together."""
    config = choose("fused", problem, use_tma)
    rows = problem.heads * problem.n_queries + problem.heads // problem.group * problem.n_keys
    if problem.gpu.arch == 0 or problem.batch * rows <= 8 * problem.gpu.n_sm * config.block_own:
        return (("fused", config),)
    is_apart = problem.parts == 2 and use_tma and problem.block_d == 128
    names: tuple[Pass, ...] = ("dv", "dk", "dq") if is_apart else ("dkdv", "dq")
    return tuple([(name, choose(name, problem, use_tma)) for name in names])


def wants_inline_d(problem: Problem, passes: Passes) -> bool:
    """Whether the backward pass computes D where it uses it, without a preprocess: one launch instead of two, which is
    what counts where the host takes longer than the kernels; each tile of keys reads o beside dO."""
    ((name, config), *_) = passes
    return name == "fused" and not config.use_tma and problem.parts == 1 and problem.n_queries <= _INLINE_D_QUERIES


def chunk_size(problem: Problem, config: KernelConfig, n_blocks: int, n_chunks: int | None = None) -> int:
    """How many keys one program of the forward pass attends to: all, unless n_blocks tiles of queries (and heads, and
    batch) are too few for the card, or n_chunks is given."""
    if n_chunks is None:
        # Below 4,096 keys only where all four parts run at once: the kernels then take 0.5 to 0.8 of the time (one
        # head, H200), for 8 µs of the host's. Below 1,024 the second launch and its buffers cost more than they save.
        n_sm, n_keys = problem.gpu.n_sm, problem.n_keys
        is_cut = n_blocks < n_sm if n_keys >= 4096 else n_keys >= 1024 and 4 * n_blocks <= n_sm
        n_chunks = 4 if is_cut else 1
    if n_chunks <= 1:
        return problem.n_keys
    granule = max(config.block_own, config.block_step)
    return -(-problem.n_keys // (n_chunks * granule)) * granule
