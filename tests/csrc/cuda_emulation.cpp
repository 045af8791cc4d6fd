// The emulation's runtime: fibers and their schedule, barriers, and the record of who touched what.
// Compiled without -fsanitize=thread, whose hooks it defines; one host thread at a time may launch.
#include "cuda_emulation.h"

#include <csetjmp>
#include <cstdio>
#include <dlfcn.h>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cuda_emulation {
namespace {

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

Emulation machine;

// Where the lanes of a warp that come to a collective now put their values.
unsigned char* record_of(int warp) {
  const size_t at = static_cast<size_t>(warp) * kRecords + machine.warps[warp].next_record;
  return machine.records + at * 32 * kMaxLaneBytes;
}

void switch_to_scheduler() {
  if (!_setjmp(machine.current->context)) _longjmp(machine.scheduler, 1);
}

std::string place(const Thread& t) {
  char text[120];
  std::snprintf(text, sizeof(text), "thread (%u, %u, %u) of block (%u, %u, %u)", t.index.x,
                t.index.y, t.index.z, machine.block_at.x, machine.block_at.y, machine.block_at.z);
  return text;
}

// Remembers the first error; inside a kernel, ends the launch.
void fail(const std::string& message, const void* at = nullptr) {
  if (machine.error.empty()) {
    machine.error = std::string(machine.kernel) + ": " + message;
    Dl_info info;
    if (at && dladdr(at, &info)) {
      char text[40];
      std::snprintf(text, sizeof(text), " at +0x%zx",
                    static_cast<size_t>(static_cast<const char*>(at) -
                                        static_cast<const char*>(info.dli_fbase)) - 1);
      machine.error += text;
    }
  }
  if (machine.current) _longjmp(machine.scheduler, 1);
}

bool is_before_now(const Touch& touch, const Thread& now, bool in_shared) {
  if (touch.block < (in_shared ? machine.serial : machine.first_serial)) return true;
  if (touch.block != machine.serial) return false;
  if (touch.thread == now.number || touch.epoch < machine.epoch) return true;
  return touch.thread / 32 == now.warp && touch.clock <= now.clock[touch.thread % 32];
}

void check_race(const Touch& earlier, const Touch& now, const char* was, const char* is,
                bool in_shared, const void* at) {
  if (!(earlier.bytes & now.bytes) || (earlier.is_atomic && now.is_atomic)) return;
  if (is_before_now(earlier, *machine.current, in_shared)) return;
  const std::string whose = earlier.block == machine.serial
                                ? "thread " + std::to_string(earlier.thread) + " of the same block"
                                : "another block";
  fail("race in " + std::string(in_shared ? "shared" : "global") + " memory: " +
           place(*machine.current) + is + " what " + whose + was + " with no barrier between",
       at);
}

Word* words_of_page(uintptr_t page) {
  if (page != machine.last_page || !machine.last_words) {
    auto& words = machine.pages[page];
    if (!words) words.reset(new Word[1024]);
    machine.last_page = page;
    machine.last_words = words.get();
  }
  return machine.last_words;
}

void touch_word(Word& word, uint8_t bytes, bool in_shared, Access access, const void* at) {
  const Thread& t = *machine.current;
  const bool is_atomic = access == Access::kAtomic;
  const Touch now{machine.serial,  machine.epoch, t.clock[t.lane],
                  static_cast<uint16_t>(t.number), bytes, is_atomic};
  const uint8_t filled = word.filled_block == machine.serial ? word.filled : 0;
  if (access != Access::kWrite && in_shared && (bytes & ~filled)) {
    fail("read of shared memory that the block has not written, by " + place(t), at);
  }
  if (access == Access::kConstantRead && word.write.block >= machine.first_serial) {
    fail("__ldg of what the same launch writes, by " + place(t), at);
  }
  const bool is_write = access == Access::kWrite || is_atomic;
  check_race(word.write, now, " wrote", is_write ? " writes" : " reads", in_shared, at);
  if (!is_write) {
    const bool is_beside = word.read.block == now.block && word.read.thread / 32 == now.thread / 32;
    if (!is_beside) {
      word.other_warp = word.read;
    } else if (word.read.thread != now.thread) {
      word.other_lane = word.read;
    }
    word.read = now;
    return;
  }
  for (const Touch* read : {&word.read, &word.other_lane, &word.other_warp}) {
    check_race(*read, now, " read", " writes", in_shared, at);
  }
  word.write = now;
  word.filled_block = machine.serial;
  word.filled = filled | bytes;
}

void touch(const void* address, size_t bytes, Access access, const void* at) {
  if (!machine.current) return;
  const auto* from = static_cast<const char*>(address);
  if (machine.is_private(from)) return;
  const bool in_shared = from >= machine.shared && from < machine.shared + kSharedBytes;
  const auto shared = reinterpret_cast<uintptr_t>(machine.shared);
  const auto begin = reinterpret_cast<uintptr_t>(from), end = begin + bytes;
  for (uintptr_t word = begin & ~uintptr_t{3}; word < end; word += 4) {
    uint8_t mask = 15;
    if (word < begin) mask &= static_cast<uint8_t>(15 << (begin - word));
    if (word + 4 > end) mask &= static_cast<uint8_t>(15 >> (word + 4 - end));
    Word& record = in_shared ? machine.shared_words[(word - shared) / 4]
                             : words_of_page(word >> 12)[(word >> 2) & 1023];
    touch_word(record, mask, in_shared, access, at);
  }
}

void run_thread() {
  (*machine.body)();
  machine.current->state = State::kDone;
  machine.num_alive--;
  _longjmp(machine.scheduler, 1);
}

void resume(Thread& thread) {
  machine.current = &thread;
  if (!_setjmp(machine.scheduler)) {
    if (thread.has_started) _longjmp(thread.context, 1);
    thread.has_started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = machine.arena + thread.number * kStackBytes;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, run_thread, 0);
    swapcontext(&machine.start, &context);
  }
  machine.current = nullptr;
}

void start_block() {
  const dim3& block = machine.block;
  machine.serial++;
  machine.epoch = 0;
  machine.num_alive = machine.num_threads;
  machine.num_waiting = machine.votes = 0;
  machine.shared_used = (machine.dynamic_bytes + 15) / 16 * 16;
  machine.statics.clear();
  std::memset(machine.shared, 0xff, machine.shared_used);  // NaNs
  for (int i = 0; i < machine.num_threads; i++) {
    Thread& t = machine.threads[i];
    t.state = State::kReady;
    t.has_started = false;
    t.number = i;
    t.lane = i % 32;
    t.warp = i / 32;
    t.index = dim3(i % block.x, i / block.x % block.y, i / (block.x * block.y));
    std::fill(t.clock, t.clock + 32, 0);
    t.clock[t.lane] = 1;
    machine.order[i] = machine.seed == 1 ? machine.num_threads - 1 - i : i;
  }
  for (int w = 0; w < (machine.num_threads + 31) / 32; w++) machine.warps[w] = Warp();
}

// All threads wait at one barrier: lets them go on.
void open_barrier() {
  machine.last_votes = machine.votes;
  machine.votes = machine.num_waiting = 0;
  machine.epoch++;
  for (int i = 0; i < machine.num_threads; i++) machine.threads[i].state = State::kReady;
}

std::string describe_waiting() {
  for (int i = 0; i < machine.num_threads; i++) {
    const Thread& t = machine.threads[i];
    if (t.state == State::kAtBarrier) return place(t) + " waits at " + machine.sites[machine.site];
    if (t.state == State::kInCollective) {
      return place(t) + " waits in a warp collective whose lanes do not all come";
    }
  }
  return "";
}

void run_block(std::mt19937_64& random) {
  start_block();
  while (machine.num_alive && machine.error.empty()) {
    if (machine.seed > 1) std::shuffle(machine.order.begin(), machine.order.end(), random);
    bool has_progressed = false;
    for (int i : machine.order) {
      if (machine.threads[i].state != State::kReady || !machine.error.empty()) continue;
      has_progressed = true;
      resume(machine.threads[i]);
    }
    if (!machine.error.empty() || !machine.num_alive) return;
    if (machine.num_waiting == machine.num_threads) {
      open_barrier();
    } else if (!has_progressed) {
      fail("divergent barrier or deadlock: " + describe_waiting() + ", " +
           std::to_string(machine.num_threads - machine.num_alive) +
           " threads of the block have ended, " + std::to_string(machine.num_waiting) +
           " wait at a barrier");
    }
  }
}

// The last lane of t's mask has come: gives the record to all of them and lets them go on. Of
// __syncwarp the record is what the lanes know together.
void meet(const Thread& t, unsigned char* record) {
  Warp& warp = machine.warps[t.warp];
  Thread* const lanes = &machine.threads[t.warp * 32];
  warp.arrived &= ~t.mask;
  warp.next_record = (warp.next_record + 1) % kRecords;
  if (warp.arrived) std::memcpy(record_of(t.warp), record, 32 * kMaxLaneBytes);
  uint32_t known[32] = {};
  for (int lane = 0; lane < 32; lane++) {
    if (!(t.mask >> lane & 1)) continue;
    lanes[lane].received = record;
    lanes[lane].state = State::kReady;
    for (int i = 0; i < 32; i++) known[i] = std::max(known[i], lanes[lane].clock[i]);
  }
  if (t.kind == Collective::kSyncWarp) std::memcpy(record, known, sizeof(known));
}

}  // namespace

dim3 thread_index() { return machine.current->index; }
dim3 block_index() { return machine.block_at; }
dim3 block_dim() { return machine.block; }
dim3 grid_dim() { return machine.grid; }
int lane_index() { return machine.current->lane; }
void* dynamic_shared() { return machine.shared; }

void* static_shared(const void* site, size_t bytes) {
  char*& memory = machine.statics[site];
  if (!memory) {
    memory = machine.shared + machine.shared_used;
    machine.shared_used += (bytes + 15) / 16 * 16;
    if (static_cast<int>(machine.shared_used) > machine.shared_limit) {
      fail("needs " + std::to_string(machine.shared_used) +
           " bytes of shared memory, the device has " + std::to_string(machine.shared_limit));
    }
    std::memset(memory, 0xff, bytes);
  }
  return memory;
}

void note_access(const void* address, size_t bytes, Access access) {
  touch(address, bytes, access, __builtin_return_address(0));
}

void copy_unseen(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

int barrier_site(const char* file, int line, const char* what) {
  const auto [known, is_new] = machine.known_sites.try_emplace({file, line}, 0);
  if (is_new) {  // the same file can have several names: a header of two sources
    const char* slash = std::strrchr(file, '/');
    const std::string name =
        std::string(slash ? slash + 1 : file) + ":" + std::to_string(line) + " " + what;
    const auto found = std::find(machine.sites.begin(), machine.sites.end(), name);
    known->second = static_cast<int>(found - machine.sites.begin());
    if (found == machine.sites.end()) machine.sites.push_back(name);
  }
  return known->second;
}

int sync_block(int site, int predicate) {
  if (site == machine.disabled_site) return predicate;
  Thread& t = *machine.current;
  if (machine.num_waiting && machine.site != site) {
    fail("divergent barrier: " + place(t) + " comes to " + machine.sites[site] +
         " while others wait at " + machine.sites[machine.site]);
  }
  t.state = State::kAtBarrier;
  machine.site = site;
  machine.num_waiting++;
  machine.votes += predicate;
  switch_to_scheduler();
  return machine.last_votes;
}

const unsigned char* collective(unsigned mask, Collective kind, const void* value, size_t bytes) {
  Thread& t = *machine.current;
  Warp& warp = machine.warps[t.warp];
  if (!(mask >> t.lane & 1)) fail("a lane calls a warp collective without itself: " + place(t));
  bool is_last = true;
  for (int lane = 0; lane < 32; lane++) {
    if (!(mask >> lane & 1) || lane == t.lane) continue;
    const int number = t.warp * 32 + lane;
    const Thread& other = machine.threads[number];
    if (number >= machine.num_threads || other.state == State::kDone) {
      fail("a warp collective names lane " + std::to_string(lane) + ", which has ended: " +
           place(t));
    }
    const bool waits = (warp.arrived >> lane & 1) && other.mask == mask;
    if (waits && other.kind != kind) {
      fail("divergent warp collective: " + place(t) + " and " + place(other) +
           " are in different ones");
    }
    is_last = is_last && waits;
  }
  // Lanes that meet find the same record, or a copy: it moves on when a group has come.
  if (bytes) std::memcpy(record_of(t.warp) + t.lane * kMaxLaneBytes, value, bytes);
  warp.arrived |= 1u << t.lane;
  t.mask = mask;
  t.kind = kind;
  if (is_last) {
    meet(t, record_of(t.warp));
  } else {
    t.state = State::kInCollective;
    switch_to_scheduler();
  }
  return t.received;
}

void sync_warp(int site, unsigned mask) {
  if (site == machine.disabled_site) return;
  Thread& t = *machine.current;
  std::memcpy(t.clock, collective(mask, Collective::kSyncWarp, nullptr, 0), sizeof(t.clock));
  t.clock[t.lane]++;
}

void launch(const void* kernel, const char* name, dim3 grid, dim3 block, size_t dynamic_bytes,
            const std::function<void()>& body) {
  if (!machine.error.empty()) return;
  machine.kernel = name;
  machine.num_launches++;
  machine.grid = grid;
  machine.block = block;
  machine.num_threads = static_cast<int>(block.x * block.y * block.z);
  machine.dynamic_bytes = dynamic_bytes;
  machine.body = &body;
  const auto asked = machine.allowed_bytes.find(kernel);
  const size_t most = asked == machine.allowed_bytes.end() ? kDefaultDynamicBytes : asked->second;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  if (!machine.num_threads || machine.num_threads > kMaxThreads || !blocks || grid.y > 65535 ||
      grid.z > 65535 || grid.x > 0x7fffffff) {
    fail("invalid launch of " + std::to_string(blocks) + " blocks of " +
         std::to_string(machine.num_threads) + " threads");
    return;
  }
  if (dynamic_bytes > most) {
    fail("launch with " + std::to_string(dynamic_bytes) + " bytes of dynamic shared memory, " +
         std::to_string(most) + " are allowed (cudaFuncSetAttribute)");
    return;
  }
  machine.order.resize(machine.num_threads);
  machine.first_serial = machine.serial + 1;
  std::mt19937_64 random(machine.seed);
  std::vector<uint64_t> order(blocks);
  for (uint64_t i = 0; i < blocks; i++) order[i] = machine.seed == 1 ? blocks - 1 - i : i;
  if (machine.seed > 1) std::shuffle(order.begin(), order.end(), random);
  for (uint64_t i : order) {
    machine.block_at = dim3(i % grid.x, i / grid.x % grid.y, i / (uint64_t{grid.x} * grid.y));
    run_block(random);
    if (!machine.error.empty()) return;
  }
}

}  // namespace cuda_emulation

using cuda_emulation::machine;

constexpr cudaError_t kEmulationError = 719;  // cudaErrorLaunchFailure
cudaError_t cudaPeekAtLastError() { return machine.error.empty() ? cudaSuccess : kEmulationError; }
cudaError_t cudaGetLastError() {
  if (machine.error.empty()) return cudaSuccess;
  machine.text = std::exchange(machine.error, "");
  return kEmulationError;
}
const char* cudaGetErrorString(cudaError_t error) {
  if (error == kEmulationError) return machine.text.c_str();
  return error == cudaSuccess ? "no error" : "invalid argument";
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? machine.shared_limit
           : attribute == cudaDevAttrMultiProcessorCount        ? 4
           : attribute == cudaDevAttrComputeCapabilityMajor     ? 9
                                                                : 0;
  return cudaSuccess;
}
cudaError_t cuda_emulation_set_attribute(const void* kernel, cudaFuncAttribute, int value) {
  if (value > machine.shared_limit) return cudaErrorInvalidValue;
  machine.allowed_bytes[kernel] = value;
  return cudaSuccess;
}

// What emulation.py calls.
extern "C" {
int emulation_num_launches() { return machine.num_launches; }
void emulation_set_schedule(int seed) { machine.seed = seed; }
void emulation_set_shared_limit(int bytes) { machine.shared_limit = bytes; }
void emulation_disable_barrier(int site) { machine.disabled_site = site; }
int emulation_num_barriers() { return static_cast<int>(machine.sites.size()); }
const char* emulation_barrier(int site) { return machine.sites[site].c_str(); }
const char* emulation_take_error() {
  return cudaGetLastError() == cudaSuccess ? nullptr : machine.text.c_str();
}
}

// The hooks of -fsanitize=thread.
#define TT_HOOK_(name, bytes, access)                                                            \
  extern "C" void __tsan_##name(void* address) {                                                 \
    cuda_emulation::touch(address, bytes, cuda_emulation::Access::access,                        \
                          __builtin_return_address(0));                                          \
  }
#define TT_HOOKS_(bytes)                                                                         \
  TT_HOOK_(read##bytes, bytes, kRead)                                                            \
  TT_HOOK_(write##bytes, bytes, kWrite)
TT_HOOKS_(1)
TT_HOOKS_(2)
TT_HOOKS_(4)
TT_HOOKS_(8)
TT_HOOKS_(16)
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_read_range(void* address, size_t bytes) {
  cuda_emulation::touch(address, bytes, cuda_emulation::Access::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  cuda_emulation::touch(address, bytes, cuda_emulation::Access::kWrite,
                        __builtin_return_address(0));
}
}
