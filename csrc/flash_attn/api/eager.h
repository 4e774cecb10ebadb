// Dense attention of plain CUDA tensors in eager mode as one C function, with its autograd node. It has the results of
// FlashAttnFunc, whose Python takes longer than the launches. Every other call, and every backward that something takes
// part in, is Python's. Calls without autograd: eager_inference.h.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "api/backward.h"
#include "api/device.h"
#include "api/forward.h"

namespace flash {

// ---- which calls take it ----

// No dispatch or function mode, torch.func transform, tracer or profiler is on in this thread.
inline bool is_unwatched() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included | c10::default_included_set) == c10::default_included_set &&
         at::impl::PythonTorchFunctionTLS::stack_len() == 0 && !at::hasCallbacks();
}

// A GPU's memory at strides and nothing else: no subclass, wrapper of a transform, lazy conjugate or forward-mode
// tangent.
inline bool is_plain(const at::Tensor& x) {
  constexpr c10::DispatchKeySet kPlain({c10::DispatchKey::CUDA, c10::DispatchKey::ADInplaceOrView,
                                        c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCUDA});
  return x.defined() && (x.key_set() | kPlain) == kPlain && !x._fw_grad(/*level=*/0).defined();
}

// An input that Python would pass to the module as it is: no float32 for autocast, no head dim to pad, no copy of rows.
inline bool is_operand(const at::Tensor& x, const at::Tensor& q, int64_t rank = 4) {
  return is_plain(x) && is_supported(x.scalar_type()) && x.scalar_type() == q.scalar_type() && x.dim() == rank &&
         x.size(-1) > 0 && x.size(-1) % 8 == 0 && has_contiguous_rows(x);
}

inline bool records_gradients(std::initializer_list<const at::Tensor*> tensors) {
  return at::GradMode::is_enabled() && std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor* x) {
           return x->defined() && x->requires_grad();
         });
}

// ---- options ----

struct NodeOptions {
  double dropout_p, softmax_scale, softcap;
  int64_t window_left, window_right;
  bool is_causal, deterministic, batch_invariant;

  ScoreOptions scores() const {
    static const OptionalTensor no_slopes;
    return {softmax_scale, is_causal, window_left, window_right, softcap, no_slopes, {}, {}};
  }

  // As one value: compiled autograd carries what an AutogradContext holds.
  c10::List<double> packed() const {
    return {dropout_p,
            softmax_scale,
            softcap,
            static_cast<double>(window_left),
            static_cast<double>(window_right),
            static_cast<double>(is_causal),
            static_cast<double>(deterministic),
            static_cast<double>(batch_invariant)};
  }

  explicit NodeOptions(const std::vector<double>& packed)
      : dropout_p(packed[0]),
        softmax_scale(packed[1]),
        softcap(packed[2]),
        window_left(static_cast<int64_t>(packed[3])),
        window_right(static_cast<int64_t>(packed[4])),
        is_causal(packed[5] != 0),
        deterministic(packed[6] != 0),
        batch_invariant(packed[7] != 0) {}
  NodeOptions() = default;
};

// ---- the node ----

using autograd_list = torch::autograd::variable_list;

// flash_attn.ops.eager.backward: any backward, also one that is differentiated once more. Not under the GIL.
inline autograd_list python_backward(const at::Tensor& dout, const autograd_list& saved, const NodeOptions& options) {
  const py::gil_scoped_acquire gil;
  try {
    const py::object backward = py::module_::import("flash_attn.ops.eager").attr("backward");
    const py::object gradients = backward(dout, py::cast(saved), options.dropout_p, options.softmax_scale,
                                          options.is_causal, options.window_left, options.window_right, options.softcap,
                                          options.deterministic, options.batch_invariant);
    return py::cast<autograd_list>(gradients);
  } catch (py::error_already_set& error) {  // autograd's threads pass on this type alone
    error.restore();
    python_error persistent;
    persistent.persist();
    throw persistent;
  }
}

struct DenseAttention {
  // Compiled autograd of torch before 2.7 takes traceable nodes alone.
  static constexpr bool is_traceable = TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 7;

  static autograd_list backward(torch::autograd::AutogradContext* ctx, const autograd_list& gradients) {
    const at::Tensor& dout = gradients[0];
    if (!dout.defined()) return autograd_list(3);
    const autograd_list saved = ctx->get_saved_variables();
    const NodeOptions options(ctx->saved_data["options"].toDoubleVector());
    const bool is_plain_call = !at::GradMode::is_enabled() && is_unwatched() && is_plain(dout) &&
                               std::all_of(saved.begin(), saved.end(), is_plain) &&
                               std::all_of(saved.begin(), saved.begin() + 3, has_contiguous_rows);  // after hooks
    if (!is_plain_call) return python_backward(dout, saved, options);
    const OptionalTensor none, rng_state = options.dropout_p > 0.0 ? OptionalTensor(saved[5]) : none;
    BwdCall call{{dout, none, none, none, none},
                 saved[0],
                 saved[1],
                 saved[2],
                 saved[3],
                 saved[4],
                 options.scores(),
                 options.dropout_p,
                 options.deterministic,
                 rng_state,
                 options.batch_invariant};
    const py::gil_scoped_acquire gil;
    const CallGuard guard;
    set_dense(call);
    autograd_list results = mha_bwd(call);
    results.resize(3);
    return results;
  }
};

// torch has hooks of new nodes, or has none yet (2.13).
template <class Pointer>
auto run_creation_hooks(const Pointer& node, int) -> decltype(fire_node_creation_hooks(node)) {
  return fire_node_creation_hooks(node);
}
template <class Pointer>
void run_creation_hooks(const Pointer&, long) {}

// Nodes have shared pointers up to torch 2.11, intrusive ones later.
template <class Node, class Function = decltype(torch::autograd::Edge::function)>
struct NodePointer {
  using Type = c10::intrusive_ptr<Node>;
  static Type make() { return c10::make_intrusive<Node>(); }
  static void announce(const Type& node) { run_creation_hooks(node, 0); }
};

template <class Node>
struct NodePointer<Node, std::shared_ptr<torch::autograd::Node>> {
  using Type = std::shared_ptr<Node>;
  static Type make() {
    return Type(new Node(), [](Node* node) { deleteNode(node); });
  }
  static void announce(const Type&) {}
};

// Named as the node of FlashAttnFunc.
struct FlashAttnFuncBackward final : torch::autograd::CppNode<DenseAttention> {
  std::string name() const override { return "FlashAttnFuncBackward"; }

  template <class Pointer = NodePointer<FlashAttnFuncBackward>>
  static typename Pointer::Type of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const NodeOptions& options) {
    typename Pointer::Type node = Pointer::make();
    node->set_ctx_grad_fn(node);
    node->set_next_edges(torch::autograd::collect_next_edges(q, k, v));
    node->is_variable_input_ = {true, true, true};
    node->ctx_.set_materialize_grads(false);
    node->ctx_.saved_data["options"] = options.packed();
    return node;
  }

  template <class Pointer = NodePointer<FlashAttnFuncBackward>>
  static void record(const typename Pointer::Type& node, const at::Tensor& out, autograd_list saved) {
    torch::autograd::set_history(out, node);
    node->ctx_.save_for_backward(std::move(saved));
    node->save_variables_to_ctx();
    Pointer::announce(node);
  }
};

inline at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const NodeOptions& options,
                            bool records) {
  NodePointer<FlashAttnFuncBackward>::Type node;
  if (records) node = FlashAttnFuncBackward::of(q, k, v, options);
  const OptionalTensor no_out;
  const OptionalGenerator default_generator;
  FwdCall call{
      q, k, v, no_out, options.scores(), options.dropout_p, false, default_generator, false, options.batch_invariant};
  call.returns_dropout = options.dropout_p > 0.0;
  Tensors results;
  {
    const CallGuard guard;
    const at::AutoGradMode mode(at::GradMode::is_enabled() && !records);  // a result may be a view
    set_dense(call);
    results = mha_fwd(call);
  }
  if (records) {
    autograd_list saved{q, k, v, results[0], results[1]};
    if (call.returns_dropout) saved.push_back(results[3]);
    FlashAttnFuncBackward::record(node, results[0], std::move(saved));
  }
  return results[0];
}

// ---- the Python functions ----

namespace python {

inline bool read(PyObject* given, bool& value) {
  value = given == Py_True;
  return value || given == Py_False;
}

inline bool read(PyObject* given, double& value) {
  if (!PyFloat_CheckExact(given)) return false;
  value = PyFloat_AS_DOUBLE(given);
  return true;
}

// A side of a window, -1 for unbounded.
inline bool read_side(PyObject* given, int64_t& value) {
  if (!PyLong_CheckExact(given)) return false;
  int overflow = 0;
  const int64_t side = PyLong_AsLongLongAndOverflow(given, &overflow);
  value = side < 0 || side >= kUnbounded ? -1 : side;
  return overflow == 0 && side != INT64_MIN;
}

template <class Options>
bool read_window(PyObject* given, Options& options) {
  return PyTuple_CheckExact(given) && PyTuple_GET_SIZE(given) == 2 &&
         read_side(PyTuple_GET_ITEM(given, 0), options.window_left) &&
         read_side(PyTuple_GET_ITEM(given, 1), options.window_right);
}

inline bool read_scale(PyObject* given, int64_t head_dim, double& value) {
  if (given != Py_None) return read(given, value);
  value = std::pow(static_cast<double>(head_dim), -0.5);
  return true;
}

// As a PyMethodDef has it.
template <class Function>
PyCFunction fast(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

inline bool has_count(Py_ssize_t count, Py_ssize_t expected, const char* function) {
  if (count == expected) return true;
  PyErr_Format(PyExc_TypeError, "%s: expected %zd arguments, got %zd", function, expected, count);
  return false;
}

// (q, k, v) and the other arguments of flash_attn_func in its order up to return_attn_probs, then batch_invariant.
inline PyObject* attention(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (!has_count(count, 12, "attention")) return nullptr;
  if (!THPVariable_CheckExact(args[0]) || !THPVariable_CheckExact(args[1]) || !THPVariable_CheckExact(args[2]) ||
      !is_unwatched()) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const at::Tensor &q = THPVariable_Unpack(args[0]), &k = THPVariable_Unpack(args[1]), &v = THPVariable_Unpack(args[2]);
  NodeOptions options;
  const bool serves = is_operand(q, q) && is_operand(k, q) && is_operand(v, q) && read(args[3], options.dropout_p) &&
                      read_scale(args[4], q.size(3), options.softmax_scale) && read(args[5], options.is_causal) &&
                      read_window(args[6], options) && read(args[7], options.softcap) && args[8] == Py_None &&
                      read(args[9], options.deterministic) && args[10] == Py_False &&
                      read(args[11], options.batch_invariant);
  if (!serves) Py_RETURN_NOTIMPLEMENTED;
  const bool records = records_gradients({&q, &k, &v});
  if (records && (q.is_inference() || k.is_inference() || v.is_inference())) Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(flash::attention(q, k, v, options, records));
  END_HANDLE_TH_ERRORS
}

}  // namespace python

inline void define_attention(py::module_& m) {
  static PyMethodDef functions[] = {
      {"attention", python::fast(&python::attention), METH_FASTCALL,
       "Dense attention of plain CUDA tensors, recorded by autograd; NotImplemented for every other call"},
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw py::error_already_set();
  static PyTypeObject node_type;
  constexpr const char* kName = "FlashAttnFuncBackward";
  PyTypeObject* ready = torch::autograd::_initFunctionPyTypeObject(node_type, kName, nullptr, nullptr);
  m.add_object(kName, py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(ready)));
  torch::autograd::registerCppFunction(typeid(FlashAttnFuncBackward), ready);
}

}  // namespace flash
