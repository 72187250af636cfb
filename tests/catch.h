// Catch2, in the version that is there (2 on Debian 12, 3 on Ubuntu 24.04), with its macros intact:
// LibTorch's logging header defines a CHECK of its own, so it has to come, and go, first.
#pragma once
#if __has_include(<c10/util/Logging.h>)
#include <c10/util/Logging.h>
#undef CHECK
#endif
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif
