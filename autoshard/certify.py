"""Checks a certificate from its numbers alone: what a plan costs, and that no plan costs less than its bound. Needs numpy, nothing else.

    python certify.py NUMBERS.json

    cost    sum of nodes[v][x_v] + sum of edges[k][x_a, x_b]                       at the choice x; its bytes at every time <= limit
    bound   for any prices y_t >= 0 per byte and any shifts s of the edges, no choice that fits costs less than

            sum over nodes v of  min_i   nodes[v][i] + y bytes - sum over the edges at v of s[i]
          + sum over edges k of  min_ij  edges[k][i, j] + y bytes + s_a[i] + s_b[j]                    - limit * sum of y

Why: what a shift takes from a node it adds to its edge, so the total of a choice is its cost, plus y (bytes - limit) <= 0; and each part is
at least its minimum. `null` is infinite: forbidden. Pairs with a forbidden choice count as forbidden.
"""

import json
import math
import sys

import numpy as np

FORMAT = "autoshard.certificate/1"
ROUNDING = 1e-9  # relative to the cost: sums of floats in another order


def arrays_of(record: dict) -> list[np.ndarray]:
    """The pool of arrays that nodes, edges and usages share. ValueError for what is no number, or less than all numbers."""
    pool = [np.array([math.inf if x is None else x for x in a["values"]], float).reshape(a["shape"]) for a in record["arrays"]]
    if any(not (a > -math.inf).all() for a in pool):
        raise ValueError("an array of the certificate has nan or -inf; expected numbers, or null where a choice is forbidden")
    return pool


def certify(record: dict) -> dict:
    """{"ok", "wrong": [sentences], "cost", "bound", "peak"}: what the numbers give, and which claims of the record they refute."""
    if record.get("format") != FORMAT:
        raise ValueError(f"the file has the format {record.get('format')!r}; expected {FORMAT!r}, as `autoshard certify --out` writes it")
    try:
        return _certified(record)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"the certificate lacks or breaks a part ({type(error).__name__}: {error}); write it again") from None


def _certified(record: dict) -> dict:
    pool = arrays_of(record)
    nodes = [pool[k] for k in record["nodes"]]
    edges = [(a, b, pool[k]) for a, b, k in record["edges"]]
    usages = [(start, end, edge, ends, pool[k]) for start, end, edge, ends, k in record["usages"]]
    x, limit = record["choice"], math.inf if record["limit"] is None else record["limit"]
    cost = math.fsum([float(c[i]) for c, i in zip(nodes, x, strict=True)] + [float(t[x[a], x[b]]) for a, b, t in edges])
    peak = peak_of(usages, x)
    bound = bound_of(nodes, edges, usages, limit, record["prices"], [(pool[a], pool[b]) for a, b in record["shifts"]])
    slack, claimed, wrong = ROUNDING * abs(cost), record["claims"], []
    if not abs(claimed["cost"] - cost) <= slack:
        wrong.append(f"the choice costs {cost!r}, not {claimed['cost']!r}")
    if not peak <= limit * (1 + ROUNDING):
        wrong.append(f"the choice takes {peak:.6g} bytes, more than the limit of {limit:.6g}")
    if not claimed["bound"] <= bound + slack:
        wrong.append(f"the prices and shifts prove a bound of {bound!r}, less than {claimed['bound']!r}")
    if not bound <= cost + slack:
        wrong.append(f"the bound {bound!r} is above the cost {cost!r}, so that the numbers contradict each other")
    return {"ok": not wrong, "wrong": wrong, "cost": cost, "bound": min(claimed["bound"], bound), "peak": peak}


def peak_of(usages: list, x: list) -> float:
    """The most bytes in use at a time; they can grow only where a usage starts."""
    held = np.array([float(b[tuple(x[v] for v in ends)]) for _, _, _, ends, b in usages])
    start, end = (np.array([u[k] for u in usages], float) for k in (0, 1))
    return max((float(held[(start <= t) & (t < end)].sum()) for t in np.unique(start)), default=0.0)


def bound_of(nodes: list, edges: list, usages: list, limit: float, prices: list, shifts: list) -> float:
    """The formula above. ValueError for a price that is negative, or has no limit to pay for."""
    if any(not y >= 0 for _, y in prices) or (prices and math.isinf(limit)):
        raise ValueError("a price per byte is negative, or there is no limit; expected prices of 0 or more, with a limit")
    nodes, tables, constant = [c.copy() for c in nodes], [t for _, _, t in edges], [-limit * y for _, y in prices]
    for start, end, edge, ends, amount in usages:
        price = math.fsum(y for t, y in prices if start <= t < end)
        if price and edge is not None:
            tables[edge] = tables[edge] + price * amount
        elif price and ends:
            nodes[ends[0]] += price * amount
        elif price:
            constant.append(price * float(amount))
    allowed, waiting = [np.isfinite(c) for c in nodes], list(range(len(edges)))
    readers: list[list[int]] = [[] for _ in nodes]
    for k, (a, b, _) in enumerate(edges):
        readers[a].append(k)
        readers[b].append(k)
    while waiting:  # a choice without any partner is forbidden
        a, b, table = edges[waiting.pop()]
        pairs = np.isfinite(table) & allowed[a][:, None] & allowed[b][None, :]
        for v, kept in ((a, pairs.any(axis=1)), (b, pairs.any(axis=0))):
            if (allowed[v] & ~kept).any():
                allowed[v] = allowed[v] & kept
                waiting += readers[v]
    for (a, b, _), (of_a, of_b) in zip(edges, shifts, strict=True):
        nodes[a] -= of_a
        nodes[b] -= of_b
    least = [float(c[kept].min(initial=math.inf)) for c, kept in zip(nodes, allowed)]
    for (a, b, _), table, (of_a, of_b) in zip(edges, tables, shifts):
        reduced = (table + of_a[:, None] + of_b[None, :])[allowed[a]][:, allowed[b]]
        least.append(float(reduced.min(initial=math.inf)))
    return math.fsum([*least, *constant])


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        answer = certify(json.load(file))
    print(json.dumps(answer))
    sys.exit(0 if answer["ok"] else 1)
