"""Free memory is the least of what the system and every control group above the process leave."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

from mlxr.core.memory import _read_mac_bytes, read_available_bytes

MIB = 2**20


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 16384 kB\nMemAvailable: 8192 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_system_without_groups(tmp_path: Path) -> None:
    assert read_available_bytes(write_tree(tmp_path, {})) == 8 * MIB


def test_version_2_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{4 * MIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * MIB}\n",
    }
    assert read_available_bytes(write_tree(tmp_path, files)) == 1 * MIB


def test_cold_file_cache_counts_as_free(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{4 * MIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * MIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * MIB}\n",
    }
    assert read_available_bytes(write_tree(tmp_path, files)) == 3 * MIB


def test_parent_group_binds(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/user/job\n",
        "sys/fs/cgroup/user/job/memory.max": "max\n",
        "sys/fs/cgroup/user/job/memory.current": "0\n",
        "sys/fs/cgroup/user/memory.max": f"{5 * MIB}\n",
        "sys/fs/cgroup/user/memory.current": f"{3 * MIB}\n",
    }
    assert read_available_bytes(write_tree(tmp_path, files)) == 2 * MIB


def test_version_1_group_seen_from_a_container(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{6 * MIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{4 * MIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {1 * MIB}\n",
    }
    assert read_available_bytes(write_tree(tmp_path, files)) == 3 * MIB


def test_version_1_without_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{4 * MIB}\n",
    }
    assert read_available_bytes(write_tree(tmp_path, files)) == 8 * MIB


def test_overdrawn_group_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "100\n",
        "sys/fs/cgroup/memory.current": "200\n",
    }
    assert read_available_bytes(write_tree(tmp_path, files)) == 0


def test_path_cannot_leave_the_mount(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/../../secret\n", "secret/memory.max": "1\n", "secret/memory.current": "0\n"}
    assert read_available_bytes(write_tree(tmp_path, files)) == 8 * MIB


def test_system_without_proc(tmp_path: Path) -> None:
    available = read_available_bytes(tmp_path)
    assert available is None or available > 0


def test_this_machine() -> None:
    available = read_available_bytes()
    assert available is None or available > MIB


def test_macos_counts_pages_that_it_can_give_up() -> None:
    """Four numbers of 32 bits, nine of 64, and then the purgeable pages, as mach/vm_statistics.h has them."""

    class System:
        status = 0

        def mach_host_self(self) -> int:
            return 7

        def host_statistics64(self, host: int, flavour: int, words: Any, count: Any) -> int:
            assert (host, flavour, count._obj.value >= 38) == (7, 4, True)
            fields = struct.pack("4I9Q2I", 100, 9000, 20, 9000, *[2**40] * 9, 3, 9000)
            words[: len(fields) // 4] = struct.unpack(f"{len(fields) // 4}I", fields)
            return self.status

    system = System()
    assert _read_mac_bytes(system) == 123 * os.sysconf("SC_PAGE_SIZE")
    system.status = 5
    assert _read_mac_bytes(system) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
