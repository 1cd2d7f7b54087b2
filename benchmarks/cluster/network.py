"""Two nodes on one machine: network namespaces joined by a veth pair whose ends send no faster than a token bucket allows.

    with Network() as network:
        network.limit(100e6 / 8)                      # bytes per second, each way
        network.run(0, ["python", "rank.py"], ...)    # a process on node 0
        network.bytes_sent()                          # what has left each node so far, without the headers

Needs root and iproute2. The namespaces are removed when the block ends, also by an exception or SIGTERM; what a killed run
left behind is removed by the next one, if its process is gone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys

NODES = 2
PREFIX = "autoshard"
LINK = "wire"  # the interface's name inside each namespace
MTU = 1500  # bytes
CONGESTION_CONTROL = "reno"  # is in every kernel, and every gather takes the same seconds: with bbr, which probes, between .18 and .33
HEADERS = 14 + 20 + 32  # bytes of Ethernet, IPv4, and TCP with time stamps; an acknowledgement is nothing else


class Network:
    def __init__(self) -> None:
        why = why_not()
        if why is not None:
            raise ValueError(why)
        self.names = [f"{PREFIX}-{os.getpid()}-{node}" for node in range(NODES)]
        self.processes: list[subprocess.Popen] = []

    def __enter__(self) -> Network:
        remove_leftovers()
        self.before = {kind: signal.signal(kind, _stop) for kind in (signal.SIGTERM, signal.SIGHUP)}
        try:
            for name in self.names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "dev", "lo", "up")
                setting = "/proc/sys/net/ipv4/tcp_congestion_control"
                _checked(["ip", "netns", "exec", name, "sh", "-c", f"echo {CONGESTION_CONTROL} > {setting}"])
            ends = [("name", LINK, "netns", name) for name in self.names]
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for node, name in enumerate(self.names):
                ip("-n", name, "address", "add", f"{self.address(node)}/24", "dev", LINK)
                ip("-n", name, "link", "set", "dev", LINK, "mtu", str(MTU), "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()
        for kind, handler in self.before.items():
            signal.signal(kind, handler)

    def _remove(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        remove(self.names)

    def address(self, node: int) -> str:
        return f"10.199.7.{node + 1}"

    def limit(self, bytes_per_second: float | None) -> None:
        """What each node may send; None takes the limit away. A bucket of 1 ms: what was saved up in a pause is little of a message."""
        for name in self.names:
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", LINK, "root"], capture_output=True)
            if bytes_per_second is not None:
                burst = max(int(0.001 * bytes_per_second), 4 * MTU)
                rate = f"{int(8 * bytes_per_second)}bit"
                command = ["tc", "-n", name, "qdisc", "add", "dev", LINK, "root", "tbf", "rate", rate, "burst", str(burst), "limit", "64mb"]
                _checked(command)

    def run(self, node: int, command: list[str], **options) -> subprocess.Popen:
        process = subprocess.Popen(["ip", "netns", "exec", self.names[node], *command], **options)
        self.processes.append(process)
        return process

    def bytes_sent(self) -> list[int]:
        """What the interface of each node has counted as sent, less the headers of its packets."""
        said = [_checked(["ip", "-n", name, "-s", "-j", "link", "show", "dev", LINK]) for name in self.names]
        counted = [json.loads(text)[0]["stats64"]["tx"] for text in said]
        return [tx["bytes"] - HEADERS * tx["packets"] for tx in counted]


def why_not() -> str | None:
    """Why there can be no such network here, in a sentence; None where there can."""
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"no program {' or '.join(missing)} was found: the emulated cluster needs iproute2 (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "the emulated cluster needs root, to make network namespaces: run it with sudo"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    remove([probe])
    return None


def remove_leftovers() -> None:
    """Namespaces of runs whose process is gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    names = re.findall(rf"^({PREFIX}-(\d+)-\d)\b", listed, re.MULTILINE)
    remove([name for name, pid in names if not os.path.exists(f"/proc/{pid}")])


def remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)  # the veth pair goes with it


def ip(*words: str) -> str:
    return _checked(["ip", *words])


def _checked(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _stop(number: int, _: object) -> None:
    sys.exit(128 + number)  # runs the exits of all blocks
