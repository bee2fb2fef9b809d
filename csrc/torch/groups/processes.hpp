// The processes behind the ranks: who they are, and whether they still run.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp_torch {

// One process, so that others can find it again and not another one that got
// its number later.
struct Process {
  std::string host;      // name, for messages
  std::string system;    // the same where process ids mean the same
  int64_t pid = 0;       // 0: unknown
  std::string start;     // when it began, in the system's ticks
  std::string instance;  // another one for each use of a group

  bool is_known() const { return pid > 0; }
};

enum class ProcessState { kUnknown, kRuns, kStopped, kEnded };

// Names this process's host: FSDP_C_HOST_ID, or what is the same where process
// ids mean the same.
std::string this_host();

// This process; `instance` is new with each call.
Process this_process();

// One line; `process_of` reads it back, and gives an unknown process for
// anything else.
std::string text_of(const Process &process);
Process process_of(const std::string &text);

// kUnknown on another host, or where /proc shows nothing. Cannot fail.
ProcessState state_of(const Process &process) noexcept;

// "process 4711 on this host", "process 4711 on host 'node3'".
std::string name_of(const Process &process);

}  // namespace fsdp_torch
