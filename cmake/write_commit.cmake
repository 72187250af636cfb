# Writes OUTPUT (a .cc file) with the commit of SOURCE; touches it only if the commit changed.
set(commit unknown)
find_program(GIT git)
if(GIT)
  execute_process(COMMAND ${GIT} -C ${SOURCE} describe --always --dirty --exclude "*"
                  OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(described)
    set(commit ${described})
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT [[
#include "cli/commit.h"
namespace shardproof::cli {
std::string commit() { return "@commit@"; }
}  // namespace shardproof::cli
]] @ONLY)
