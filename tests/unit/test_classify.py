"""The table of names: names as traces hold them, and names that only sound like communication."""

from __future__ import annotations

import pytest

from slipstream.core.errors import UsageError
from slipstream.core.timeline import Kind
from slipstream.trace.classify import (
    COLLECTIVE_HOST_OPS,
    HOST_COMM,
    HOST_CONTAINERS,
    HOST_LAUNCH_ANNOTATION,
    HOST_WAIT,
    KERNELS,
    PEER_COPY,
    Classifier,
    most_like_communication,
    operation,
    own_name,
    parse_user_rule,
)

COMM: dict[str, str | None] = {
    # NCCL
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "all_reduce",
    "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "all_gather",
    "ncclKernel_ReduceScatter_RING_LL_Sum_half": "reduce_scatter",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "send_recv",
    "ncclKernel_Broadcast_RING_LL_Sum_int8_t": "broadcast",
    "ncclKernel_Reduce_RING_LL_Sum_float": "reduce",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)": "all_reduce",
    "ncclDevKernel_AllReduce_Sum_bf16_NVLS_TREE_SIMPLE(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "send_recv",
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)": None,
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": None,
    "ncclDevKernelDebug_Generic(ncclDevKernelArgsStorage<4096ul>)": None,
    "void ncclDevKernel_AllGather_RING_LL<4>(ncclDevComm*)": "all_gather",
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": "all_reduce",
    "ncclSymDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymDevArgs)": "all_reduce",
    "ncclSymkDevKernel_AllGather_LLMC(ncclSymkDevWorkArgsStorage<4096ul>)": "all_gather",
    "ncclSymkDevKernel_ReduceScatter_LL_sum_f32": "reduce_scatter",
    # other libraries
    "rccl_main_kernel": None,
    "void mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)": None,
    "void mscclpp::allreduce7<(mscclpp::Op)0, __half>(__half*)": "all_reduce",
    "nvshmemi_transfer_amo_nonfetch": None,
    "nvshmem_alltoallv_vdev_kernel": "all_to_all",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)": "dispatch",
    "void deep_ep::internode_ll::combine<true, 7168, 9>(void*, void*, int*)": "combine",
    "void dpsk::ep::intranode::notify_dispatch<8>(int const*)": "dispatch",
    "void hybrid_ep::dispatch_kernel<hybrid_ep::Config>(hybrid_ep::params)": "dispatch",
    "void uccl::internode::dispatch<8>(int4*)": "dispatch",
    "void pplx::AllToAllIntraNode_dispatchKernel<true>(int)": "all_to_all",
    "mori::moe::EpDispatchIntraNodeKernel_bf16": "dispatch",
    "void EpCombineInterNodeKernel<__hip_bfloat16>(EpArgs)": "combine",
    # inference
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)": "all_reduce",
    "void vllm::cross_device_reduce_2stage<__half, 4>(vllm::RankData*)": "all_reduce",
    "void aiter::reduce_scatter_cross_device_store<__hip_bfloat16, 8>(aiter::RankData*)": "reduce_scatter",
    "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<__half>>(__half*)": "all_reduce",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8, true>(AllReduceParams)": "all_reduce",
    "void tensorrt_llm::kernels::twoShotAllReduceKernel<float, 2>(AllReduceParams)": "all_reduce",
    "void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_oneshot_lamport<(int)0>(P)": "all_reduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_twoshot_sync<__nv_bfloat16>(P)": "all_reduce",
    "void tensorrt_llm::kernels::mnnvl_throughput::moeA2ADispatchKernel<8>(P)": "dispatch",
    # symmetric memory
    "void (anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16**)": "all_reduce",
    "void c10d::symmetric_memory::two_shot_all_reduce_kernel_inplace<float, 16, 4>(float**)": "all_reduce",
    "void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)": "all_reduce",
    "void multimem_all_gather_kernel<16>(char*)": "all_gather",
    "c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long, int, int)": "barrier",
    "put_signal_kernel(unsigned int**, int)": None,
    # overlap libraries, other devices
    "void kuserbuffers_pushrecv<512>(int, int)": "recv",
    "userbuffers_fp16_sum_inplace_gpu_mc_rs_oop<8>(void*)": None,
    "oneccl_allreduce_small<bf16>": "all_reduce",
    "ccl_kernel_reduce_scatter_bf16": "reduce_scatter",
    "hcclAllReduceKernel": "all_reduce",
    "hcom_broadcast_": "broadcast",
    "mtia_comm_all_gather": "all_gather",
    "xccl_send": "send",
    # kernels of one's own
    "my_all_gather_kernel(float*)": "all_gather",
    "void mylib::AllToAllKernel<float>(float*)": "all_to_all",
    "_all_gather_kernel": "all_gather",
    "reduceScatterKernel": "reduce_scatter",
}
"""Communication, with the operation that the name tells."""

COMPUTE = (
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
    "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN",
    "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI16x16x1_SN_1LDSB0",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_64x2_tn_align8>(Params)",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>(R)",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long)",
    "void at::native::_scatter_gather_elementwise_kernel<128, 8>(int, F)",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig<OpaqueType<2u>>(O*)",
    "at::native::(anonymous namespace)::all_reduce_helper(float*)",
    "void at::cuda::detail::cub::DeviceReduceKernel<Policy>(int)",
    "void splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams<float>)",
    "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>(P)",
    "void cub::DeviceReduceSingleTileKernel<P>(float*)",
    "triton_red_fused_all_reduce_wait_tensor_1",
    "triton_poi_fused_all_gather_into_tensor_cat_0",
    "triton_per_fused_reduce_scatter_tensor_sum_3",
    "triton_tem_fused_mm_all_reduce_2",
    "void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<64>>(Flash_fwd_params)",
    "void flash::combine_attn_seqk_parallel<float>(P)",
    "void warpAllReduceSum<float>(float*)",
    "void block_all_reduce_kernel<float>(float*)",
    "void oneflow::cuda::layer_norm::BlockAllReduce<float>(float*)",
    "thread_reduce_scatter(float*)",
    "gemm_all_reduce_fused_kernel",
    "void flux::MatmulReduceScatter<bf16>(P)",
    "void my::kernel<AllReduceOp, ncclWork>(ncclDevComm*)",
    "void at::native::vectorized_elementwise_kernel<4, ncclThing>(int)",
    "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>(int)",
    "void deep_ep::layout::get_dispatch_layout<256, 8>(long const*, int*)",
    "void vllm::moe::moe_align_block_size_kernel<int>(int*)",
    "_combined_routing_compute",
    "broadcast_kernel",
    "gather_kernel",
    "scatter_add_kernel",
    "sync_batchnorm_forward",
    "optimizerStepDispatchKernel(float*)",
    "void fused_step_combine<float>(float*)",
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>(P)",
    "SubTensorOpWithCastTensor1d",
    "ring_attention_fwd_kernel",
    "",
)
"""Device work whose name only sounds like communication, or does not even."""


@pytest.mark.parametrize("name", COMM)
def test_communication(name: str) -> None:
    for category in ("kernel", "concurrent_kernel"):
        assert Classifier().kind(category, name) is Kind.COMM


@pytest.mark.parametrize(("name", "expected"), COMM.items())
def test_operation_of_a_kernel(name: str, expected: str | None) -> None:
    assert operation(name) == expected


@pytest.mark.parametrize("name", COMPUTE)
def test_false_friends_are_compute(name: str) -> None:
    assert Classifier().kind("kernel", name) is Kind.COMPUTE


@pytest.mark.parametrize("name", ["__amd_rocclr_copyBuffer", "__amd_rocclr_fillBufferAligned.kd"])
def test_blit_kernels_are_copies(name: str) -> None:
    assert Classifier().kind("kernel", name) is Kind.COPY


@pytest.mark.parametrize("category", ["gpu_memcpy", "gpu_memset", "memcpy", "memset"])
@pytest.mark.parametrize("name", ["Memcpy HtoD (Pageable -> Device)", "Memset (Device)", "ncclKernel_AllReduce", "x"])
def test_copies_are_copies_whatever_their_name(category: str, name: str) -> None:
    assert Classifier().kind(category, name) is Kind.COPY


def test_peer_copies_by_name() -> None:
    between = ("Memcpy PtoP (Device -> Device)", "Memcpy P2P", "CopyPeer", "Memcpy peer to peer")
    within = ("Memcpy DtoD (Device -> Device)", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "SPtoPX")
    assert [bool(PEER_COPY.search(name)) for name in between] == [True, True, False, True]
    assert not any(PEER_COPY.search(name) for name in within)


def test_every_row_has_its_reason_and_decides_a_name() -> None:
    decided = {next(rule for rule in KERNELS if rule.regex.search(name)).pattern for name in COMM}
    decided |= {rule.pattern for name in COMPUTE for rule in KERNELS if rule.regex.search(name)}
    for rule in KERNELS:
        assert rule.reason and rule.seen
        assert rule.kind is Kind.COPY or rule.pattern in decided, f"no name in this file needs {rule.pattern}"


# -- what metadata and annotations call operations


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("allreduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("all_to_all", "all_to_all"),
        ("alltoall_base", "all_to_all"),
        ("ALLTOALL", "all_to_all"),
        ("all2all", "all_to_all"),
        ("broadcast", "broadcast"),
        ("_broadcast_oop", "broadcast"),
        ("reduce", "reduce"),
        ("_reduce_oop", "reduce"),
        ("gather", "gather"),
        ("scatter", "scatter"),
        ("send", "send"),
        ("recv", "recv"),
        ("recv_anysource", "recv"),
        ("barrier", "barrier"),
        ("wait", None),
        ("init", None),
    ],
)
def test_operation_of_metadata(name: str, expected: str | None) -> None:
    assert operation(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nccl:all_reduce", "all_reduce"),
        ("nccl:_all_gather_base", "_all_gather_base"),
        ("nccl:send 0->1", "send"),
        ("nccl:recv 0<-1", "recv"),
        ("gloo:all_reduce", "all_reduce"),
        ("rccl:reduce", "reduce"),
        ("ProfilerStep#3", None),
        ("my nccl:all_reduce", None),
        ("nccl", None),
    ],
)
def test_launch_annotations(name: str, expected: str | None) -> None:
    found = HOST_LAUNCH_ANNOTATION.match(name)
    assert (found and found[2]) == expected


def test_own_name() -> None:
    assert own_name("void a::(anonymous namespace)::b<c<d>, e>(f)") == "a::b"
    assert own_name("<lambda>(x)") == "<lambda>(x)"
    assert own_name("plain") == "plain"


# -- host names


@pytest.mark.parametrize("name", ["gloo:all_reduce", "mpi:broadcast", "ucc:all_gather", "xccl:send"])
def test_host_communication(name: str) -> None:
    assert HOST_COMM.match(name)


def test_launching_nccl_is_no_communication() -> None:
    assert not HOST_COMM.match("nccl:all_reduce")


@pytest.mark.parametrize(
    "name",
    [
        "c10d::allreduce_",
        "_c10d_functional::all_reduce",
        "c10d_functional::all_gather_into_tensor",
        "_c10d_functional_autograd::all_to_all_single",
        "symm_mem::one_shot_all_reduce",
        "record_param_comms",
    ],
)
def test_collective_operators(name: str) -> None:
    assert COLLECTIVE_HOST_OPS.match(name)


@pytest.mark.parametrize("name", ["aten::all", "fsdp::all_gather_copy_in", "c10d", "mylib::c10d::x", "c10dx::y"])
def test_other_operators(name: str) -> None:
    assert not COLLECTIVE_HOST_OPS.match(name) or name == "c10d"


@pytest.mark.parametrize(
    "name",
    [
        "_c10d_functional::wait_tensor",
        "method wait of torch._C._distributed_c10d.Work object",
        "c10d::barrier",
        "Work.wait",
    ],
)
def test_waits(name: str) -> None:
    assert HOST_WAIT.search(name)


@pytest.mark.parametrize("name", ["aten::mm", "aten::await", "waitress::op", "aten::joint"])
def test_no_waits(name: str) -> None:
    assert not HOST_WAIT.search(name)


@pytest.mark.parametrize(
    "name",
    [
        "autograd::engine::evaluate_function: AddmmBackward0",
        "AddmmBackward0",
        "torch::autograd::AccumulateGrad",
        "FSDP::pre_forward",
        "DistributedDataParallel.forward",
        "ReduceInBackwardBackward",
        "MyFunction",
        "Torch-Compiled Region: 0/0",
    ],
)
def test_containers(name: str) -> None:
    assert HOST_CONTAINERS.search(name)


@pytest.mark.parametrize(
    "name",
    ["aten::mm", "aten::_foreach_add_", "mylib::op", "graph_0_cpp_fused_add_1", "cpp_fused_relu_0", "mkl::_mkl_linear"],
)
def test_workers(name: str) -> None:
    assert not HOST_CONTAINERS.search(name)


# -- what the user and the report say


def test_a_users_rule_comes_first() -> None:
    classifier = Classifier([parse_user_rule("my_exchange=comm"), parse_user_rule("(?i)NCCL=other")])
    assert classifier.kind("kernel", "my_exchange_v2") is Kind.COMM
    assert classifier.kind("gpu_memcpy", "my_exchange copy") is Kind.COMM
    assert classifier.kind("kernel", "ncclDevKernel_AllReduce") is Kind.OTHER
    assert classifier.kind("kernel", "gemm") is Kind.COMPUTE


def test_the_last_equals_sign_separates() -> None:
    assert parse_user_rule("a=b=copy").pattern == "a=b"


@pytest.mark.parametrize("text", ["", "comm", "=comm", "x=", "x=comms", "x=COMM", "(=comm", "[=compute"])
def test_bad_user_rules(text: str) -> None:
    with pytest.raises(UsageError, match="--kind"):
        parse_user_rule(text)


def test_names_most_like_communication() -> None:
    found = most_like_communication(
        [("gemm", 100), ("my_peer_exchange", 5), ("RingShuffle", 9), ("k<all_reduce>", 50), ("barrier", 9)], limit=2
    )
    assert found == ["RingShuffle", "barrier"]
