// The page and row of a key of a paged sequence.
#pragma once

#include "params/flash.h"

namespace flash {

struct PageRow {
  int page;
  int row;     // of the page
  bool valid;  // the block_table has a page for the key
};

// Key `key` of a sequence whose block_table row is `table`. Out-of-range entries are not dereferenced.
__device__ __forceinline__ PageRow page_row(const PagedKv& paged, const int* table, int key, bool in_bounds) {
  const int slot = paged.page_size.divide(key);
  const int page = in_bounds && slot < paged.pages_per_sequence ? table[slot] : -1;
  const bool valid = static_cast<unsigned>(page) < static_cast<unsigned>(paged.num_pages);
  return {page, key - slot * paged.page_size.divisor, valid};
}

}  // namespace flash
