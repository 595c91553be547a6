// The order in which streams run what they are given, by vector clocks: what two streams touch in no
// order is a hazard, and what the host waits for is a wait.

#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"

namespace emulated {

using Lane = std::pair<int, StreamId>;  // a stream of a device
using Clock = std::map<Lane, int64_t>;       // how many launches of each stream are known to be done

struct Access {
  Lane lane{-1, 0};
  int64_t at = 0;  // 0: none yet
  std::string op;
};

struct Block {  // what a device's memory is: the host's, and who touched it last
  Storage host;
  Access write;
  std::map<Lane, Access> reads;
  Lane home;
  bool recorded = false;  // by record_stream
};

inline std::recursive_mutex lock;  // of all below
inline std::map<Lane, Clock> clocks;
inline Clock host_clock;
inline StreamId last_stream = 0;
inline bool waits_raise = false;
inline std::vector<std::string> waits, hazards;
// By the stream that may use memory again: who has used what is freed.
inline std::map<Lane, std::vector<Access>> freed;

inline Lane lane_of(Device device) {
  return {device.index(), current_streams[device.index()]};
}

inline void merge(Clock& into, const Clock& from) {
  for (const auto& [lane, at] : from) {
    into[lane] = std::max(into[lane], at);
  }
}

inline void require(const Lane& lane, const Access& before, const char* what, const std::string& op) {
  if (before.at && before.lane != lane && clocks[lane][before.lane] < before.at) {
    hazards.push_back(c10::str(
        what, ": ", op, " on stream ", lane.second, " after ", before.op, " on stream ",
        before.lane.second));
  }
}

inline void touch(Block& block, const Lane& lane, int64_t at, const std::string& op, bool writes) {
  require(lane, block.write, writes ? "write after write" : "read after write", op);
  if (!writes) {
    block.reads[lane] = {lane, at, op};
    return;
  }
  for (const auto& [_, read] : block.reads) {
    require(lane, read, "write after read", op);
  }
  block.reads.clear();
  block.write = {lane, at, op};
}

inline void wait(const std::string& name, const Clock& done) {
  std::lock_guard guard(lock);
  TORCH_CHECK(!waits_raise, "called a synchronizing operation: ", name);
  waits.push_back(name);
  merge(host_clock, done);
}

}  // namespace emulated
