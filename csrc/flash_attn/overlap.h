// What a call writes must be memory of its own: no element twice, and none that the call reads.
// flash_attn/cpu/overlap.py is the twin for CPU tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>

#include "checks.h"
#include "strides.h"

namespace flash {
namespace overlap {

// Of a strided tensor of at most kMaxAxes dimensions.
inline Layout layout_of(const at::Tensor& tensor) {
  Layout layout;
  layout.begin = reinterpret_cast<int64_t>(tensor.const_data_ptr());
  layout.element_bytes = tensor.element_size();
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    layout.add_axis(tensor.size(axis), tensor.stride(axis) * layout.element_bytes);
  }
  return layout;
}

// The same elements in the same order.
inline bool same_view(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

// A named argument; null: not given.
struct Operand {
  const char* name;
  const at::Tensor* tensor;

  Operand(const char* name_, const at::Tensor& tensor_) : name(name_), tensor(&tensor_) {}
  Operand(const char* name_, const std::optional<at::Tensor>& given)
      : name(name_), tensor(given.has_value() ? &*given : nullptr) {}
};

using Operands = std::initializer_list<Operand>;

// All of them have passed the checks of their shapes. Costs nothing where nothing is given to write to.
inline void check(Operands written, Operands read) {
  for (const Operand* target = written.begin(); target != written.end(); ++target) {
    if (target->tensor == nullptr) continue;
    const Layout layout = layout_of(*target->tensor);
    if (overlaps_itself(layout)) {
      checks::fail(target->name, "expected elements that do not overlap each other, got shape ",
                   target->tensor->sizes(), " with strides ", target->tensor->strides());
    }
    const auto check_apart = [&](const Operand& other) {
      if (other.tensor == nullptr || !share_elements(layout, layout_of(*other.tensor))) return;
      checks::fail(target->name, "expected memory that does not overlap ", other.name, ", got elements of both");
    };
    for (const Operand* other = written.begin(); other != target; ++other) check_apart(*other);
    for (const Operand& other : read) check_apart(other);
  }
}

}  // namespace overlap
}  // namespace flash
