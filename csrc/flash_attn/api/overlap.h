// An output must not overlap itself, another output or an input. flash_attn/cpu/overlap.py is the twin for CPU tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "api/checks.h"
#include "api/strides.h"

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

// All of them have passed the checks of their shapes. Costs nothing where no output is given.
inline void check(Operands written, Operands read) {
  const auto is_given = [](const Operand& operand) { return operand.tensor != nullptr; };
  if (std::none_of(written.begin(), written.end(), is_given)) return;
  struct NamedLayout {
    const char* name;
    Layout layout;
  };
  c10::SmallVector<NamedLayout, 16> before;  // inputs, then outputs
  for (const Operand& operand : read) {
    if (is_given(operand)) before.push_back({operand.name, layout_of(*operand.tensor)});
  }
  for (const Operand& target : written) {
    if (!is_given(target)) continue;
    const NamedLayout target_layout{target.name, layout_of(*target.tensor)};
    if (!target.tensor->is_contiguous() && overlaps_itself(target_layout.layout)) {
      checks::fail(target.name, "expected elements that do not overlap each other, got shape ", target.tensor->sizes(),
                   " with strides ", target.tensor->strides());
    }
    for (const NamedLayout& other : before) {
      if (!share_elements(target_layout.layout, other.layout)) continue;
      checks::fail(target.name, "expected memory that does not overlap ", other.name, ", got elements of both");
    }
    before.push_back(target_layout);
  }
}

}  // namespace overlap
}  // namespace flash
