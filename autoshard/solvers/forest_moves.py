"""The moves of simulated annealing (annealing.py), compiled: all nodes of a forest change at once.

    block     nodes grown at random around a centre; a node is added only if the block stays a forest         -> grow
    unary     v(i) = c_v[i] + sum over neighbours outside of T[i, x_n] - T Gumbel(i)                          -> price_alone
              + sum over rows r of y_r bytes[i, r]
    x'        argmin over the block of unaries and tables, by dynamic programming from the leaves            -> decide
    accepted  if it fits, with probability exp(-(cost(x') - cost(x)) / T)                                     -> walk
Noise of the Gumbel distribution on the unaries makes the minimiser a sample of about exp(-cost / T) (Papandreou and Yuille 2011). If x'
doesn't fit, the prices of the rows that it exceeds are raised and the block is decided again: moves that fit are free, others pay.
"""

import math
from typing import NamedTuple

import numpy as np

from .compiling import compiled

ATTEMPTS = 5  # at raising prices until a block fits
RAISE = 1.5  # of the price of a row that is exceeded


class EdgeGraph(NamedTuple):
    """Costs and tables in the arrays of Messages, and per node the bytes of its choices at the rows at which it holds any."""

    first: np.ndarray
    costs: np.ndarray
    start: np.ndarray
    neighbour: np.ndarray
    table: np.ndarray
    pool: np.ndarray
    row_start: np.ndarray  # per node, into row
    row: np.ndarray
    byte_start: np.ndarray  # per node, into bytes: choice by row
    bytes: np.ndarray


@compiled
def total_cost(g, x):  # pragma: no cover
    cost = 0.0
    for v in range(len(x)):
        cost += g.costs[g.first[v] + x[v]]
        for h in range(g.start[v], g.start[v + 1]):
            q = g.neighbour[h]
            if q > v:
                cost += g.pool[g.table[h] + x[v] * (g.first[q + 1] - g.first[q]) + x[q]]
    return cost


@compiled
def add_bytes(g, v, choice, sign, load):  # pragma: no cover
    n = g.row_start[v + 1] - g.row_start[v]
    at = g.byte_start[v] + choice * n
    for k in range(n):
        load[g.row[g.row_start[v] + k]] += sign * g.bytes[at + k]


@compiled
def root_of(parent, v):  # pragma: no cover
    while parent[v] >= 0:
        v = parent[v]
    return v


@compiled
def grow(g, rng, size, stamp, seen, inside, touched, parent, block, queue):  # pragma: no cover
    """Fill block with nodes around a random one, each with its parent; returns how many."""
    waiting, count = 1, 0
    centre = int(rng.random() * len(parent))
    queue[0] = centre
    seen[centre] = stamp
    while waiting > 0 and count < size:
        k = int(rng.random() * waiting)
        v = queue[k]
        waiting -= 1
        queue[k] = queue[waiting]
        tree = True
        for h in range(g.start[v], g.start[v + 1]):  # no two neighbours in the same tree
            if inside[g.neighbour[h]]:
                root = root_of(parent, g.neighbour[h])
                tree = tree and touched[root] != v
                touched[root] = v
        if tree:
            for h in range(g.start[v], g.start[v + 1]):  # v becomes the root of every tree that it touches
                a, above = g.neighbour[h], v
                while inside[g.neighbour[h]] and a >= 0:
                    next_up = parent[a]
                    parent[a] = above
                    above, a = a, next_up
            inside[v] = True
            block[count] = v
            count += 1
        for h in range(g.start[v], g.start[v + 1]):
            touched[root_of(parent, g.neighbour[h])] = -1
            if seen[g.neighbour[h]] != stamp:
                seen[g.neighbour[h]] = stamp
                queue[waiting] = g.neighbour[h]
                waiting += 1
    return count


@compiled
def parents_first(g, block, count, inside, parent, order, link):  # pragma: no cover
    """Order the block from the roots; link[v] is the half-edge from v to its parent."""
    done = 0
    for k in range(count):
        if parent[block[k]] < 0:
            order[done] = block[k]
            done += 1
    head = 0
    while head < done:
        v = order[head]
        head += 1
        for h in range(g.start[v], g.start[v + 1]):
            if inside[g.neighbour[h]] and parent[g.neighbour[h]] == v:
                order[done] = g.neighbour[h]
                done += 1
    for k in range(count):
        v = order[k]
        for h in range(g.start[v], g.start[v + 1]):
            if g.neighbour[h] == parent[v]:
                link[v] = h


@compiled
def price_alone(g, rng, order, count, inside, x, temperature, alone, noise):  # pragma: no cover
    """Costs of the block's choices while the nodes outside keep theirs, and the noise that makes the minimiser a sample."""
    operations = 0
    for k in range(count):
        v = order[k]
        f, n = g.first[v], g.first[v + 1] - g.first[v]
        for i in range(n):
            alone[f + i] = g.costs[f + i]
            noise[f + i] = -temperature * math.log(-math.log(1e-300 + rng.random()))
        for h in range(g.start[v], g.start[v + 1]):
            q = g.neighbour[h]
            if not inside[q]:
                at, width = g.table[h] + x[q], g.first[q + 1] - g.first[q]
                for i in range(n):
                    alone[f + i] += g.pool[at + i * width]
        operations += (20 + g.start[v + 1] - g.start[v]) * n
    return operations


@compiled
def decide(g, order, count, parent, link, price, alone, noise, total, y):  # pragma: no cover
    """Set y to the cheapest choices of the block, noise and priced bytes included."""
    operations = 0
    for k in range(count):
        v = order[k]
        f, n = g.first[v], g.first[v + 1] - g.first[v]
        num_rows = g.row_start[v + 1] - g.row_start[v]
        for i in range(n):
            cost = alone[f + i] - noise[f + i]
            for r in range(num_rows):
                cost += price[g.row[g.row_start[v] + r]] * g.bytes[g.byte_start[v] + i * num_rows + r]
            total[f + i] = cost
        operations += n * num_rows
    for k in range(count - 1, -1, -1):
        v = order[k]
        p = parent[v]
        if p < 0:
            continue
        f, n, above, m = g.first[v], g.first[v + 1] - g.first[v], g.first[p], g.first[p + 1] - g.first[p]
        at = g.table[link[v]]
        for j in range(m):
            least = np.inf
            for i in range(n):
                value = total[f + i] + g.pool[at + i * m + j]
                least = value if value < least else least
            total[above + j] += least
        operations += n * m
    for k in range(count):
        v = order[k]
        p = parent[v]
        f, n = g.first[v], g.first[v + 1] - g.first[v]
        best, least = 0, np.inf
        for i in range(n):
            value = total[f + i]
            if p >= 0:
                value += g.pool[g.table[link[v]] + i * (g.first[p + 1] - g.first[p]) + y[p]]
            if value < least:
                best, least = i, value
        y[v] = best
    return operations


@compiled
def difference(g, order, count, parent, link, alone, x, y):  # pragma: no cover
    """The extra cost of the block's choices y over x."""
    more = 0.0
    for k in range(count):
        v = order[k]
        p = parent[v]
        more += alone[g.first[v] + y[v]] - alone[g.first[v] + x[v]]
        if p >= 0:
            at, m = g.table[link[v]], g.first[p + 1] - g.first[p]
            more += g.pool[at + y[v] * m + y[p]] - g.pool[at + x[v] * m + x[p]]
    return more


@compiled
def walk(g, limit, prices, x, best, hot, cold, largest, spread, operations, rng):  # pragma: no cover
    """Cool from hot to cold within `operations`. x moves, best keeps the cheapest; returns its cost and the number of moves."""
    num_nodes, num_rows = len(x), len(prices)
    seen, touched = np.zeros(num_nodes, np.int64), np.full(num_nodes, -1)
    parent, link = np.full(num_nodes, -1), np.zeros(num_nodes, np.int64)
    inside = np.zeros(num_nodes, np.bool_)
    block, queue, order = np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int64), np.empty(num_nodes, np.int64)
    alone, noise, total = np.zeros(len(g.costs)), np.zeros(len(g.costs)), np.zeros(len(g.costs))
    load, held, price = np.zeros(num_rows), np.zeros(num_rows), np.zeros(num_rows)
    y = x.copy()
    for v in range(num_nodes):
        add_bytes(g, v, x[v], 1.0, load)
    cost = total_cost(g, x)
    cheapest = total_cost(g, best)
    used, stamp = 0, 0
    while used < operations:
        stamp += 1
        temperature = hot * (cold / hot) ** (used / operations)
        size = int(math.exp(rng.random() * math.log(largest + 1.0)))
        count = grow(g, rng, size, stamp, seen, inside, touched, parent, block, queue)
        parents_first(g, block, count, inside, parent, order, link)
        used += 100 + num_rows + 4 * count + price_alone(g, rng, order, count, inside, x, temperature, alone, noise)
        for k in range(count):
            add_bytes(g, order[k], x[order[k]], -1.0, load)
        scale = math.exp(spread * rng.standard_normal())
        highest = 0.0
        for r in range(num_rows):
            price[r] = scale * prices[r]
            highest = max(highest, price[r])
        fits = False
        for _ in range(ATTEMPTS):
            used += decide(g, order, count, parent, link, price, alone, noise, total, y)
            fits = True
            held[:] = load
            for k in range(count):
                add_bytes(g, order[k], y[order[k]], 1.0, held)
            for r in range(num_rows):
                if held[r] > limit:
                    fits = False
                    price[r] = price[r] * RAISE + 1e-3 * highest
            if fits:
                break
        more = difference(g, order, count, parent, link, alone, x, y) if fits else np.inf
        accepted = more <= -temperature * math.log(1e-300 + rng.random())
        for k in range(count):
            v = order[k]
            if accepted:
                x[v] = y[v]
            else:
                y[v] = x[v]
                add_bytes(g, v, x[v], 1.0, load)
            inside[v] = False
            parent[v] = -1
        if accepted:
            load[:] = held
            cost += more
            if cost < cheapest:
                cheapest = cost
                best[:] = x
    return cheapest, stamp
