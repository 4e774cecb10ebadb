// Which score modifiers a call has, or a kernel is compiled for.
#pragma once

namespace flash {

// kAny: whatever the parameters of the call ask for.
enum class Modifiers { kNone, kSoftcap, kAlibi, kAny };

}  // namespace flash
