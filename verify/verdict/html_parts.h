// What pages are made of.
#pragma once
#include <string>

namespace shardproof::verify {

// All up to the body's inside. `style`: CSS of this page alone.
std::string html_head(const std::string& title, const std::string& style = {});
inline constexpr const char* kHtmlEnd = "</body>\n</html>\n";

// A table's cell, of text or of a number.
std::string html_cell(const std::string& text);
std::string html_number(const std::string& text);
// A term and what it means, inside <dl>. Text of several lines keeps them.
std::string html_definition(const std::string& term, const std::string& text);

}  // namespace shardproof::verify
