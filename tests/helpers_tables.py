"""Small random problems of embedding tables, and references too simple to be wrong."""

import itertools
import math
import random

from autoshard.tables import Option, Table


def published(memory, perf, bins):
    """The published knapsack, state by state: one proposal per bin of memory, high to low."""
    best = [[(math.inf, math.inf)] * bins for _ in memory]
    back = [[(-1, -1)] * bins for _ in memory]
    for j, (a, b) in enumerate(zip(memory[0], perf[0])):
        if a < bins and best[0][int(a)][0] > b:
            best[0][int(a)], back[0][int(a)] = (b, a), (j, -1)
    for i in range(1, len(memory)):
        for j, (a, b) in enumerate(zip(memory[i], perf[i])):
            for m in range(bins):
                before, held = best[i - 1][m]
                if before < math.inf and held + a < bins and best[i][int(held + a)][0] > before + b:
                    best[i][int(held + a)], back[i][int(held + a)] = (before + b, held + a), (j, m)
    proposals = []
    for m in range(bins - 1, -1, -1):
        if back[-1][m][0] >= 0:
            chosen, at = [], m
            for i in range(len(memory) - 1, -1, -1):
                j, at = back[i][at]
                chosen.append(j)
            proposals.append(chosen[::-1])
    return proposals


def random_lists(rng: random.Random, tables: int, bins: int, most: int = 4):
    """(memory in bins, perf): ragged; whole numbers and halves among them, so that sums meet the edges of bins."""
    memory, perf = [], []
    for _ in range(tables):
        n = rng.randint(1, most)
        memory.append([rng.choice([rng.uniform(0, bins / tables * 2), float(rng.randint(0, 5)), 0.5]) for _ in range(n)])
        perf.append([rng.choice([rng.uniform(0, 10), float(rng.randint(1, 3))]) for _ in range(n)])
    return memory, perf


def random_tables(rng: random.Random, tables: int, most: int, devices: int, per_node: int) -> list[Table]:
    """Ragged options of every scope, in whole bytes, with and without host memory."""
    found = []
    for i in range(tables):
        options = []
        for _ in range(rng.randint(1, most)):
            scope = rng.choice(["device", "device", "node", "mesh"])
            size = {"device": 1, "node": per_node, "mesh": devices}[scope]
            parts = rng.choice([1, 1, 2]) if scope == "device" else 1
            even = rng.random() < 0.7
            count = size * parts
            column = [
                (rng.choice([1.0, 2.0, rng.random() * 4]), rng.randint(0, 9), rng.choice([0, 0, rng.randint(0, 9)])) for _ in range(count)
            ]
            seconds, hbm, host = zip(*([column[0]] * count if even else column))
            options.append(Option("any", seconds, tuple(map(float, hbm)), tuple(map(float, host)), scope))
        found.append(Table(f"t{i}", options=tuple(options)))
    return found


def ways(option: Option, devices: int, per_node: int) -> list[list[int]]:
    """The devices of every shard, every way."""
    size = {"device": 1, "node": per_node, "mesh": devices}[option.scope]
    groups = [list(range(k * size, (k + 1) * size)) for k in range(devices // size)]
    return [sum(some, []) for some in itertools.product(groups, repeat=option.num_shards // size)]


def loads(tables, chosen, devices, per_node):
    """(seconds per device, hbm per device, host bytes per host) of [(option index, devices of its shards)] per table."""
    seconds, hbm, host = [0.0] * devices, [0.0] * devices, [0.0] * (devices // per_node)
    for table, (j, on) in zip(tables, chosen):
        option = table.options[j]
        for d, s, x, y in zip(on, option.seconds, option.hbm_bytes, option.host_bytes):
            seconds[d] += s
            hbm[d] += x
            host[d // per_node] += y
    return seconds, hbm, host


def enumerated(tables, devices, per_node, hbm_limit, host_limit) -> float:
    """Seconds of the slowest device of the best plan, by looking at all; inf where none fits."""
    best = math.inf
    listed = [[(j, on) for j, option in enumerate(table.options) for on in ways(option, devices, per_node)] for table in tables]

    def descend(t, seconds, hbm, host):
        nonlocal best
        if max(seconds) >= best:
            return
        if t == len(tables):
            best = max(seconds)
            return
        for j, on in listed[t]:
            option = tables[t].options[j]
            s, x, y = seconds[:], hbm[:], host[:]
            for d, a, b, c in zip(on, option.seconds, option.hbm_bytes, option.host_bytes):
                s[d] += a
                x[d] += b
                y[d // per_node] += c
            if max(x) <= hbm_limit and max(y) <= host_limit:
                descend(t + 1, s, x, y)

    descend(0, [0.0] * devices, [0.0] * devices, [0.0] * (devices // per_node))
    return best
