"""The table of patterns against names that kernels have on sm_80 and sm_90, and PyTorch's operators have on a CPU."""

from __future__ import annotations

import pytest

from cs336_systems.profiling.kernel_classes import CLASSES, COMPUTES, MOVES_BYTES, kernel_class, short_name

KERNELS = {
    "matmul": [
        "ampere_sgemm_128x64_tn",
        "ampere_sgemm_32x128_nn",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn",
        "ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8_f2f_stages_64x5_tn",
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_execute_kernel__5x_cublas",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
        "nvjet_hsh_256x128_64x4_2x1_v_bz_coopB_TNN",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(T1::Params)",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x128_16x3_tn_align4>(T1::Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>(T1)",
        "void cublasLt::splitKreduce_kernel<(int)32, (int)16, int, float, float, float, float, (bool)1>(T4)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(T13, T6, T6)",
        "void gemmk1_kernel<int, float, 256, 5, false, false, false, false>(cublasGemmk1Params)",
        "triton_tem_fused_mm_3",
        "triton_tem_fused_addmm_relu_7",
        "triton_tem_fused_bmm_0",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, cutlass::bfloat16_t>>(T)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>(T)",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64>>(Flash_bwd_params)",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>(T1)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
        "fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<T>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm80_flash_bprop_f16_knob_3_64x64x64_4x1x1_kernel0_0",
        "triton_tem_fused_flex_attention_0",
        "triton_tem_fused_flex_attention_backward_2",
        "flash_forward_kernel",
        "flash_backward_kernel",
        "flash_preprocess_kernel",
        "flash_combine_kernel",
    ],
    "softmax": [
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(float*)",
        "void (anonymous namespace)::softmax_warp_backward<float, float, float, 10, true, false>(float*, float const*)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, LogSoftMaxForwardEpilogue>(T)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxBackwardSmem<8, c10::BFloat16, float, c10::BFloat16>(T)",
        "triton_per_fused__softmax_div_where_4",
        "triton_red_fused__log_softmax_5",
    ],
    "reduction": [
        "void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::MaxOps<float>>>(T3)",
        "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, func_wrapper_t<float, sum>>>(T3)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<T<1>, LpNormFunctor<float>>(T)",
        "triton_red_fused_add_mean_mul_pow_rsqrt_1",
        "triton_per_fused_mul_sum_12",
        "void at_cuda_detail::cub::DeviceReduceKernel<at_cuda_detail::cub::DeviceReducePolicy<int>>(T)",
        "void at_cuda_detail::cub::DeviceScanKernel<T>(T)",
        "_weighted_sum_forward_kernel",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, T>(int)",
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<BinaryFunctor<T>>>(int)",
        "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctorOnSelf_add<long>, T>(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda(T&)::T>(int)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<T<4>, FusedAdamMathFunctor<float, 4>>(T)",
        "triton_poi_fused_add_mul_silu_0",
        "triton_for_fused_0",
        "void at::native::triu_tril_kernel<bool, int, false, 16, false>(T)",
    ],
    "copy": [
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        "[CUDA memcpy Device-to-Device]",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, T>(int)",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(T&)::T>(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(T&)>(int)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<OpaqueType<4u>, unsigned int, 4>(T)",
    ],
    "indexing": [
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>(T)",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        "void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::T>(int)",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>(T)",
        "void at::native::(anonymous namespace)::compute_grad_weight<float, long>(long*, float*)",
        "void at::native::indexing_backward_kernel<float, 4>(long const*, long const*, float const*, float*, long)",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<T>(T)",
        "triton_poi_fused_embedding_dense_backward_0",
    ],
    "norm": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, float const*)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 64u, 1u, 32u>(long)",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, true>(int, float)",
    ],
    "collective": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "gloo:all_reduce",
    ],
    "random": [
        "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, T>(long, T)",
    ],
    "graph": ["CUDA graph 3"],
    "other": ["void my_own_thing<float>(float*)", "spin_kernel(long)"],
}
OPERATORS = {
    "matmul": ["aten::mm", "aten::bmm", "aten::addmm", "aten::matmul"],
    "elementwise": ["aten::mul", "aten::add_", "aten::addcmul_", "aten::lerp_", "aten::exp", "aten::where"],
    "reduction": ["aten::sum", "aten::amax", "aten::mean", "aten::logsumexp"],
    "copy": ["aten::copy_", "aten::clone", "aten::fill_", "aten::cat", "aten::slice_backward"],
    "indexing": ["aten::embedding", "aten::embedding_dense_backward", "aten::gather", "aten::scatter_add_"],
    "softmax": ["aten::_softmax", "aten::_log_softmax_backward_data"],
    "attention": ["aten::_scaled_dot_product_flash_attention_for_cpu"],
    "view": ["aten::view", "aten::transpose", "aten::empty_strided"],
    "other": ["AddBackward0", "torch::autograd::AccumulateGrad"],
}


@pytest.mark.parametrize(
    ("expected", "name"),
    [(label, name) for table in (KERNELS, OPERATORS) for label, names in table.items() for name in names],
)
def test_a_name_has_the_class_of_what_it_does(expected: str, name: str) -> None:
    assert kernel_class(name) == expected


def test_every_class_has_a_name_that_shows_it() -> None:
    assert set(CLASSES) == KERNELS.keys() | OPERATORS.keys()
    assert {*MOVES_BYTES, *COMPUTES} < set(CLASSES)
    assert not {*MOVES_BYTES} & {*COMPUTES}


@pytest.mark.parametrize(
    ("from_nsys", "from_torch", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>, "
            "std::array<char *, (unsigned long)3>>(int, T2, T3)",
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
            "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)",
            "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, array<char*, 3>>",
        ),
        ("Memcpy DtoD", "Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("Memset", "Memset (Device)", "Memset"),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_ffma_aligna4_execute_kernel__5x_cublas",
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_ffma_aligna4_execute_kernel__5x_cublas",
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_ffma_aligna4",
        ),
        (
            "void <unnamed>::softmax_warp_forward<float, float, float, (int)8, (bool)0, (bool)0>(T2 *, const T1 *)",
            "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, 0, 0>(float*, float const*)",
            "softmax_warp_forward<float, float, float, 8, 0, 0>",
        ),
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        ),
    ],
)
def test_a_kernel_has_one_short_name_in_both_profilers(from_nsys: str, from_torch: str, short: str) -> None:
    assert short_name(from_nsys) == short
    assert short_name(from_torch) == short
    assert kernel_class(from_nsys) == kernel_class(from_torch)
