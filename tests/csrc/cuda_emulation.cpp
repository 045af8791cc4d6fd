// Fibers and their schedule, barriers and collectives; one host thread at a time may launch.
#include "cuda_emulation_state.h"

#include <cstdio>
#include <dlfcn.h>
#include <random>

namespace cuda_emulation {

Emulation machine;

namespace {

// Where the lanes of a warp that come to a collective now put their values.
unsigned char* record_of(int warp) {
  const size_t at = static_cast<size_t>(warp) * kRecords + machine.warps[warp].next_record;
  return machine.records + at * 32 * kMaxLaneBytes;
}

void switch_to_scheduler() {
  if (!_setjmp(machine.current->context)) _longjmp(machine.scheduler, 1);
}

}  // namespace

std::string place(const Thread& t) {
  char text[120];
  std::snprintf(text, sizeof(text), "thread (%u, %u, %u) of block (%u, %u, %u)", t.index.x,
                t.index.y, t.index.z, machine.block_at.x, machine.block_at.y, machine.block_at.z);
  return text;
}

void fail(const std::string& message, const void* at) {
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

namespace {

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
