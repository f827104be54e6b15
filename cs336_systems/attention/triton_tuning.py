"""Tile sizes, warps and pipeline depth of the FlashAttention-2 kernels, by GPU architecture, head_dim, dtype and pass.
"""

from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "dkdv", "dq", "fused", "one_pass"]


@dataclass(frozen=True)
class KernelConfig:
    """How a kernel is cut into tiles and compiled."""

    block_own: int  # rows of the tile that a program owns: queries in forward and dq, keys in dkdv and one_pass
    block_step: int  # rows of the tiles that it steps through
    num_warps: int
    num_stages: int
    use_tma: bool = False  # fetch the stepped-through tiles by tensor descriptor (sm_90 and later)
    delay: bool = False  # run the last products of a tile during the softmax of the next
    reduce_by_tma: bool = False  # one_pass: add to dQ by tensor descriptor instead of by atomics (sm_90 and later)


def choose_config(pass_name, problem) -> KernelConfig:
    return KernelConfig(64, 64, 4, 2)


Plan = tuple[tuple[Pass, KernelConfig], ...]


def choose_backward_plan(problem) -> Plan:
    return (("dkdv", choose_config("dkdv", problem)), ("dq", choose_config("dq", problem)))
