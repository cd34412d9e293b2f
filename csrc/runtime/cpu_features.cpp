// Detection of instruction sets and of usable cores. See cpu_features.h.
#include "runtime/cpu_features.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__linux__) && defined(MLXR_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__linux__) && defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace mlxr {

namespace {

constexpr const char* kNames[kIsaCount] = {"portable", "avx2", "avx512", "avx512bf16", "neon", "amx"};

struct Tier {
    Isa isa;
    bool is_here;
};
constexpr Tier kTiers[] = {
#define TIER(name) {Isa::name, true},
#define LEFT_OUT(name) {Isa::name, false},
#include "tiers.def"
};

bool has_tier(Isa isa, bool is_here) {
    return std::any_of(std::begin(kTiers), std::end(kTiers),
                       [=](const Tier& tier) { return tier.isa == isa && tier.is_here == is_here; });
}

#if defined(__linux__)

// The first number of e.g. "0,64" or "0-1": the same for all hardware threads of one core.
int first_sibling(int cpu) {
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
    int first = cpu;
    if (file && (file >> first)) return first;
    return cpu;
}

int allowed_cores() {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    if (sched_getaffinity(0, sizeof mask, &mask) != 0) return 0;
    std::set<int> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &mask)) cores.insert(first_sibling(cpu));
    }
    return static_cast<int>(cores.size());
}

// Quota in whole CPUs of one cgroup folder, or 0 when it sets none. v2 has "cpu.max" ("max 100000" or "150000
// 100000"), v1 has cpu.cfs_quota_us (-1: none) and cpu.cfs_period_us.
double folder_quota(const std::string& folder) {
    double quota = 0, period = 0;
    std::ifstream v2(folder + "/cpu.max");
    std::string first;
    if (v2 && (v2 >> first >> period) && first != "max") quota = std::atof(first.c_str());
    if (!v2) {
        std::ifstream quota_file(folder + "/cpu.cfs_quota_us"), period_file(folder + "/cpu.cfs_period_us");
        if (!(quota_file >> quota) || !(period_file >> period)) return 0;
    }
    return quota > 0 && period > 0 ? quota / period : 0;
}

// The tightest quota on the path from our cgroup to the root.
double cgroup_quota() {
    double tightest = 0;
    std::ifstream file("/proc/self/cgroup");
    std::string line;
    while (std::getline(file, line)) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        std::string path = line.substr(second + 1);
        if (!controllers.empty() && controllers.find("cpu") == std::string::npos) continue;
        const std::string root = controllers.empty() ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
        while (true) {
            const double quota = folder_quota(root + (path == "/" ? "" : path));
            if (quota > 0 && (tightest == 0 || quota < tightest)) tightest = quota;
            const size_t slash = path.rfind('/');
            if (path.size() <= 1 || slash == std::string::npos) break;
            path = slash == 0 ? "/" : path.substr(0, slash);
        }
    }
    return tightest;
}

#endif

#if defined(__linux__) && defined(MLXR_X86)
// Whether the processor multiplies tiles of bytes, and Linux, which saves them for processes that ask, lets this one.
bool may_use_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kTiles = 1u << 24, kBytes = 1u << 25;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTiles) == 0 || (d & kBytes) == 0) return false;
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return granted;
}
#endif

#if defined(__APPLE__)
// A whole number that the system tells by name; 0 where it knows none such.
int read_sysctl(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 ? value : 0;
}
#endif

// Whether processor and system can run a tier, whatever this module has.
bool can_run(Isa isa) {
    if (isa == Isa::portable) return true;
#if defined(__linux__) && defined(MLXR_X86)
    if (isa == Isa::amx) return can_run(Isa::avx512) && may_use_amx();
#endif
#if defined(MLXR_X86)
    // These builtins also ask XGETBV whether the operating system saves the wide registers.
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
    if (isa == Isa::avx2) return avx2;
    if (isa == Isa::avx512) return avx512;
    return isa == Isa::avx512bf16 && avx512 && __builtin_cpu_supports("avx512bf16");
#elif defined(MLXR_ARM) && defined(__linux__)
    return isa == Isa::neon && (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(MLXR_ARM) && defined(__APPLE__)
    return isa == Isa::neon && read_sysctl("hw.optional.arm.FEAT_DotProd") != 0;
#else
    return false;
#endif
}

// Whether a pair of bf16 takes the processor longer than two multiply-adds: see best_isa.
bool is_slow_with_pairs() {
#if defined(MLXR_X86)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}

}  // namespace

const char* isa_name(Isa isa) {
    return kNames[static_cast<int>(isa)];
}

bool parse_isa(std::string_view name, Isa& isa) {
    for (int i = 0; i < kIsaCount; ++i) {
        if (name == kNames[i]) {
            isa = static_cast<Isa>(i);
            return true;
        }
    }
    return false;
}

bool isa_built(Isa isa) {
    return has_tier(isa, true);
}

bool isa_left_out(Isa isa) {
    return has_tier(isa, false);
}

bool isa_available(Isa isa) {
    return isa_built(isa) && can_run(isa);
}

Isa best_isa() {
    for (int i = kIsaCount - 1; i > 0; --i) {
        const Isa isa = static_cast<Isa>(i);
        if (isa == Isa::avx512bf16 && is_slow_with_pairs()) continue;
        if (isa_available(isa)) return isa;
    }
    return Isa::portable;
}

int default_threads() {
    int threads = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
    const int cores = allowed_cores();
    if (cores > 0) threads = cores;
    const double quota = cgroup_quota();
    if (quota > 0) threads = std::min(threads, static_cast<int>(quota));
#elif defined(__APPLE__)
    const int fast = read_sysctl("hw.perflevel0.physicalcpu");
    if (fast > 0) threads = fast;
#endif
    return std::max(threads, 1);
}

}  // namespace mlxr
