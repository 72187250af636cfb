# The simulator's engine under ThreadSanitizer, in every build type: its threads are the one place
# where a race of ours could hide. LibTorch is not instrumented, hence plain data.
set(engine_sources
    ${PROJECT_SOURCE_DIR}/sim/engine/issue_order.cc ${PROJECT_SOURCE_DIR}/sim/engine/rendezvous.cc
    ${PROJECT_SOURCE_DIR}/sim/engine/scheduler.cc ${PROJECT_SOURCE_DIR}/src/base/collective_call.cc)

include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_FLAGS -fsanitize=thread)
check_cxx_source_compiles("int main() { return 0; }" SHARDPROOF_HAS_TSAN)
unset(CMAKE_REQUIRED_FLAGS)

function(shardproof_tsan_program target)
  add_executable(${target} ${ARGN} ${engine_sources})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
  target_compile_options(${target} PRIVATE -fsanitize=thread -g -O1 -Wall -Wextra
                                           -Wno-unused-parameter)
  target_link_options(${target} PRIVATE -fsanitize=thread)
  target_link_libraries(${target} PRIVATE fmt::fmt nlohmann_json::nlohmann_json Threads::Threads)
endfunction()

# Two sanitizers cannot share a program; where all is built with one, it has these sources anyway.
if(SHARDPROOF_SANITIZE)
  return()
endif()
if(NOT SHARDPROOF_HAS_TSAN)
  message(WARNING "the compiler lacks -fsanitize=thread: the simulator's engine is not checked for "
                  "data races (on Debian and Ubuntu install libtsan)")
  return()
endif()

list(TRANSFORM SIM_ENGINE_TESTS PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/ OUTPUT_VARIABLE engine_tests)
shardproof_tsan_program(test_sim_engine_tsan ${engine_tests})
target_link_libraries(test_sim_engine_tsan PRIVATE shardproof_test_main)
shardproof_tsan_program(planted_race ${CMAKE_CURRENT_LIST_DIR}/planted_race.cc)
target_compile_definitions(planted_race PRIVATE PLANT_RACE)
shardproof_tsan_program(planted_race_left_out ${CMAKE_CURRENT_LIST_DIR}/planted_race.cc)

set(tsan ${CMAKE_CURRENT_LIST_DIR}/tsan.sh)
add_test(NAME sim_engine_tsan
         COMMAND ${tsan} clean $<TARGET_FILE:test_sim_engine_tsan> --order rand --rng-seed time)
add_test(NAME sim_engine_planted_race
         COMMAND ${tsan} race write_neighbours_buffer $<TARGET_FILE:planted_race>)
add_test(NAME sim_engine_no_race COMMAND ${tsan} clean $<TARGET_FILE:planted_race_left_out>)
set_tests_properties(sim_engine_tsan sim_engine_planted_race sim_engine_no_race PROPERTIES TIMEOUT 600)
