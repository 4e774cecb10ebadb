// e4m3 operands of wgmma: the order of the keys of V^T, and e4m3 codes from exponents. Plain C++17.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace flash {
namespace e4m3 {

// Bytes 4 t to 4 t + 3 of 16 columns of the A operand belong to lane 4 g + t, which holds columns 2 t, 2 t + 1 of each
// 8 of an accumulator. P in its own registers is an operand of permuted keys: the key, of 16, at a position.
FLASH_HOST_DEVICE constexpr int key_at(int position) { return position / 4 * 2 + position % 2 + position / 2 % 2 * 8; }

constexpr int kVtKeys = 128;  // keys of a block of V^T, which begins at a multiple of as many

// The code of 2^x is 8 (x + 7) where it is a power of two, and linear in x between, as the value is in the code: at
// most 6 % above. As a float that is kCodeMagic higher it stands, kCodeShift higher, in the low 16 bits. Without the
// shift a NaN, all ones there, would be -1, which is less than every code; with it it is the greatest of all.
constexpr float kCodesPerOctave = 8.0f;
constexpr float kExponentBias = 7.0f;
constexpr uint32_t kCodeShift = 0x8000u;
constexpr float kCodeMagic = 12582912.0f + 32768.0f;
constexpr uint32_t kLargestCode = 0x7eu;  // 448
constexpr uint32_t kNanCode = 0x7fu;
constexpr uint32_t twice(uint32_t code) { return code << 16 | code; }
// log2(1.5 ln 2): how much more a sum of such codes is than that of the powers, exponents being spread over octaves.
constexpr float kCodeMeanLog2 = 0.056197f;

constexpr uint32_t kOnes = 0x38383838u;  // 1, four times

}  // namespace e4m3
}  // namespace flash
