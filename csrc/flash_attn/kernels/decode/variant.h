// Variants of the decode kernel.
#pragma once

namespace flash {
namespace decode {

// kPlain supports no score modifiers, rotary queries, pages that a step may straddle, rows without 16-byte alignment or
// with padded head dims, and no equal or fixed splits: decoding rarely needs them, and they are half of the
// instructions, which are fetched from device memory at first use.
// kMaskBits is kAll with a mask of the last keys: tests of it would cost the others registers.
// kSwapAb is kPlain for an 8-bit cache and at most 8 packed rows, which are the MMA's columns: O^T = V^T P^T.
enum class KvVariant { kAll, kPlain, kMaskBits, kSwapAb };

}  // namespace decode
}  // namespace flash
