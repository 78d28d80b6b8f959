"""Wall time, CPU time and peak memory of a command and all its children: `python -m benchmarks.footprint make demo`.

`--core` runs it on one core (Linux). Memory is the largest sum of the resident sizes of the process tree, asked of `ps`
twice a second; pages that processes share are counted in each.
"""

import os
import resource
import subprocess
import sys
import threading
import time


def tree_kib(root: int) -> int:
    """Resident KiB of a process and its descendants."""
    rows = subprocess.run(["ps", "-axo", "pid=,ppid=,rss="], capture_output=True, text=True, check=True).stdout.split()
    numbers = list(map(int, rows))
    children: dict[int, list[int]] = {}
    size = {}
    for pid, parent, rss in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        children.setdefault(parent, []).append(pid)
        size[pid] = rss
    total, queue = 0, [root]
    while queue:
        pid = queue.pop()
        total += size.get(pid, 0)
        queue += children.get(pid, [])
    return total


def main(words: list[str]) -> int:
    """Runs the command and prints what it took; its exit code."""
    if words[:1] == ["--core"]:
        words = words[1:]
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    began = time.monotonic()
    process = subprocess.Popen(words)
    peak, done = 0, threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.5):
            peak = max(peak, tree_kib(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    done.set()
    watcher.join()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"wall {time.monotonic() - began:.0f} s, CPU {used.ru_utime + used.ru_stime:.0f} s, "
        f"peak of the process tree {peak / 2**20:.2f} GiB"
    )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
