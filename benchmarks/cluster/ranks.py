"""The ranks of an emulated cluster: processes on its nodes that do the same jobs together."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from network import LINK, NODES, Network

PORT = 29871
ROOT = Path(__file__).resolve().parents[2]


class Ranks:
    """`per_node` ranks on each node. A job that a rank does not answer in time, or a rank that dies, is an OSError.

    own_cores: whether nodes share no core, as real ones don't; where a node's ranks then share one, each is slower.
    """

    def __init__(self, network: Network, per_node: int, folder: Path, *, own_cores: bool = False):
        self.network, self.shape = network, (NODES, per_node)
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.logs = [folder / f"rank{rank}.log" for rank in range(NODES * per_node)]
        self.processes = []
        cores = sorted(os.sched_getaffinity(0))
        for rank, log in enumerate(self.logs):
            node = rank // per_node
            command = [sys.executable, str(Path(__file__).with_name("rank.py")), str(rank), "x".join(map(str, self.shape))]
            own = ",".join(map(str, cores[node::NODES] or cores if own_cores else cores))
            self.processes.append(
                network.run(
                    node,
                    [*command, f"{network.address(0)}:{PORT}", own],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log.open("w"),
                    env=environment,
                    text=True,
                )
            )
        self._answers(120.0)

    def do(self, what: str, *, timeout: float = 300.0, **job) -> dict:
        """Rank 0's answer, once all have answered."""
        for process in self.processes:
            process.stdin.write(json.dumps({"do": what, **job}) + "\n")
            process.stdin.flush()
        return self._answers(timeout)[0]

    def _answers(self, timeout: float) -> list[dict]:
        end, answers = time.monotonic() + timeout, []
        for rank, process in enumerate(self.processes):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            line = process.stdout.readline() if ready else ""
            if not line:
                what = f"gave no answer in {timeout:.0f} s" if not ready else "died"
                last = self.logs[rank].read_text().strip().splitlines()[-1:] or ["it said nothing"]
                raise OSError(f"rank {rank} {what}: {last[0]}")
            answers.append(json.loads(line))
        return answers

    def stop(self) -> None:
        for process in self.processes:
            process.stdin.write('{"do": "stop"}\n')
            process.stdin.flush()
        for process in self.processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:  # all is said and done
                process.kill()

    def kill(self) -> None:
        """Ends processes of which one has died."""
        for process in self.processes:
            process.kill()
            process.wait()
