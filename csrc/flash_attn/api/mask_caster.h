// The pybind11 argument of a mask.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <tuple>
#include <utility>

#include "api/mask.h"

// From flash_attn.masks.factors.MaskFactors, a NamedTuple, or None.
template <>
struct pybind11::detail::type_caster<flash::MaskTensors> {
  PYBIND11_TYPE_CASTER(flash::MaskTensors, const_name("MaskFactors"));

  bool load(handle source, bool convert) {
    if (source.is_none()) return true;
    constexpr Py_ssize_t kFields = 5;
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != kFields) return false;
    flash::OptionalTensor* const factors[] = {&value.query_ranges, &value.key_hidden, &value.bits, &value.block_map};
    for (Py_ssize_t i = 0; i + 1 < kFields; ++i) {
      make_caster<flash::OptionalTensor> factor;
      if (!factor.load(PyTuple_GET_ITEM(source.ptr(), i), convert)) return false;
      *factors[i] = cast_op<flash::OptionalTensor>(std::move(factor));
    }
    make_caster<std::pair<int64_t, int64_t>> block_size;
    if (!block_size.load(PyTuple_GET_ITEM(source.ptr(), kFields - 1), convert)) return false;
    std::tie(value.block_q, value.block_k) = cast_op<std::pair<int64_t, int64_t>>(std::move(block_size));
    return true;
  }
};
