"""What a kernel does, told by its name, and a name short enough to read.

One table of patterns, tried in order: CUDA kernels of PyTorch, cuBLAS, cuDNN, CUTLASS, NCCL and Triton, and PyTorch's
operators for a profile on a CPU.
"""

from __future__ import annotations

import functools
import re

# (class, pattern): the first that is found in the name decides. Names differ by card (cuBLAS has kernels for each
# architecture), version and shape, so the patterns are what those of one kind have in common.
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("collective", r"nccl|nvshmem|all_?reduce|all_?gather|reduce_scatter|multimem_|^gloo:|^c10d::"),
    ("copy", r"^Mem(cpy|set)\b|^\[CUDA mem|CatArrayBatchedCopy|\w*copy_kernel|copy_device_to_device|FillFunctor"),
    ("copy", r"^aten::(copy_|clone|contiguous|_to_copy|to|fill_|zero_|zeros|zeros_like|ones|full|cat|stack)$"),
    ("copy", r"^aten::(slice_backward|select_backward|constant_pad_nd)$"),
    # FlashAttention, memory-efficient attention (fmha), cuDNN's, FlexAttention's Triton templates, and this project's.
    (
        "attention",
        r"flash_?(fwd|bwd|attn|attention|forward|backward|preprocess|combine)|\bflash::|fmha|AttentionKernel",
    ),
    ("attention", r"attention_kernel|cudnn_generated\w*sdpa|sdpa|triton_tem_fused\w*flex_attention|flex_attention"),
    ("attention", r"scaled_dot_product|\bmha_"),
    (
        "matmul",
        r"gemm|gemv|nvjet|cutlass|xmma|wgmma|splitKreduce|cublasLt|cublas\w*dot|triton_(tem_fused_)?\w*(mm|bmm)\b",
    ),
    ("matmul", r"triton_tem_fused\w*_(add)?mm|triton_tem_fused\w*_(ba)?d?d?bmm|(implicit_)?convolve|conv2d|dot_kernel"),
    ("matmul", r"^aten::(mm|bmm|addmm|baddbmm|addbmm|matmul|linear|mv|addmv|dot|einsum|convolution\w*|mkldnn_\w+)$"),
    ("softmax", r"soft_?max(?!Pool)"),
    ("norm", r"(layer|rms|batch|group)_?norm|cuComputeGrad(Input|GammaBeta)|GammaBetaBackward"),
    ("indexing", r"embedding|index(ing|Select|_\w+|FuncLargeIndex)|gather|scatter|take_along|compute_grad_weight"),
    ("indexing", r"sum_and_scatter|krn_partial|radix_?sort|DeviceRadix|DeviceMergeSort|topk|bitonicSort|nll_loss"),
    ("indexing", r"^aten::(embedding\w*|gather|scatter\w*|index\w*|masked_\w+|topk|sort|argsort)$"),
    (
        "random",
        r"distribution_(elementwise|nullary)|philox|curand|^aten::(randn?|randint|normal_|uniform_|bernoulli_?)$",
    ),
    ("reduction", r"reduce|LpNorm|triton_(red|per)_|Scan|scan_|weighted_sum"),
    (
        "reduction",
        r"^aten::(sum|mean|amax|amin|max|min|var|std|norm|linalg_vector_norm|logsumexp|argmax|all|any|cumsum)$",
    ),
    ("elementwise", r"elementwise|pointwise|multi_tensor_apply|triton_(poi|for)_|fused_adam|dropout|triu_tril|arange"),
    (
        "elementwise",
        r"^aten::(_foreach_\w+|_fused_\w+|(add|sub|rsub|mul|div|pow|sqrt|rsqrt|exp|log|neg|abs|sigmoid|silu|tanh|gelu|relu|"
        r"where|square|reciprocal|lerp|addcmul|addcdiv|clamp|maximum|minimum|cos|sin|eq|ne|lt|le|gt|ge|logical_\w+|"
        r"bitwise_\w+|isfinite|tril|triu|sigmoid_backward|silu_backward|tanh_backward|arange)_?)$",
    ),
    ("graph", r"^CUDA graph"),
    # Operators that only describe a tensor anew: on a GPU they launch nothing.
    (
        "view",
        r"^aten::((_unsafe_)?view|(_)?reshape(_alias)?|as_strided|transpose|t|numpy_T|permute|expand|slice|select)$",
    ),
    ("view", r"^aten::(squeeze|unsqueeze|detach|alias|flatten|unflatten|narrow|empty\w*|result_type|resolve_\w+)$"),
)
_COMPILED = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _PATTERNS)

CLASSES = (*dict.fromkeys(name for name, _ in _PATTERNS), "other")
# What each kernel of these does to a byte that it reads or writes takes less time than moving it.
MOVES_BYTES = ("copy", "softmax", "norm", "indexing", "random", "reduction", "elementwise")
COMPUTES = ("matmul", "attention")  # mostly matrix products


@functools.lru_cache(maxsize=4096)
def kernel_class(name: str) -> str:
    """One of `CLASSES` for a kernel's whole name, for example "matmul" for "ampere_sgemm_128x64_tn"."""
    return next((label for label, pattern in _COMPILED if pattern.search(name)), "other")


@functools.lru_cache(maxsize=4096)
def short_name(name: str) -> str:
    """The name without return type, namespaces and parameters: what distinguishes kernels, alike from every profiler.

    For example "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, array<char*, 3>>".
    """
    if name.startswith("aten::"):
        return name
    name = re.sub(r"\(anonymous namespace\)::|<unnamed>::|\[(clone|with)[^\]]*\]", "", name)
    name = re.sub(r"\((unsigned )?(int|long|long long|short|bool|char)\)(?=-?\d)", "", name)  # nsys: <(int)4, …>
    name = re.sub(r"\b(\d+)(u|l|ul|ull|ll)\b", r"\1", name)  # others: <4ul>
    name = re.sub(r"^(static |__global__ )*(void|int) ", "", name)
    name = _without_parameters(name)
    name = re.sub(r"\b(?:\w+::)+(?=\w|\{|\[)", "", name)
    name = re.sub(r"^(Memcpy \w+|Memset) \(.*\)$", r"\1", name)
    name = re.sub(r"_execute_kernel(__5x)?_cublas$", "", name)  # as most of cuBLAS's end
    name = re.sub(r"\s*([*&,<>])\s*", r"\1", name).replace(",", ", ")
    return name.strip() or "unnamed"


def _without_parameters(name: str) -> str:
    """Drops what follows the first "(" outside of template arguments: f<g(int)>(float*) is f<g(int)>."""
    depth = 0
    for index, character in enumerate(name):
        if character == "<":
            depth += 1
        elif character == ">" and name[index - 1] != "-":
            depth -= 1
        elif character == "(" and depth == 0 and index > 0 and not name.startswith("Mem"):
            return name[:index]
    return name
