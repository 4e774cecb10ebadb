// The wgmma of two widths that CuTe has only in its header of extended shapes, which takes longer to parse than a
// kernel to compile.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

namespace flash {
namespace sm90 {

#define FLASH_WGMMA_8(d, i)                                                                                   \
  "+f"(d(i)), "+f"(d(i + 1)), "+f"(d(i + 2)), "+f"(d(i + 3)), "+f"(d(i + 4)), "+f"(d(i + 5)), "+f"(d(i + 6)), \
      "+f"(d(i + 7))

// (64, 80) += (64, 16) (80, 16)^T, both K-major in shared memory.
template <class Element>
struct Wgmma64x80x16 {
  using DRegisters = void;
  using ARegisters = uint64_t[1];
  using BRegisters = uint64_t[1];
  using CRegisters = float[40];

  template <class A, class B, class D>
  CUTE_HOST_DEVICE static void multiply(const A& a, const B& b, D& d, cute::SM90::GMMA::ScaleOut accumulate) {
#if defined(__CUDA_ARCH__)
#define FLASH_WGMMA(TYPE)                                                                                          \
  asm volatile(                                                                                                    \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\nwgmma.mma_async.sync.aligned.m64n80k16.f32." TYPE "." TYPE        \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "     \
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}, %40, %41, p, "   \
      "1, 1, 0, 0;\n}\n"                                                                                           \
      : FLASH_WGMMA_8(d, 0), FLASH_WGMMA_8(d, 8), FLASH_WGMMA_8(d, 16), FLASH_WGMMA_8(d, 24), FLASH_WGMMA_8(d, 32) \
      : "l"(static_cast<uint64_t>(a(0))), "l"(static_cast<uint64_t>(b(0))), "r"(static_cast<int>(accumulate)))
    if constexpr (std::is_same_v<Element, cutlass::half_t>) {
      FLASH_WGMMA("f16");
    } else {
      FLASH_WGMMA("bf16");
    }
#undef FLASH_WGMMA
#endif
  }
};

// (64, 72) += (64, 32) (72, 32)^T of e4m3, the first in registers, the second K-major in shared memory.
struct WgmmaE4m3Of64x72x32 {
  using DRegisters = void;
  using ARegisters = uint32_t[4];
  using BRegisters = uint64_t[1];
  using CRegisters = float[36];

  template <class A, class B, class D>
  CUTE_HOST_DEVICE static void multiply(const A& a, const B& b, D& d, cute::SM90::GMMA::ScaleOut accumulate) {
#if defined(__CUDA_ARCH__)
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %41, 0;\nwgmma.mma_async.sync.aligned.m64n72k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35}, {%36, %37, %38, %39}, %40, p, 1, 1;\n}\n"
        : FLASH_WGMMA_8(d, 0), FLASH_WGMMA_8(d, 8), FLASH_WGMMA_8(d, 16), FLASH_WGMMA_8(d, 24), "+f"(d(32)),
          "+f"(d(33)), "+f"(d(34)), "+f"(d(35))
        : "r"(a(0)), "r"(a(1)), "r"(a(2)), "r"(a(3)), "l"(static_cast<uint64_t>(b(0))),
          "r"(static_cast<int>(accumulate)));
#endif
  }
};

#undef FLASH_WGMMA_8

// What cute::gemm() calls with the fragments of one of these.
template <class Op, class TD, class DLayout, class TA, class ALayout, class TB, class BLayout, class TC, class CLayout>
CUTE_HOST_DEVICE constexpr void mma_unpack(const cute::MMA_Traits<Op>& traits, cute::Tensor<TD, DLayout>& d,
                                           const cute::Tensor<TA, ALayout>& a, const cute::Tensor<TB, BLayout>& b,
                                           const cute::Tensor<TC, CLayout>&) {
  const auto a_registers = cute::recast<std::remove_extent_t<typename Op::ARegisters>>(a);
  Op::multiply(a_registers, cute::recast<uint64_t>(b), d, traits.accumulate_);
}

}  // namespace sm90
}  // namespace flash

namespace cute {

template <class Element>
struct MMA_Traits<flash::sm90::Wgmma64x80x16<Element>> {
  using ValTypeD = float;
  using ValTypeA = Element;
  using ValTypeB = Element;
  using ValTypeC = float;
  using FrgTypeA = GMMA::smem_desc<GMMA::Major::K>;
  using FrgTypeB = GMMA::smem_desc<GMMA::Major::K>;
  using Shape_MNK = Shape<_64, Int<80>, _16>;
  using ThrID = Layout<_128>;
  using ALayout = GMMA::ABLayout<64, 16>;
  using BLayout = GMMA::ABLayout<80, 16>;
  using CLayout = GMMA::CLayout_64xN<80>;
  GMMA::ScaleOut accumulate_ = GMMA::ScaleOut::One;
};

template <>
struct MMA_Traits<flash::sm90::WgmmaE4m3Of64x72x32> {
  using ValTypeD = float;
  using ValTypeA = float_e4m3_t;
  using ValTypeB = float_e4m3_t;
  using ValTypeC = float;
  using FrgTypeB = GMMA::smem_desc<GMMA::Major::K>;
  using Shape_MNK = Shape<_64, Int<72>, _32>;
  using ThrID = Layout<_128>;
  using ALayout = GMMA::ALayout_64x32;
  using BLayout = GMMA::ABLayout<72, 32>;
  using CLayout = GMMA::CLayout_64xN<72>;
  GMMA::ScaleOut accumulate_ = GMMA::ScaleOut::One;
};

}  // namespace cute
