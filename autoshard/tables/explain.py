"""A sentence for each table that explains the choice of its option and its devices."""

import numpy as np

from autoshard.tables.arrays import part_devices
from autoshard.tables.planner import Planner
from autoshard.units import seconds as duration
from autoshard.units import size


def reasons(planner: Planner) -> list[str]:
    """Per table: a comparison of its option with its fastest option, and of its place with the best other place."""
    instance, spots = planner.instance, planner.best
    assert spots is not None
    totals, free, free_host = planner.bound.totals, instance.hbm_limit - spots.hbm, instance.host_limit - spots.host
    sentences = []
    for t, o in enumerate(spots.option.tolist()):
        low, high = instance.first_option[t], instance.first_option[t + 1]
        fastest = low + int(np.argmin(totals.seconds[low:high]))
        place = _on_place(instance, spots, free, free_host, t, o)
        sentences.append(f"{_on_option(totals, o, fastest, high - low)}; {place}")
    return sentences


def _on_option(totals, o: int, fastest: int, count: int) -> str:
    if count == 1:
        return "its only option"
    if totals.seconds[o] <= totals.seconds[fastest]:
        return f"the least work of its {count} options"
    more = f"{duration(float(totals.seconds[o] - totals.seconds[fastest]))} more work than its fastest option"
    saved, saved_host = totals.hbm[fastest] - totals.hbm[o], totals.host[fastest] - totals.host[o]
    if saved > 0:
        return f"{more}, but {size(saved)} less device memory"
    if saved_host > 0:
        return f"{more}, but {size(saved_host)} less host memory"
    if totals.longest[o] < totals.longest[fastest]:
        return f"{more}, but in smaller shards"
    return f"{more}; the search found no better use of the memory"


def _on_place(instance, spots, free, free_host, t: int, o: int) -> str:
    if instance.scope[o] == 2:
        return "one shard on every device"
    shards, place = instance.shards(instance.first_part[o]), int(spots.place[t, 0])
    size = shards.stop - shards.start
    at = part_devices(instance, o, place)
    best, full = None, 0
    for other in range(instance.num // size):
        there = part_devices(instance, o, other)
        if other == place:
            continue
        on = slice(there.start, there.stop)
        host_there = instance.host_of[there.start]
        more_host = instance.host[shards].sum() if host_there != instance.host_of[at.start] else 0.0
        if (instance.hbm[shards] > free[on]).any() or more_host > free_host[host_there]:
            full += 1
            continue
        slowest = float((spots.seconds[on] + instance.seconds[shards]).max())
        if best is None or slowest < best[0]:
            best = slowest, other
    what, here = ("node", place) if instance.scope[o] == 1 else ("device", at.start)
    now = f"{what} {here} takes {duration(float(spots.seconds[at.start : at.stop].max()))}"
    if best is None:
        return f"{now}, the others have no memory free for it" if full else now
    return f"{now}; with it, {what} {best[1]} would take {duration(best[0])}"
