// The bits that a query sees of consecutive keys (core/mask_bits.h) against each bit alone.
#include "core/mask_bits.h"

#include <random>
#include <vector>

#include "check.h"

namespace {

using flash::FastDiv;
using flash::kMaskWordKeys;
using flash::MaskBits;

constexpr int kBatch = 2, kHeads = 4, kRows = 3;

// Key `first` + i of the mask: earlier keys are seen, those beyond its words are not.
bool bit_of(const std::vector<uint32_t>& words, int words_of_row, int64_t row, int key) {
  if (key < 0) return true;
  if (key >= words_of_row * kMaskWordKeys) return false;
  return words[row * words_of_row + key / kMaskWordKeys] >> (key % kMaskWordKeys) & 1u;
}

void check_words(int keys, int mask_heads, bool per_batch, std::mt19937& generator) {
  MaskBits mask;
  mask.keys = keys;
  mask.rows = kRows;
  mask.row_words = (keys + kMaskWordKeys - 1) / kMaskWordKeys;
  mask.matrices.heads = mask_heads;
  mask.matrices.per_batch = per_batch;
  mask.matrices.group = FastDiv(kHeads / mask_heads);
  std::vector<uint32_t> words((per_batch ? kBatch : 1) * mask_heads * kRows * mask.row_words);
  for (uint32_t& word : words) word = generator();
  mask.words = words.data();
  for (int batch = 0; batch < kBatch; ++batch) {
    for (int head = 0; head < kHeads; ++head) {
      for (int row = 0; row < kRows; ++row) {
        const int matrix = (per_batch ? batch * mask_heads : 0) + head / (kHeads / mask_heads);
        for (int first = -3 * kMaskWordKeys; first < keys + 3 * kMaskWordKeys; ++first) {
          const uint32_t word = mask.word(batch, head, row, first);
          bool equal = true;
          for (int i = 0; i < kMaskWordKeys; ++i) {
            equal &= (word >> i & 1u) == bit_of(words, mask.row_words, matrix * kRows + row, first + i);
          }
          check::that(equal, "word", "keys ", keys, " first ", first, " head ", head, " row ", row);
        }
      }
    }
  }
}

}  // namespace

int main() {
  std::mt19937 generator(5);
  for (const int keys : {1, 5, 31, 32, 33, 64, 100}) {
    for (const int heads : {1, 2, 4}) {
      check_words(keys, heads, false, generator);
      check_words(keys, heads, true, generator);
    }
  }
  MaskBits mask;
  check::that(!mask.given(), "given", "no mask");
  mask.keys = 7;
  check::that(mask.first_key(20) == 13 && mask.first_key(3) == -4, "first key", "of 20 and of 3 keys");
  return check::report();
}
