// A plan as names and values, for flash_attn.explain() and FLASH_ATTN_TRACE. Plain C++17.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace flash {
namespace plan {

// In the order of first use.
struct Explanation {
  using Value = std::variant<bool, int64_t, std::string>;
  std::vector<std::pair<std::string, Value>> fields;

  Value& operator[](const std::string& name) {
    for (auto& [own, value] : fields) {
      if (own == name) return value;
    }
    return fields.emplace_back(name, Value{}).second;
  }
  bool has(const std::string& name) const {
    for (const auto& field : fields) {
      if (field.first == name) return true;
    }
    return false;
  }
};

// One line: name=value, separated by blanks.
inline std::string one_line(const Explanation& plan) {
  std::string line;
  for (const auto& [name, value] : plan.fields) {
    line += (line.empty() ? "" : " ") + name + "=";
    if (const auto* text = std::get_if<std::string>(&value)) line += *text;
    if (const auto* number = std::get_if<int64_t>(&value)) line += std::to_string(*number);
    if (const auto* flag = std::get_if<bool>(&value)) line += *flag ? "1" : "0";
  }
  return line;
}

}  // namespace plan
}  // namespace flash
