// The pybind11 module flash_attn_2_cuda: check -> describe -> allocate -> launch -> return.
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <array>
#include <atomic>
#include <string>

#include "checks.h"
#include "plan/tiles.h"
#include "src/flash.h"
#include "src/static_switch.h"

namespace flash {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalGenerator = std::optional<at::Generator>;

constexpr int64_t kProbabilityTile = 128;  // S_dmask is padded to multiples of it, as FlashAttention-2 does

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// ---- device ----------------------------------------------------------------------------------------------------

// Compute capability of each device as 10 * major + minor; 0 = not asked yet.
int compute_capability(int device) {
  static std::array<std::atomic<int>, 64> cache{};
  std::atomic<int>& entry = cache[device % 64];
  if (entry == 0) {
    int major = 0, minor = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    entry = 10 * major + minor;
  }
  return entry;
}

void check_device_supported(const at::Tensor& q) {
  const int64_t capability = compute_capability(q.device().index());
  if (capability < 80) {
    checks::fail("q", "expected a tensor on a GPU of compute capability 8.0 or higher, got one on ", q.device(),
                 " of compute capability ", capability / 10, ".", capability % 10);
  }
}

void check_launch(cudaError_t status, const char* kernel, const at::Tensor& q) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // a launch error is not sticky: leave a clean state behind
  const int64_t head_dim = q.size(-1), capability = compute_capability(q.device().index());
  const std::string what =
      std::string(kernel) + " (" + checks::dtype_name(q.scalar_type()) + ", head dim " + std::to_string(head_dim) + ")";
  const std::string build = std::string(" (this build: ") + kernel_build_info() + ")";
  if (status == cudaErrorNotSupported) {
    const int64_t tile = plan::fwd_tile(static_cast<int>(head_dim), false).head_dim;
    checks::fail(what.c_str(), "this build has no such kernel. Rebuild flash_attn with FLASH_ATTN_HEAD_DIMS including ",
                 tile, " and FLASH_ATTN_DTYPES including ", q.scalar_type() == at::kHalf ? "fp16" : "bf16", build);
  }
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    checks::fail(what.c_str(), "this build has no code for compute capability ", capability / 10, ".", capability % 10,
                 ". Rebuild flash_attn with FLASH_ATTN_CUDA_ARCHS including ", capability, build);
  }
  checks::fail(what.c_str(), "launch failed: ", cudaGetErrorString(status));
}

// ---- description of tensors --------------------------------------------------------------------------------------

// The kernels move 16-byte chunks. Strides of axes of size 1 do not matter.
bool is_aligned(const at::Tensor& tensor) {
  if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 != 0) return false;
  for (int64_t axis = 0; axis + 1 < tensor.dim(); ++axis) {
    if (tensor.size(axis) > 1 && tensor.stride(axis) % 8 != 0) return false;
  }
  return true;
}

at::Tensor aligned(const at::Tensor& tensor) {
  return tensor.numel() == 0 || is_aligned(tensor) ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

// (batch or pages, rows, heads, d) or (rows, heads, d).
MatrixStrides matrix_strides(const at::Tensor& tensor) {
  MatrixStrides strides;
  strides.batch = tensor.dim() == 4 ? tensor.stride(0) : 0;
  strides.row = tensor.stride(-3);
  strides.head = tensor.stride(-2);
  return strides;
}

struct Scores {
  double softmax_scale;
  bool is_causal;
  int64_t window_left, window_right;
  double softcap;
  const OptionalTensor& alibi_slopes;
};

Window make_window(const Scores& scores) {
  auto side = [](int64_t width) { return width < 0 || width >= kUnbounded ? kUnbounded : static_cast<int>(width); };
  Window window{side(scores.window_left), side(scores.window_right)};
  if (scores.is_causal) window.right = 0;
  return window;
}

void set_params_scores(Flash_fwd_params& params, const Scores& scores) {
  constexpr double kLog2e = 1.4426950408889634;
  params.scale_softmax = static_cast<float>(scores.softmax_scale);
  params.softcap = static_cast<float>(scores.softcap);
  params.has_score_mod = params.softcap > 0.0f || scores.alibi_slopes.has_value() || !(params.scale_softmax > 0.0f);
  params.softmax_scale_log2 = params.has_score_mod ? 1.0f : static_cast<float>(scores.softmax_scale * kLog2e);
  params.window = make_window(scores);
  if (scores.alibi_slopes.has_value()) {
    params.alibi_slopes_ptr = scores.alibi_slopes->const_data_ptr<float>();
    params.alibi_slopes_batch_stride = scores.alibi_slopes->dim() == 2 ? scores.alibi_slopes->stride(0) : 0;
  }
}

void set_params_tensors(Flash_fwd_params& params, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& out, const at::Tensor& lse) {
  params.q_ptr = q.const_data_ptr();
  params.k_ptr = k.const_data_ptr();
  params.v_ptr = v.const_data_ptr();
  params.o_ptr = out.mutable_data_ptr();
  params.softmax_lse_ptr = lse.mutable_data_ptr<float>();
  params.q_strides = matrix_strides(q);
  params.k_strides = matrix_strides(k);
  params.v_strides = matrix_strides(v);
  params.o_strides = matrix_strides(out);
  params.h = static_cast<int>(q.size(-2));
  params.h_k = static_cast<int>(k.size(-2));
  params.h_h_k_ratio = params.h_k > 0 ? params.h / params.h_k : 1;
  params.d = static_cast<int>(q.size(-1));
  params.seqlen_q = static_cast<int>(q.size(-3));
  params.seqlen_k = static_cast<int>(k.size(-3));
  params.device = q.device().index();
}

// ---- dropout ------------------------------------------------------------------------------------------------------

// P(dropped) = threshold / 2^32 and the kept entries are scaled by the reciprocal of the true keep probability.
void set_params_dropout(Flash_fwd_params& params, double p_dropout, const OptionalGenerator& gen,
                        const at::Tensor& rng_state) {
  if (p_dropout == 0.0) return;
  constexpr double kRange = 4294967296.0;
  const double threshold = std::min(std::nearbyint(p_dropout * kRange), kRange - 1.0);
  params.has_dropout = true;
  params.dropout.threshold = static_cast<uint32_t>(threshold);
  params.dropout.keep_scale = static_cast<float>(kRange / (kRange - threshold));
  params.dropout.rng_state = rng_state.mutable_data_ptr<int64_t>();
  auto* generator =
      at::get_generator_or_default<at::CUDAGeneratorImpl>(gen, at::cuda::detail::getDefaultCUDAGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  // The mask is keyed by the offset as a whole, so the least step that torch allows makes it new.
  const at::PhiloxCudaState state = generator->philox_cuda_state(4);
  PhiloxState& philox = params.dropout.state;
  if (state.captured_) {
    philox.seed_ptr = state.seed_.ptr;
    philox.offset_ptr = state.offset_.ptr;
    philox.offset = state.offset_intragraph_;
  } else {
    philox.seed = state.seed_.val;
    philox.offset = state.offset_.val;
  }
}

// ---- launch ---------------------------------------------------------------------------------------------------------

void run_mha_fwd(const Flash_fwd_params& params, const at::Tensor& q) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  const bool is_fp16 = q.scalar_type() == at::kHalf;
  check_launch(
      FP16_SWITCH(
          is_fp16,
          [&] { return HEADDIM_SWITCH(params.d, [&] { return run_mha_fwd_<kDtype, kHeadDim>(params, stream); }); }),
      "flash_fwd_kernel", q);
  if (params.p_ptr != nullptr) {
    check_launch(FP16_SWITCH(is_fp16, [&] { return run_dropout_probs_<kDtype>(params, stream); }),
                 "dropout_probs_kernel", q);
  }
}

// The outputs of a forward and the launch that fills them; dense and variable-length calls differ only in `params`.
std::vector<at::Tensor> forward(Flash_fwd_params params, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const OptionalTensor& out_, at::IntArrayRef lse_shape, const Scores& scores,
                                double p_dropout, bool return_softmax, const OptionalGenerator& gen) {
  const at::Tensor q_aligned = aligned(q), k_aligned = aligned(k), v_aligned = aligned(v);
  const bool direct = out_.has_value() && is_aligned(*out_);
  at::Tensor out = direct ? *out_ : at::empty(q.sizes(), q.options());
  at::Tensor lse = at::empty(lse_shape, q.options().dtype(at::kFloat));
  const bool returns_probabilities = return_softmax && p_dropout > 0.0;
  const bool launches = q.numel() > 0;
  at::Tensor probabilities = at::empty({0}, q.options());
  if (returns_probabilities) {
    const std::array<int64_t, 4> shape{params.b, q.size(-2), params.p_rows, params.p_cols};
    probabilities = launches ? at::empty(shape, q.options()) : at::zeros(shape, q.options());
  }
  const at::TensorOptions rng_options = q.options().dtype(at::kLong);
  at::Tensor rng_state = p_dropout > 0.0 && launches ? at::empty({2}, rng_options) : at::zeros({2}, rng_options);

  set_params_tensors(params, q_aligned, k_aligned, v_aligned, out, lse);
  set_params_scores(params, scores);
  if (returns_probabilities) params.p_ptr = probabilities.mutable_data_ptr();
  if (launches) {
    set_params_dropout(params, p_dropout, gen, rng_state);
    run_mha_fwd(params, q);
  }
  if (out_.has_value() && !direct) {
    out_->copy_(out);
    out = *out_;
  }
  return {out, lse, probabilities, rng_state};
}

// ---- entry points
// -----------------------------------------------------------------------------------------------------

std::vector<at::Tensor> fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& out,
                            const OptionalTensor& alibi_slopes, double p_dropout, double softmax_scale, bool is_causal,
                            int64_t window_left, int64_t window_right, double softcap, bool return_softmax,
                            const OptionalGenerator& gen) {
  const char* axes = "batch, seqlen, heads, head_dim";
  checks::query(q, 4, axes);
  const int64_t batch = q.size(0), seqlen_q = q.size(1), heads = q.size(2);
  checks::key_value(k, v, q, {batch, -1, -1, q.size(3)}, axes);
  checks::output(out, q);
  checks::numbers(p_dropout, softmax_scale, softcap);
  checks::alibi(alibi_slopes, q, batch);
  checks::length("q", batch);
  const c10::cuda::CUDAGuard guard(q.device());
  check_device_supported(q);

  Flash_fwd_params params;
  params.b = static_cast<int>(batch);
  params.p_rows = static_cast<int>(round_up(seqlen_q, kProbabilityTile));
  params.p_cols = static_cast<int>(round_up(k.size(1), kProbabilityTile));
  return forward(params, q, k, v, out, {batch, heads, seqlen_q},
                 {softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes}, p_dropout,
                 return_softmax, gen);
}

const int* int_pointer(const OptionalTensor& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr<int>() : nullptr;
}

PagedKv describe_pages(const OptionalTensor& block_table, const at::Tensor& k) {
  PagedKv paged;
  if (!block_table.has_value()) return paged;
  paged.block_table = int_pointer(block_table);
  paged.block_table_stride = block_table->stride(0);
  if (k.size(1) == 0) return paged;  // pages of no rows hold no keys: pages_per_sequence stays 0
  paged.pages_per_sequence = static_cast<int>(block_table->size(1));
  paged.num_pages = static_cast<int>(k.size(0));
  paged.page_size = FastDiv(static_cast<int>(k.size(1)));
  return paged;
}

std::vector<at::Tensor> varlen_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const OptionalTensor& out, const at::Tensor& cu_seqlens_q,
                                   const at::Tensor& cu_seqlens_k, const OptionalTensor& seqused_k,
                                   const OptionalTensor& leftpad_k, const OptionalTensor& block_table,
                                   const OptionalTensor& alibi_slopes, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                   double p_dropout, double softmax_scale, bool /*zero_tensors: always done*/,
                                   bool is_causal, int64_t window_left, int64_t window_right, double softcap,
                                   bool return_softmax, const OptionalGenerator& gen, int64_t /*num_splits*/) {
  const char* axes = "total, heads, head_dim";
  checks::query(q, 3, axes);
  const int64_t batch = checks::cu_seqlens(cu_seqlens_q, cu_seqlens_k, q);
  if (block_table.has_value()) {
    checks::key_value(k, v, q, {-1, -1, -1, q.size(2)}, "blocks, page_size, heads, head_dim");
  } else {
    checks::key_value(k, v, q, {-1, -1, q.size(2)}, axes);
  }
  checks::output(out, q);
  checks::lengths("seqused_k", seqused_k, q, batch);
  checks::lengths("leftpad_k", leftpad_k, q, batch);
  checks::block_table(block_table, q, batch);
  checks::max_seqlen("max_seqlen_q", max_seqlen_q);
  checks::max_seqlen("max_seqlen_k", max_seqlen_k);
  checks::numbers(p_dropout, softmax_scale, softcap);
  checks::alibi(alibi_slopes, q, batch);
  const c10::cuda::CUDAGuard guard(q.device());
  check_device_supported(q);

  Flash_fwd_params params;
  params.b = static_cast<int>(batch);
  params.p_rows = static_cast<int>(round_up(max_seqlen_q, kProbabilityTile));
  params.p_cols = static_cast<int>(round_up(max_seqlen_k, kProbabilityTile));
  params.varlen = {int_pointer(cu_seqlens_q), int_pointer(cu_seqlens_k), int_pointer(seqused_k),
                   int_pointer(leftpad_k)};
  params.paged = describe_pages(block_table, k);
  return forward(params, q, k, v, out, {q.size(1), q.size(0)},
                 {softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes}, p_dropout,
                 return_softmax, gen);
}

py::object not_built(const char* what) {
  PyErr_Format(PyExc_NotImplementedError,
               "%s: not implemented for CUDA tensors yet; CPU tensors (flash_attn.cpu) support it", what);
  throw py::error_already_set();
}

std::string build_info() {
  std::string info = kernel_build_info();
  info.insert(info.rfind('}'),
              std::string(", \"torch\": \"") + TORCH_VERSION + "\", \"commit\": \"" + FLASH_ATTN_BUILD_COMMIT + "\"");
  return info;
}

}  // namespace
}  // namespace flash

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace flash;
  m.doc() = "Exact attention on CUDA tensors: the kernels behind flash_attn.";
  m.def("fwd", &fwd, "Forward of dense batches: [out, softmax_lse, S_dmask, rng_state]", py::arg("q"), py::arg("k"),
        py::arg("v"), py::arg("out"), py::arg("alibi_slopes"), py::arg("p_dropout"), py::arg("softmax_scale"),
        py::arg("is_causal"), py::arg("window_size_left"), py::arg("window_size_right"), py::arg("softcap"),
        py::arg("return_softmax"), py::arg("gen"), py::call_guard<py::gil_scoped_release>());
  m.def("varlen_fwd", &varlen_fwd, "Forward of packed batches: [out, softmax_lse, S_dmask, rng_state]", py::arg("q"),
        py::arg("k"), py::arg("v"), py::arg("out"), py::arg("cu_seqlens_q"), py::arg("cu_seqlens_k"),
        py::arg("seqused_k"), py::arg("leftpad_k"), py::arg("block_table"), py::arg("alibi_slopes"),
        py::arg("max_seqlen_q"), py::arg("max_seqlen_k"), py::arg("p_dropout"), py::arg("softmax_scale"),
        py::arg("zero_tensors"), py::arg("is_causal"), py::arg("window_size_left"), py::arg("window_size_right"),
        py::arg("softcap"), py::arg("return_softmax"), py::arg("gen"), py::arg("num_splits") = 0,
        py::call_guard<py::gil_scoped_release>());
  m.def("bwd", [](const py::args&, const py::kwargs&) { return not_built("bwd"); }, "Backward of dense batches");
  m.def(
      "varlen_bwd", [](const py::args&, const py::kwargs&) { return not_built("varlen_bwd"); },
      "Backward of packed batches");
  m.def(
      "fwd_kvcache", [](const py::args&, const py::kwargs&) { return not_built("fwd_kvcache"); },
      "Forward against a KV cache");
  m.def("build_info", &build_info, "Identity of this build as JSON text");
}
