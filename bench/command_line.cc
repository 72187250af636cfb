#include "bench/command_line.h"

#include "base/error.h"

namespace shardproof::bench {

bool parse_command_line(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return false;
  } catch (const CLI::ParseError& error) {
    bad_input("{}; see --help", error.what());
  }
  return true;
}

}  // namespace shardproof::bench
