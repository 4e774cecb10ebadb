// Checks and times the kernels of rungs.h: `main [RESULT.json]`, exit status 1 if a result is wrong; or launches each
// once, for a profiler: `main --once`. Does nothing on a GPU that is no Hopper.
#include <cstdio>

#include "rungs.h"

#include "../minimal/measure.h"

int main(int argc, char** argv) {
  int major;
  CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major != 9) return 0;
  const Shape shape{1, 16384, 16, 128};
  if (argc > 1 && std::string(argv[1]) == "--once") return launch_each(shape);
  return measure(shape, argc > 1 ? argv[1] : nullptr);
}
