"""Speed of `python -m gattn prepare` on about 40 MB of Python source (each file once), in MB/s of text.

    python -m benchmarks.prepare_speed

prints for bpe, for the tokenizer.json that came of it, and for bytes, with one worker and with two: MB/s of the whole
command by the clock and by the CPU time of all its processes (start-up and training of the tokenizer included), and
MB/s of the tokenising alone. Aimed at: 3 MB/s a core.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path


def collect(folder: Path, size: int) -> int:
    """Writes different source files of this Python and its packages, half as text and half as JSONL; their bytes."""
    seen, total = set(), 0
    roots = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    with (folder / "lines.jsonl").open("w", encoding="utf-8") as lines:
        for path in (p for root in roots for p in sorted(Path(root).rglob("*.py"))):
            content = path.read_bytes()
            if total >= size:
                break
            if content in seen or not content.strip():
                continue
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                continue
            seen.add(content)
            total += len(content)
            if len(seen) % 2:
                (folder / f"{len(seen):05d}.txt").write_bytes(content)
            else:
                lines.write(json.dumps({"text": text}) + "\n")
    return total


def measure(files: Path, out: Path, tokenizer: str, workers: int) -> tuple[float, float, float]:
    """Wall time and CPU time of the command in seconds, and the MB/s that it prints for the tokenising."""
    options = ["--tokenizer", tokenizer, "--workers", str(workers), "--out", os.fspath(out)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    command = [sys.executable, "-m", "gattn", "prepare", os.fspath(files), *options]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    found = re.search(r"tokenised .* s, ([0-9.,]+) MB/s", printed)
    assert found, printed
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, float(found[1].replace(",", ""))


def main() -> None:
    """Prints one line per tokenizer and number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=40)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "files"
        files.mkdir()
        size = collect(files, arguments.megabytes * 10**6) / 1e6
        print(f"{size:.1f} MB of text")
        for name in ("bpe", "json", "bytes"):
            tokenizer = f"{folder}/bpe1/tokenizer.json" if name == "json" else name
            for workers in (1, 2):
                wall, cpu, speed = measure(files, Path(folder) / f"{name}{workers}", tokenizer, workers)
                print(
                    f"{name:5} {workers} workers: {wall:5.1f} s by the clock, {size / wall:4.1f} MB/s, "
                    f"{cpu:5.1f} s of CPU, {size / cpu:4.1f} MB/s a core; tokenising alone {speed:.1f} MB/s"
                )


if __name__ == "__main__":
    main()
