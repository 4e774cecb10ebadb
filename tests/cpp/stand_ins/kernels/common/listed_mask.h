// Kernels without lists.
#pragma once

#include "core/bwd_schedule.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/sequence.h"
#include "params/flash.h"

namespace flash {

struct ListedStep {};
struct ListedQStep {};
struct ListedQOrder {
  template <class... T>
  explicit ListedQOrder(const T&...);
};
template <class Element>
struct FactorMask {};
template <class Element, class... T>
FactorMask<Element> factor_mask(const T&...);
template <class... T>
const uint32_t* seen_rows(const T&...);
template <class... T>
const uint32_t* seen_rows_of(const T&...);
template <class... T>
const uint32_t* seen_keys_of(const T&...);
template <class... T>
bool is_seen(const T&...);
template <int kRows, class... T>
uint32_t unseen_of_lane(const T&...);

}  // namespace flash
