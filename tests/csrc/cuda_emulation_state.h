// What the emulation knows of a launch: its threads, barriers and who last touched which word.
#pragma once
#include "cuda_emulation.h"

#include <csetjmp>
#include <map>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cuda_emulation {

constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kSharedBytes = 256 << 10;
constexpr size_t kDefaultDynamicBytes = 48 << 10;  // more must be asked for, as in CUDA
constexpr int kRecords = 128;  // of collectives of a warp; at most 32 are in use

enum class State { kReady, kAtBarrier, kInCollective, kDone };

struct Thread {
  jmp_buf context;
  State state;
  bool has_started;
  dim3 index;
  int number, lane, warp;
  unsigned mask;        // of the collective it waits in
  Collective kind;
  const unsigned char* received;
  uint32_t clock[32];   // what it knows of its warp's lanes: ordered before it up to here
};

struct Warp {
  unsigned arrived = 0;
  int next_record = 0;
};

// Who last touched a word, and when: within a block by barrier, within a warp by lanes' clocks.
struct Touch {
  uint32_t block = 0;  // serial number of the block's run; 0: never
  uint32_t epoch = 0;  // block barriers passed
  uint32_t clock = 0;  // of the lane
  uint16_t thread = 0;
  uint8_t bytes = 0;  // of the word
  bool is_atomic = false;
};

struct Word {
  Touch write;
  Touch read, other_lane, other_warp;  // the last reader; before it, one beside it and one not
  uint32_t filled_block = 0;
  uint8_t filled = 0;  // bytes that filled_block wrote
};

struct Emulation {
  // One mapping for stacks, lanes' values and shared memory, so that one comparison tells them.
  char* arena = nullptr;
  char* shared = nullptr;
  unsigned char* records = nullptr;
  std::vector<Thread> threads{kMaxThreads};
  std::vector<Warp> warps{kMaxThreads / 32};
  std::vector<int> order;
  jmp_buf scheduler;
  ucontext_t start;
  const std::function<void()>* body = nullptr;
  const char* kernel = "";
  Thread* current = nullptr;
  dim3 grid, block, block_at;
  int num_threads = 0, num_alive = 0, num_waiting = 0, site = 0, votes = 0, last_votes = 0;
  uint32_t serial = 0, first_serial = 0;  // of this block's run, and of the launch's first
  uint32_t epoch = 0;
  size_t dynamic_bytes = 0, shared_used = 0;
  std::map<const void*, char*> statics;
  std::vector<Word> shared_words{kSharedBytes / 4};
  std::unordered_map<uintptr_t, std::unique_ptr<Word[]>> pages;
  uintptr_t last_page = 0;
  Word* last_words = nullptr;
  std::map<const void*, int> allowed_bytes;
  std::vector<std::string> sites;
  std::map<std::pair<const char*, int>, int> known_sites;
  int disabled_site = -1;
  int seed = 0;
  int num_launches = 0;
  int cub_calls_to_failure = 0;  // 0: none fails
  int shared_limit = 99 << 10;
  std::string error, text;

  Emulation() {
    const size_t records_bytes = size_t{kMaxThreads} / 32 * kRecords * 32 * kMaxLaneBytes;
    const size_t size = kMaxThreads * kStackBytes + records_bytes + kSharedBytes;
    arena = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    shared = arena + kMaxThreads * kStackBytes;
    records = reinterpret_cast<unsigned char*>(shared + kSharedBytes);
  }
  bool is_private(const char* address) const {
    return address >= arena && (address < shared || address >= shared + kSharedBytes) &&
           address < reinterpret_cast<char*>(records) +
                         size_t{kMaxThreads} * kRecords * kMaxLaneBytes;
  }
};

extern Emulation machine;  // not inline: libraries in one process would share it

std::string place(const Thread& t);

// Remembers the first error; inside a kernel, ends the launch.
void fail(const std::string& message, const void* at = nullptr);

}  // namespace cuda_emulation
