// Prints the dropout mask of one (batch, head) as rows of 0 and 1, for comparison with the Python twin.
// Arguments: seed offset batch head rows columns threshold, and the first row and column.
#include <cstdlib>
#include <iostream>
#include <string>

#include "core/dropout_mask.h"

int main(int argc, char** argv) {
  if (argc != 10) return 2;
  const auto number = [&](int i) { return std::strtoull(argv[i], nullptr, 10); };
  const flash::DropoutStream stream =
      flash::dropout_stream(number(1), number(2), static_cast<uint32_t>(number(3)), static_cast<uint32_t>(number(4)));
  const int rows = static_cast<int>(number(5)), columns = static_cast<int>(number(6));
  const int first_row = static_cast<int>(number(8)), first_column = static_cast<int>(number(9));
  for (int row = 0; row < rows; ++row) {
    std::string line;
    for (int column = 0; column < columns; ++column) {
      const bool keep_mask =
          flash::dropout_keeps(stream, first_row + row, first_column + column, static_cast<uint32_t>(number(7)));
      line += keep_mask ? '1' : '0';
    }
    std::cout << line << '\n';
  }
  return 0;
}
