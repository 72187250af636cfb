// The commit that the program was built from.
#pragma once
#include <string>

namespace shardproof::cli {

std::string commit();  // abbreviated hash, "-dirty" behind it if files were changed; or "unknown"

}  // namespace shardproof::cli
