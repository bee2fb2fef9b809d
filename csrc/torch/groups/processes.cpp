// Looks at processes through /proc.
#include "torch/groups/processes.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <vector>

namespace fsdp_torch {
namespace {

// "" if the file cannot be read.
std::string first_line_of(const std::string &path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Process ids mean the same where boot and pid namespace are the same.
std::string this_system() {
  struct stat info = {};
  const std::string boot = first_line_of("/proc/sys/kernel/random/boot_id");
  if (boot.empty() || stat("/proc/self/ns/pid", &info) != 0) return "";
  return boot + "/" + std::to_string(info.st_ino);
}

// State and start time stand in fields 3 and 22 of stat; the second one, the
// program's name, may hold anything and ends at the last ")".
struct Stat {
  char state = 0;
  std::string start;
};

Stat stat_of(const std::string &pid) {
  const std::string line = first_line_of("/proc/" + pid + "/stat");
  const size_t name_end = line.rfind(')');
  Stat result;
  if (name_end == std::string::npos) return result;
  std::istringstream fields(line.substr(name_end + 1));
  std::string field;
  for (int number = 3; number <= 22 && fields >> field; number++) {
    if (number == 3) result.state = field[0];
    if (number == 22) result.start = field;
  }
  return result;
}

bool is_here(const Process &process) {
  static const std::string here = this_system();
  return !here.empty() && process.system == here;
}

}  // namespace

std::string this_host() {
  const char *name = std::getenv("FSDP_C_HOST_ID");
  if (name != nullptr && *name != '\0') return name;
  const std::string system = this_system();
  return system.empty() ? this_process().host : system;
}

Process this_process() {
  static std::atomic<int64_t> num_instances{0};
  Process self;
  char name[256] = {};
  if (gethostname(name, sizeof name - 1) != 0) name[0] = '\0';
  self.host = name[0] != '\0' ? name : "?";
  self.system = this_system();
  if (self.system.empty()) self.system = "?";
  self.pid = getpid();
  self.start = stat_of("self").start;
  if (self.start.empty()) self.start = "?";
  self.instance = std::to_string(num_instances++);
  return self;
}

std::string text_of(const Process &process) {
  return process.host + " " + process.system + " " +
         std::to_string(process.pid) + " " + process.start + " " +
         process.instance;
}

Process process_of(const std::string &text) {
  std::istringstream words(text);
  Process process;
  if (!(words >> process.host >> process.system >> process.pid >>
        process.start >> process.instance)) {
    return Process();
  }
  return process;
}

ProcessState state_of(const Process &process) noexcept {
  try {
    if (!process.is_known() || !is_here(process)) return ProcessState::kUnknown;
    const Stat now = stat_of(std::to_string(process.pid));
    // A number that another process has now was free in between.
    if (now.start != process.start) return ProcessState::kEnded;
    switch (now.state) {
      case 'Z':
      case 'X':
        return ProcessState::kEnded;
      case 'T':
      case 't':
        return ProcessState::kStopped;
      default:
        return ProcessState::kRuns;
    }
  } catch (...) {
    return ProcessState::kUnknown;
  }
}

std::string name_of(const Process &process) {
  return "process " + std::to_string(process.pid) + " on " +
         (is_here(process) ? "this host" : "host '" + process.host + "'");
}

}  // namespace fsdp_torch
