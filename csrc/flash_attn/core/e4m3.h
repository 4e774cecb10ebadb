// e4m3 operands of wgmma: the key order of V^T, and exponentials as e4m3 bit patterns. Plain C++17.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace flash {
namespace e4m3 {

// Lane 4 g + t holds bytes 4 t to 4 t + 3 of each 16 columns of the A operand, but columns 2 t and 2 t + 1 of each 8
// columns of an accumulator. P stays in its registers, so as an operand its keys are permuted: the key, of 16, at a
// position.
FLASH_HOST_DEVICE constexpr int key_at(int position) { return position / 4 * 2 + position % 2 + position / 2 % 2 * 8; }

constexpr int kVtKeys = 128;  // keys in a block of V^T; blocks begin at multiples of it

// The e4m3 bit pattern of 2^x is 8 (x + 7) at integers x; between them both the pattern and e4m3 values are linear, at
// most 6 % above 2^x. Adding kBitsMagic to that number as a float leaves the pattern plus kBitsShift in the low 16
// bits. Without the shift a NaN, all ones there, would read as -1, below every pattern; with it NaN is above all.
constexpr float kPatternsPerOctave = 8.0f;
constexpr float kExponentBias = 7.0f;
constexpr uint32_t kBitsShift = 0x8000u;
constexpr float kBitsMagic = 12582912.0f + 32768.0f;
constexpr uint32_t kLargestBits = 0x7eu;  // 448
constexpr uint32_t kNanBits = 0x7fu;
constexpr uint32_t twice(uint32_t bits) { return bits << 16 | bits; }
// log2(1.5 ln 2): how much larger a sum of such values is than the sum of the powers, for exponents spread evenly over
// octaves.
constexpr float kExpBitsMeanLog2 = 0.056197f;

constexpr uint32_t kOnes = 0x38383838u;  // 1, four times

}  // namespace e4m3
}  // namespace flash
