// Variants of the wgmma backward.
#pragma once

namespace flash {
namespace sm90 {

// kPlain: no dropout, no score modifier, softmax scale > 0, dK and dV of the inputs' dtype. kGeneral: all of these as
// run-time flags. kAccumulate: kPlain, but dK and dV are added to fp32 matrices; as a flag of kPlain it would change
// how ptxas schedules the loop.
// kListed: m_blocks by list, of a mask as data (core/block_list.h), with all of kGeneral as run-time flags.
// kListedPlain: kListed without any of them.
// kBiased: kListed with biases as data, in one pass and without softcap, at head dim 128 without dropout; it may store
// dS.
enum class BwdVariant { kPlain, kGeneral, kAccumulate, kListed, kBiased, kListedPlain };

// Where dQ is accumulated. kGlobal: in fp32 tiles in global memory, into which every n_block reduces. kGlobalLong: the
// same with plan::sm90_long_bwd_tile(). kShared: in shared memory, by a thread block that computes all n_blocks of a
// head.
enum class DqLocation { kGlobal, kGlobalLong, kShared };

}  // namespace sm90
}  // namespace flash
