"""Local search over options and places of tables: compiled simulated annealing.

    E = sum over d of ( (seconds_d / T - 1)+ )^2  +  w ( sum over d of (hbm_d - limit_d)+ / H  +  sum over h of (host_h - limit_h)+ / H' )

T = a target that no plan reaches, so that every highly loaded device counts; H, H' = the largest limits; w = the multiplier of memory
above a limit, raised while the plan does not fit. A state that fits and whose slowest device is faster than the best state's is kept.
A move changes one table (another option, or another place for one of its parts), or swaps the places of two parts.            -> anneal
"""

import math
from typing import NamedTuple

import numpy as np

from autoshard.solvers import compiled
from autoshard.tables.arrays import TablesInstance

NEAR = 3  # places that are drawn for a part, at most; the one of least E is chosen
SWAPS, OPTIONS = 0.45, 0.2  # of the moves; the others move one part
SLICE = 2**17  # moves between looks for Ctrl-C: a fraction of a second
RECOUNT = 8192  # moves between recomputations of the sums, which accumulate rounding errors
STRICTER = 1.15  # factor of w after RECOUNT moves without a plan that fits


class State(NamedTuple):
    """A choice and its sums (`recount`)."""

    option: np.ndarray  # (tables,): numbered over all tables
    place: np.ndarray  # (tables, most parts): of each part of the option, a device, a node, or 0
    seconds: np.ndarray  # per device
    hbm: np.ndarray
    host: np.ndarray  # per host


class Scale(NamedTuple):
    """The units of the terms of E."""

    T: float  # seconds
    hbm: float  # bytes, over w
    host: float


class Annealed(NamedTuple):
    """How far annealing is."""

    hbm: float  # bytes, over w: of the scale
    host: float
    slowest: float  # seconds of the best plan
    temperature: float
    fitted: bool  # whether a plan fit since the sums were last recomputed
    moves: int  # that have been made


@compiled
def part_change(instance, scale, state, part, place, size, sign):  # pragma: no cover
    """The change of E when a part is added at a place (sign 1) or removed from it (-1)."""
    delta, more, first = 0.0, 0.0, instance.first_shard[part]
    for s in range(size):
        d = place * size + s
        before, after = state.seconds[d] / scale.T - 1.0, (state.seconds[d] + sign * instance.seconds[first + s]) / scale.T - 1.0
        if before > 0.0:
            delta -= before * before
        if after > 0.0:
            delta += after * after
        over = state.hbm[d] - instance.hbm_limit[d]
        delta += (max(over + sign * instance.hbm[first + s], 0.0) - max(over, 0.0)) / scale.hbm
        more += sign * instance.host[first + s]
        if s + 1 == size or instance.host_of[d + 1] != instance.host_of[d]:
            if more != 0.0:
                over = state.host[instance.host_of[d]] - instance.host_limit[instance.host_of[d]]
                delta += (max(over + more, 0.0) - max(over, 0.0)) / scale.host
            more = 0.0
    return delta


@compiled
def add_part(instance, state, part, place, size, sign):  # pragma: no cover
    first = instance.first_shard[part]
    for s in range(size):
        d = place * size + s
        state.seconds[d] += sign * instance.seconds[first + s]
        state.hbm[d] += sign * instance.hbm[first + s]
        state.host[instance.host_of[d]] += sign * instance.host[first + s]


@compiled
def change_part(instance, scale, state, part, place, size, sign):  # pragma: no cover
    """Add or remove a part; returns the change of E."""
    delta = part_change(instance, scale, state, part, place, size, sign)
    add_part(instance, state, part, place, size, sign)
    return delta


@compiled
def add_parts(instance, state, table):  # pragma: no cover
    """Add a table with its option at its places to the sums."""
    option = state.option[table]
    for k in range(instance.first_part[option + 1] - instance.first_part[option]):
        add_part(instance, state, instance.first_part[option] + k, state.place[table, k], instance.size[option], 1.0)


@compiled
def recount(instance, state):  # pragma: no cover
    """Recompute the sums, table by table; returns the slowest device's seconds, inf where a limit is exceeded."""
    state.seconds[:] = 0.0
    state.hbm[:] = 0.0
    state.host[:] = 0.0
    for table in range(len(state.option)):
        add_parts(instance, state, table)
    if fits(instance, state):
        return state.seconds.max()
    return np.inf


@compiled
def fits(instance, state):  # pragma: no cover
    for d in range(len(state.hbm)):
        if state.hbm[d] > instance.hbm_limit[d]:
            return False
    for h in range(len(state.host)):
        if state.host[h] > instance.host_limit[h]:
            return False
    return True


@compiled
def best_place(instance, scale, state, part, size, draws, rng):  # pragma: no cover
    """The place with the least change of E among `draws` random ones, or among all if there are no more; (place, change of E)."""
    places = len(instance.hbm_limit) // size
    every = places <= draws
    chosen, best = 0, np.inf
    for k in range(places if every else draws):
        place = k if every else int(rng.random() * places)
        change = part_change(instance, scale, state, part, place, size, 1.0)
        if change < best:
            chosen, best = place, change
    return chosen, best


@compiled
def add_table(instance, scale, state, table, option, draws, rng):  # pragma: no cover
    """Place a table that has no place, with an option, part by part; returns the change of E."""
    state.option[table], size, delta = option, instance.size[option], 0.0
    for k in range(instance.first_part[option + 1] - instance.first_part[option]):
        part = instance.first_part[option] + k
        place, change = best_place(instance, scale, state, part, size, draws, rng)
        state.place[table, k] = place
        add_part(instance, state, part, place, size, 1.0)
        delta += change
    return delta


@compiled
def remove_table(instance, scale, state, table):  # pragma: no cover
    """Remove a table from its places; returns the change of E."""
    option, delta = state.option[table], 0.0
    size = instance.size[option]
    for k in range(instance.first_part[option + 1] - instance.first_part[option]):
        part = instance.first_part[option] + k
        delta += change_part(instance, scale, state, part, state.place[table, k], size, -1.0)
    return delta


@compiled
def change_option(instance, scale, state, table, option, threshold, old, rng):  # pragma: no cover
    """Place a table again with another option; undone, and 0 returned, where E grows by more than the threshold."""
    before = state.option[table]
    old[:] = state.place[table]
    delta = remove_table(instance, scale, state, table)
    delta += add_table(instance, scale, state, table, option, 1 + int(rng.random() * NEAR), rng)
    if delta <= threshold:
        return delta
    remove_table(instance, scale, state, table)
    state.option[table] = before
    state.place[table] = old
    add_parts(instance, state, table)
    return 0.0


@compiled
def move_part(instance, scale, state, table, threshold, rng):  # pragma: no cover
    """Move one part of a table to another place; undone like `change_option`."""
    option = state.option[table]
    if instance.scope[option] == 2:
        return 0.0
    size = instance.size[option]
    k = int(rng.random() * (instance.first_part[option + 1] - instance.first_part[option]))
    part, before = instance.first_part[option] + k, state.place[table, k]
    delta = change_part(instance, scale, state, part, before, size, -1.0)
    place, change = best_place(instance, scale, state, part, size, 1 + int(rng.random() * NEAR), rng)
    if place == before or delta + change > threshold:
        add_part(instance, state, part, before, size, 1.0)
        return 0.0
    state.place[table, k] = place
    add_part(instance, state, part, place, size, 1.0)
    return delta + change


@compiled
def swap_parts(instance, scale, state, a, b, threshold, rng):  # pragma: no cover
    """Exchange the places of a part of table a and a part of table b on as many devices; undone like `change_option`."""
    option_a, option_b = state.option[a], state.option[b]
    if a == b or instance.scope[option_a] == 2 or instance.scope[option_a] != instance.scope[option_b]:
        return 0.0
    size = instance.size[option_a]
    i = int(rng.random() * (instance.first_part[option_a + 1] - instance.first_part[option_a]))
    j = int(rng.random() * (instance.first_part[option_b + 1] - instance.first_part[option_b]))
    part_a, part_b = instance.first_part[option_a] + i, instance.first_part[option_b] + j
    at_a, at_b = state.place[a, i], state.place[b, j]
    if at_a == at_b:
        return 0.0
    delta = change_part(instance, scale, state, part_a, at_a, size, -1.0)
    delta += change_part(instance, scale, state, part_b, at_b, size, -1.0)
    delta += change_part(instance, scale, state, part_a, at_b, size, 1.0)
    delta += part_change(instance, scale, state, part_b, at_a, size, 1.0)
    if delta > threshold:
        add_part(instance, state, part_a, at_b, size, -1.0)
        add_part(instance, state, part_a, at_a, size, 1.0)
        add_part(instance, state, part_b, at_b, size, 1.0)
        return 0.0
    add_part(instance, state, part_b, at_a, size, 1.0)
    state.place[a, i], state.place[b, j] = at_b, at_a
    return delta


@compiled
def anneal_slice(instance, T, so_far, allowed, start, state, best, low, hot, cold, moves, rng):  # pragma: no cover
    """Make the next SLICE of `moves` moves, while the temperature falls from hot to cold; `best` receives every plan that takes less than
    all before it.

    allowed[start[t]:start[t + 1]] = the options of table t. low: a lower bound on any plan's seconds. so_far and the result: the fields of
    `Annealed`. (A named tuple is created by Python code, in which Ctrl-C may arrive: compiled code dies of that.)
    """
    hbm, host, slowest, temperature, fitted, done = so_far
    scale = Scale(T, hbm, host)
    num_tables = len(state.option)
    old = np.empty(state.place.shape[1], dtype=np.int64)
    cooling = (cold / hot) ** (1.0 / max(moves, 1))
    if done == 0:
        recount(instance, state)
        temperature = hot
    end = min(done + SLICE, moves)
    for move in range(done, end):
        temperature *= cooling
        if move % RECOUNT == RECOUNT - 1:
            recount(instance, state)
            if not fitted:
                scale = Scale(scale.T, scale.hbm / STRICTER, scale.host / STRICTER)
            fitted = False
        table = int(rng.random() * num_tables)
        threshold = -temperature * math.log(max(rng.random(), 1e-300))
        kind = rng.random()
        if kind < SWAPS:
            delta = swap_parts(instance, scale, state, table, int(rng.random() * num_tables), threshold, rng)
        elif kind < SWAPS + OPTIONS:
            option = allowed[start[table] + int(rng.random() * (start[table + 1] - start[table]))]
            if option == state.option[table]:
                continue
            delta = change_option(instance, scale, state, table, option, threshold, old, rng)
        else:
            delta = move_part(instance, scale, state, table, threshold, rng)
        if delta < 0.0 and state.seconds.max() < slowest and fits(instance, state):
            fitted = True
            seconds = recount(instance, state)
            if seconds < slowest:
                slowest = seconds
                best.option[:] = state.option
                best.place[:] = state.place
                if seconds <= low:
                    end = moves
                    break
        elif delta != 0.0 and not fitted and move % 64 == 0:
            fitted = fits(instance, state)
    return scale.hbm, scale.host, slowest, temperature, fitted, end


@compiled
def pack(instance, scale, state, order, option):  # pragma: no cover
    """Place every table with its option, in the given order, each part where E grows least, and among equals where the load is least."""
    state.seconds[:] = 0.0
    state.hbm[:] = 0.0
    state.host[:] = 0.0
    for table in order:
        o = option[table]
        state.option[table] = o
        size = instance.size[o]
        for k in range(instance.first_part[o + 1] - instance.first_part[o]):
            part = instance.first_part[o] + k
            best, best_load, chosen = np.inf, np.inf, 0
            for place in range(len(instance.hbm_limit) // size):
                change = part_change(instance, scale, state, part, place, size, 1.0)
                load = state.seconds[place * size : place * size + size].max()
                if change < best - 1e-12 or (change < best + 1e-12 and load < best_load):
                    best, best_load, chosen = change, load, place
            state.place[table, k] = chosen
            add_part(instance, state, part, chosen, size, 1.0)


def empty_state(instance: TablesInstance) -> State:
    n, parts = instance.num_tables, max(instance.most_parts, 1)
    return State(
        np.zeros(n, dtype=np.int64), np.zeros((n, parts), dtype=np.int64),
        np.zeros(instance.num), np.zeros(instance.num), np.zeros(len(instance.host_limit)),
    )  # fmt: skip
