// Variants of the decode kernel.
#pragma once

namespace flash {
namespace decode {

// kPlain leaves out what decoding rarely needs, and with it half of the instructions, which are fetched from device
// memory at first use: score modifiers, rotary queries, pages that a step may straddle, rows without 16-byte alignment
// or with padded head dims, equal and fixed splits.
enum class KvVariant { kAll, kPlain };

}  // namespace decode
}  // namespace flash
