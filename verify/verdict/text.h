// Text helpers of the verdict's writers: names come from models, captures and mutants, so nothing
// about them is trusted (a name must not move the cursor, break a table or end an XML attribute).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace shardproof::verify {

// `text` with control characters (C0, DEL, C1), directional overrides, bytes that are not UTF-8 and
// the code points that XML 1.0 forbids written out as \xNN or \uNNNN. Newlines become \n unless
// `keep_newlines`.
std::string printable(std::string_view text, bool keep_newlines = false);

// `printable`, then escaped so that the result is safe as text or as an attribute's value, in XML
// and in HTML. In attributes newlines become character references: a parser would turn them into
// spaces.
std::string escape_text(std::string_view text);
std::string escape_attribute(std::string_view text);

// Columns on a terminal: the number of code points. (Names are ASCII in practice; wide characters
// count as one.)
std::size_t columns(std::string_view utf8);

// At most `width` columns: the middle, or the end, gives way to "...".
std::string elide_middle(const std::string& text, std::size_t width);
std::string elide_end(const std::string& text, std::size_t width);

// Lines of at most `width` columns, broken at spaces and at newlines; longer words are cut.
std::vector<std::string> wrap_words(const std::string& text, std::size_t width);

// A shell command in lines of at most `width` columns. Broken only at spaces outside quotes, each
// line but the last ends in " \", so that pasting all lines runs the command. A longer word stays
// whole: cutting it would break the command.
std::vector<std::string> wrap_command(const std::string& command, std::size_t width);

// With an ANSI colour code around it ("1;32"), where `color` asks for that.
std::string painted(bool color, const char* code, const std::string& text);

std::string join(const std::vector<std::string>& parts, std::string_view separator);

// 3904 -> "3,904".
std::string with_thousands(int64_t value);

// (1, "case") -> "1 case", (1200, "case") -> "1,200 cases".
std::string count_of(int64_t value, std::string_view noun);

}  // namespace shardproof::verify
