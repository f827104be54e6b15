"""Launches past Triton's launcher: they hand the C function what Triton's own would, and keep descriptors only for what
they describe. No GPU: Triton's launcher runs for real around a C function that records."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

import triton
from triton.backends.nvidia import driver

from cs336_systems.attention import triton_direct
from cs336_systems.attention.triton_direct import direct_launch
from cs336_systems.attention.triton_plan import Step, Tile
from cs336_systems.attention.triton_tuning import KernelConfig

CONFIG = KernelConfig(64, 64, 4, 2)
SHAPE, STRIDES, TILE = [2, 3, 40, 64], [7680, 2560, 64, 1], [1, 1, 32, 64]
TENSOR_MAP = {"swizzle": 3, "elem_size": 2, "elem_type": 9, "block_size": [1, 1, 32, 64], "fp4_padded": False}
POINTERS = [16, 32, 48, 64]


@pytest.fixture
def encoded(monkeypatch):
    """The arguments of every descriptor that is encoded."""
    calls = []

    def fill_tma_descriptor(*args):
        args = [tuple(x) if isinstance(x, list) else x for x in args]
        calls.append(tuple(args))
        return ("descriptor", *args)

    active = SimpleNamespace(utils=SimpleNamespace(fill_tma_descriptor=fill_tma_descriptor))
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    triton_direct._descriptor.cache_clear()
    yield calls
    triton_direct._descriptor.cache_clear()


class Descriptor:
    """What Triton's launcher reads of a `TensorDescriptor`."""

    def __init__(self, pointer):
        self.base = SimpleNamespace(data_ptr=lambda: pointer)
        self.shape, self.strides, self.padding = SHAPE, STRIDES, "zero"


def make(operands, takes_seed=False, encodings=(), **attributes):
    """A step, its kernel as if compiled, and the list of what the C function was called with."""
    step = Step(None, 5, CONFIG, operands, ((1, 2, 3, 4), 7, 0.5), takes_seed, (True, "ieee"))
    types = ["tensordesc<bf16[1, 1, 32, 64]>" if isinstance(x, Tile) else "*bf16" for x in operands]
    calls = []
    launcher = object.__new__(driver.CudaLauncher)
    launcher.launch = driver.wrap_handle_tensordesc(
        lambda *args: calls.append(args), dict(enumerate(types)), list(encodings)
    )
    launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, False, True
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    for name, value in attributes.items():
        setattr(launcher, name, value)
    metadata = SimpleNamespace(tensordesc_meta=list(encodings))
    return step, SimpleNamespace(run=launcher, function=99, packed_metadata=(4, 1, 1024), metadata=metadata), calls


def launched_by_triton(step, compiled, stream, seeds=()):
    operands = [Descriptor(POINTERS[x.tensor]) if isinstance(x, Tile) else POINTERS[x] for x in step.operands]
    compiled.run(
        step.n_programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
        *operands, *step.numbers, *seeds, *step.constants,
    )  # fmt: skip


def launch_of(step, compiled):
    launch = direct_launch(step, compiled)
    assert launch is not None
    return launch


TILES = (1, Tile(0, SHAPE, STRIDES, TILE), 3, Tile(2, SHAPE, STRIDES, TILE))


@pytest.mark.parametrize("takes_seed", [False, True])
@pytest.mark.parametrize(("operands", "encodings"), [((2, 0, 1, 1), ()), (TILES, (TENSOR_MAP, TENSOR_MAP))])
def test_the_c_function_gets_what_triton_would_hand_it(encoded, operands, encodings, takes_seed):
    step, compiled, calls = make(operands, takes_seed, encodings)
    launched_by_triton(step, compiled, 1234, (5, 6) if takes_seed else ())
    launch = launch_of(step, compiled)
    for _ in range(2):
        launch(POINTERS, 1234, 5, 6)
    by_triton, *direct = [[tuple(x) if isinstance(x, list) else x for x in call] for call in calls]
    assert direct == [by_triton, by_triton]


def test_a_descriptor_is_encoded_once_and_only_for_what_it_describes(encoded):
    step, compiled, calls = make(TILES, encodings=(TENSOR_MAP, TENSOR_MAP))
    launch = launch_of(step, compiled)
    for _ in range(3):
        launch(POINTERS, 0, 0, 0)
    assert [call[0] for call in encoded] == [POINTERS[0], POINTERS[2]]
    launch([160, *POINTERS[1:]], 0, 0, 0)  # another address
    assert [call[0] for call in encoded[2:]] == [160]
    shorter = [2, 3, 39, 64]
    step, compiled, _ = make((1, Tile(0, shorter, STRIDES, TILE)), encodings=(TENSOR_MAP,))
    launch_of(step, compiled)(POINTERS, 0, 0, 0)  # the address of a tensor of another shape
    assert (encoded[3][0], encoded[3][-3]) == (POINTERS[0], tuple(shorter))
    step, compiled, _ = make(TILES, encodings=(TENSOR_MAP | {"elem_type": 6}, TENSOR_MAP))
    launch_of(step, compiled)(POINTERS, 0, 0, 0)  # and of another dtype
    assert len(encoded) == 5
    assert len(calls) == 4


def test_descriptors_do_not_pile_up(encoded):
    step, compiled, _ = make((1, Tile(0, SHAPE, STRIDES, TILE)), encodings=(TENSOR_MAP,))
    launch = launch_of(step, compiled)
    n = triton_direct._MAX_DESCRIPTORS
    for i in range(n + 10):
        launch([16 * i, 0], 0, 0, 0)
    assert triton_direct._descriptor.cache_info().currsize == n


def test_what_is_not_known_goes_triton_s_way(monkeypatch):
    plain = (2, 0, 1)
    assert direct_launch(make(plain)[0], None) is None  # the interpreter compiles nothing
    assert direct_launch(make(plain)[0], SimpleNamespace(run=lambda *args: None)) is None
    for scratch in ("global_scratch_size", "profile_scratch_size"):
        assert direct_launch(*make(plain, **{scratch: 8})[:2]) is None
    assert direct_launch(*make(TILES)[:2]) is None  # compiled for cards without tensor descriptors
    assert direct_launch(*make(TILES, encodings=(TENSOR_MAP | {"fp4_padded": True}, TENSOR_MAP))[:2]) is None
    assert direct_launch(*make(plain)[:2]) is not None
    monkeypatch.setattr(driver, "_BASE_ARGS_FORMAT", "iiiKKOOOO")
    assert direct_launch(*make(plain)[:2]) is None
    monkeypatch.undo()
    monkeypatch.setattr(triton_direct, "HAS_KNOWN_TRITON", False)
    assert direct_launch(*make(plain)[:2]) is None
