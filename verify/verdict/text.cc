#include "verify/verdict/text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace shardproof::verify {
namespace {

struct CodePoint {
  uint32_t value = 0;
  std::size_t length = 0;  // in bytes; 0: the bytes are not UTF-8
};

// Strict decoding (RFC 3629): no overlong forms, no surrogates, nothing above U+10FFFF.
CodePoint decode(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 0;
  if (length == 0 || lead > 0xF4 || text.size() < length) return {};
  uint32_t value = lead & (0xFF >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {};
    value = value << 6 | (byte(i) & 0x3F);
  }
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = value >= 0xD800 && value <= 0xDFFF;
  if (value < kSmallest[length] || surrogate || value > 0x10FFFF) return {};
  return {value, length};
}

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// Code points that a terminal or a browser may obey rather than show, or that XML 1.0 forbids:
// non-characters, line and paragraph separators, directional overrides.
bool misleads(uint32_t point) {
  return (point & 0xFFFE) == 0xFFFE || (point >= 0x2028 && point <= 0x202E) ||
         (point >= 0x2066 && point <= 0x2069);
}

// The first `count` columns, or the last.
std::string head_columns(const std::string& text, std::size_t count) {
  std::size_t end = 0;
  for (; end < text.size(); ++end) {
    if (!is_continuation(text[end]) && count-- == 0) break;
  }
  return text.substr(0, end);
}
std::string tail_columns(const std::string& text, std::size_t count) {
  std::size_t begin = text.size();
  while (begin > 0 && count > 0) {
    --begin;
    if (!is_continuation(text[begin])) --count;
  }
  return text.substr(begin);
}

// Splits at spaces that are outside quotes and not escaped.
std::vector<std::string> shell_words(const std::string& command) {
  std::vector<std::string> words(1);
  char quote = 0;
  for (std::size_t i = 0; i < command.size(); ++i) {
    const char c = command[i];
    if (c == ' ' && quote == 0) {
      if (!words.back().empty()) words.emplace_back();
      continue;
    }
    words.back() += c;
    if (c == '\\' && quote != '\'' && i + 1 < command.size()) {
      words.back() += command[++i];
    } else if (quote != 0) {
      if (c == quote) quote = 0;
    } else if (c == '\'' || c == '"') {
      quote = c;
    }
  }
  if (words.back().empty()) words.pop_back();
  return words;
}

}  // namespace

std::string printable(std::string_view text, bool keep_newlines) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const CodePoint point = decode(text.substr(i));
    const bool control =
        point.value < 0x20 || (point.value >= 0x7F && point.value < 0xA0) || point.length == 0;
    if (text[i] == '\n') {
      out += keep_newlines ? "\n" : "\\n";
    } else if (misleads(point.value)) {
      out += fmt::format("\\u{:04X}", point.value);
    } else if (!control) {
      out += text.substr(i, point.length);
    } else if (point.length == 2) {
      out += fmt::format("\\u{:04X}", point.value);
    } else {
      out += fmt::format("\\x{:02X}", static_cast<unsigned char>(text[i]));
    }
    i += std::max<std::size_t>(point.length, 1);
  }
  return out;
}

std::string escape_text(std::string_view text) {
  std::string out;
  for (const char c : printable(text, true)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string escape_attribute(std::string_view text) {
  std::string out;
  for (const char c : escape_text(text)) {
    if (c == '\n') {
      out += "&#10;";
    } else {
      out += c;
    }
  }
  return out;
}

std::size_t columns(std::string_view utf8) {
  return utf8.size() - std::count_if(utf8.begin(), utf8.end(), is_continuation);
}

std::string elide_middle(const std::string& text, std::size_t width) {
  if (columns(text) <= width) return text;
  if (width <= 3) return std::string(width, '.');
  const std::size_t tail = (width - 3) / 2;
  return head_columns(text, width - 3 - tail) + "..." + tail_columns(text, tail);
}

std::string elide_end(const std::string& text, std::size_t width) {
  if (columns(text) <= width) return text;
  if (width <= 3) return std::string(width, '.');
  return head_columns(text, width - 3) + "...";
}

std::vector<std::string> wrap_words(const std::string& text, std::size_t width) {
  std::vector<std::string> lines(1);
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find_first_of(" \n", begin), text.size());
    std::string word = text.substr(begin, end - begin);
    const bool fits = columns(lines.back()) + 1 + columns(word) <= width;
    if (!lines.back().empty() && !fits) lines.emplace_back();
    if (!lines.back().empty() && !word.empty()) lines.back() += ' ';
    while (columns(word) > width) {
      lines.back() += head_columns(word, width);
      word = word.substr(head_columns(word, width).size());
      lines.emplace_back();
    }
    lines.back() += word;
    if (end < text.size() && text[end] == '\n') lines.emplace_back();
    begin = end + 1;
  }
  if (lines.size() > 1 && lines.back().empty()) lines.pop_back();
  return lines;
}

std::vector<std::string> wrap_command(const std::string& command, std::size_t width) {
  if (columns(command) <= width) return {command};
  std::vector<std::string> lines(1);
  for (const std::string& word : shell_words(command)) {
    const bool fits = columns(lines.back()) + 1 + columns(word) + 2 <= width;
    if (!lines.back().empty() && !fits) {
      lines.back() += " \\";
      lines.emplace_back();
    }
    if (!lines.back().empty()) lines.back() += ' ';
    lines.back() += word;
  }
  return lines;
}

std::string painted(bool color, const char* code, const std::string& text) {
  return color ? fmt::format("\x1b[{}m{}\x1b[0m", code, text) : text;
}

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  return fmt::format("{}", fmt::join(parts, separator));
}

std::string with_thousands(int64_t value) {
  std::string digits = fmt::format("{}", value);
  const std::size_t first = value < 0 ? 1 : 0;
  for (std::size_t i = digits.size(); i > first + 3;) digits.insert(i -= 3, ",");
  return digits;
}

std::string count_of(int64_t value, std::string_view noun) {
  return fmt::format("{} {}{}", with_thousands(value), noun, value == 1 ? "" : "s");
}

}  // namespace shardproof::verify
