// Registers are not counted.
#pragma once

namespace cutlass {
namespace arch {

template <int kRegisters>
void warpgroup_reg_alloc() {}
template <int kRegisters>
void warpgroup_reg_dealloc() {}

}  // namespace arch
}  // namespace cutlass
