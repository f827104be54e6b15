"""Launches of a compiled kernel past the Python of Triton's own launcher.

That looks for scratch memory, encodes tensor descriptors and joins tuples of some sixty arguments at every launch:
longer than a short sequence's kernel runs. Here all but pointers and seeds is joined once, and descriptors are kept.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import triton
from triton.backends.nvidia import driver

from cs336_systems.attention.implementations import HAS_KNOWN_TRITON
from cs336_systems.attention.triton_plan import Step, Tile

# launch(pointers, stream, seed, offset), with the addresses of the tensors that the step's operands name.
Launch = Callable[[Sequence[int], int, int, int], None]

# The arguments of the C function that Triton generates for a kernel are not a public interface; these are the first of
# the known version's: grid, stream, function, flags, scratch, metadata and hooks.
_KNOWN_ARGUMENTS = "iiiKKppOOOOOO"
_MAX_DESCRIPTORS = 4096


@functools.lru_cache(maxsize=_MAX_DESCRIPTORS)
def _descriptor(
    pointer: int,
    swizzle: int,
    element_bytes: int,
    element_type: int,
    tile: tuple[int, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> Any:
    """A tensor descriptor as the hardware reads it. It says nothing but these arguments, and is found again by all of
    them: memory that another tensor has taken over since can share it only if the tensors look alike."""
    cuda: Any = triton.runtime.driver.active
    zero_fill = 0
    return cuda.utils.fill_tma_descriptor(
        pointer, swizzle, element_bytes, element_type, tile, shape, strides, zero_fill
    )


def _c_launcher(launcher: Any, has_descriptors: bool) -> Callable | None:
    """The C function under Triton's launcher, or None if that isn't made as this module knows it."""
    if (
        not HAS_KNOWN_TRITON
        or getattr(driver, "_BASE_ARGS_FORMAT", None) != _KNOWN_ARGUMENTS
        or not isinstance(launcher, driver.CudaLauncher)
        or launcher.global_scratch_size > 0
        or launcher.profile_scratch_size > 0
    ):
        return None
    if has_descriptors:  # what encodes them at every launch is a closure around the C function
        return inspect.getclosurevars(launcher.launch).nonlocals.get("launcher")
    return launcher.launch


def direct_launch(step: Step, compiled: Any) -> Launch | None:
    """What launches a step's kernel, compiled for operands of 16-byte alignment, on the current device; None where
    only Triton's own way is known to work. No profiler's hook is called."""
    tiles = [x for x in step.operands if isinstance(x, Tile)]
    launcher = getattr(compiled, "run", None)
    c_launch = _c_launcher(launcher, bool(tiles))
    if c_launch is None or launcher is None:
        return None
    grid = step.n_programs, 1, 1
    fixed = (
        compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None,
        compiled.packed_metadata, None, None, None,
    )  # fmt: skip
    numbers, constants, takes_seed = step.numbers, step.constants, step.takes_seed
    pick = _picker(step.operands, compiled.metadata.tensordesc_meta if tiles else ())
    if pick is None:
        return None

    def launch(pointers: Sequence[int], stream: int, seed: int, offset: int) -> None:
        if takes_seed:
            c_launch(*grid, stream, *fixed, *pick(pointers), *numbers, seed, offset, *constants)
        else:
            c_launch(*grid, stream, *fixed, *pick(pointers), *numbers, *constants)

    return launch


def _picker(
    operands: tuple[int | Tile, ...], encodings: Sequence[dict[str, Any]]
) -> Callable[[Sequence[int]], Sequence[Any]] | None:
    """From pointers to a kernel's operands; `encodings` say how the compiler wants each descriptor, in order."""
    if not encodings:
        if any(isinstance(x, Tile) for x in operands):
            return None  # the kernel takes pointers, shapes and strides in place of descriptors
        return itemgetter(*operands)
    remaining, parts = iter(encodings), []
    for x in operands:
        if isinstance(x, Tile):
            encoding = next(remaining)
            if encoding["fp4_padded"]:
                return None
            looks = (
                encoding["swizzle"], encoding["elem_size"], driver.TMA_DTYPE_DEVICE_TO_HOST[encoding["elem_type"]],
                tuple(encoding["block_size"]), tuple(x.shape), tuple(x.strides),
            )  # fmt: skip
            parts.append((x.tensor, looks, (*x.shape, *x.strides)))
        else:
            parts.append((x, None, ()))

    def pick(pointers: Sequence[int]) -> list[Any]:
        picked = []
        for position, looks, also in parts:
            pointer = pointers[position]
            if looks is None:
                picked.append(pointer)
            else:
                picked.append(_descriptor(pointer, *looks))
                picked += also
        return picked

    return pick
