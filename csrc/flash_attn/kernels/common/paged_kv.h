// Where the rows of a sequence stand in the pages that its table lists.
#pragma once

#include "params/flash.h"

namespace flash {

struct PageRow {
  int page;
  int row;     // of the page
  bool valid;  // there is such a page
};

// Row `place` of the pages that `table` lists. An entry that names no page is not followed.
__device__ __forceinline__ PageRow page_row(const PagedKv& paged, const int* table, int place, bool exists) {
  const int slot = paged.page_size.divide(place);
  const int page = exists && slot < paged.pages_per_sequence ? table[slot] : -1;
  const bool valid = static_cast<unsigned>(page) < static_cast<unsigned>(paged.num_pages);
  return {page, place - slot * paged.page_size.divisor, valid};
}

}  // namespace flash
