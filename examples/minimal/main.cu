// Checks and times the kernels of rungs.h: `main [RESULT.json]`, exit status 1 if a result is wrong; launches each
// once, for a profiler: `main --once`; or prints their shared memory, which needs no GPU: `main --budget`.
#include "rungs.h"

#include "measure.h"

int main(int argc, char** argv) {
  const std::string option = argc > 1 ? argv[1] : "";
  if (option == "--budget") {
    print_budget();
    return 0;
  }
  const Shape shape{4, 4096, 32, HEAD_DIM};
  return option == "--once" ? launch_each(shape) : measure(shape, argc > 1 ? argv[1] : nullptr);
}
