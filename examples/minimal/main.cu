// Checks and times the kernels of rungs.h: `main [RESULT.json]`, exit status 1 if a result is wrong; or prints their
// shared memory, which needs no GPU: `main --budget`.
#include "rungs.h"

#include "measure.h"

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--budget") {
    print_budget();
    return 0;
  }
  return measure({4, 4096, 32, HEAD_DIM}, argc > 1 ? argv[1] : nullptr);
}
