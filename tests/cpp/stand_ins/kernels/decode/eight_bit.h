// The emulator's conversion of e4m3.
#pragma once

namespace emulation {

// Infinities do not exist; all ones are NaN.
inline float from_e4m3(int byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 127) == 127) return NAN;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return byte >> 7 ? -magnitude : magnitude;
}

}  // namespace emulation

namespace flash {
namespace decode {

template <bool kSecond>
float2 e4m3_to_floats(uint32_t word) {
  const int pair = word >> (kSecond ? 16 : 0);
  return {emulation::from_e4m3(pair & 255), emulation::from_e4m3(pair >> 8 & 255)};
}

}  // namespace decode
}  // namespace flash
