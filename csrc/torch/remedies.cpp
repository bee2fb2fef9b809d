// What users read about a failure: the core's message and, in their terms, what
// they can do about it. The only place that knows both.
#include <array>
#include <string>

#include "torch/guard.hpp"

namespace fsdp_torch {
namespace {

struct Remedy {
  fsdp_remedy remedy;
  const char *text;
};

constexpr std::array kRemedies = {
    Remedy{FSDP_REMEDY_NONE, ""},
    Remedy{FSDP_REMEDY_RESET, "call fsdp_c.reset(model) first"},
    Remedy{FSDP_REMEDY_DISMISS, "leave summon_full_params first"},
    Remedy{FSDP_REMEDY_END_STEP,
           "leave forward, backward, no_sync and summon_full_params first"},
    Remedy{FSDP_REMEDY_RESHARD, "call reshard() first"},
    Remedy{FSDP_REMEDY_SYNC, "leave no_sync first"},
    Remedy{FSDP_REMEDY_SYNC_ALIKE, "all ranks must be in no_sync or none"},
    Remedy{FSDP_REMEDY_REDUCE, "end with a backward outside no_sync"},
    Remedy{FSDP_REMEDY_TRAIN_SOONER,
           "set requires_grad before the forward whose backward needs the "
           "gradient"},
    Remedy{FSDP_REMEDY_TRAIN_LATER,
           "set requires_grad between optimizer steps"},
    Remedy{FSDP_REMEDY_NO_OFFLOAD, "wrap it without CPU offload"},
    Remedy{FSDP_REMEDY_NO_CAPTURE, "train without capture_step"},
    Remedy{FSDP_REMEDY_NO_ORDER_CHECK, "unset TORCH_DISTRIBUTED_DEBUG"},
    Remedy{FSDP_REMEDY_NO_RECORDING, "end the recording of fsdp_c.trace first"},
    Remedy{FSDP_REMEDY_TRANSPORT,
           "python -m fsdp_c doctor says what carries them"},
    Remedy{FSDP_REMEDY_NO_READING, "set FSDP_C_TRANSPORT=rings"},
};

constexpr bool has_one_of_each() {
  for (size_t i = 0; i < kRemedies.size(); i++) {
    if (kRemedies[i].remedy != static_cast<fsdp_remedy>(i)) return false;
  }
  return kRemedies.size() == FSDP_NUM_REMEDIES;
}
static_assert(has_one_of_each(),
              "a remedy without a sentence, or out of order");

}  // namespace

std::string text_of(const fsdp_error &error) {
  const char *remedy = kRemedies.at(error.remedy).text;
  return *remedy == '\0' ? error.message
                         : std::string(error.message) + "; " + remedy;
}

}  // namespace fsdp_torch
