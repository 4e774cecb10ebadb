// Checks and times the kernels of rungs.h: `main [RESULT.json]`, exit status 1 if a result is wrong. Does nothing on a
// GPU that is no Hopper.
#include <cstdio>

#include "rungs.h"

#include "../minimal/measure.h"

int main(int argc, char** argv) {
  int major;
  CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major != 9) return 0;
  return measure({1, 16384, 16, 128}, argc > 1 ? argv[1] : nullptr);
}
