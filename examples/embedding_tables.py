"""Lay the embedding tables of a recommender over two nodes of four devices, and say how good that can be at best.

    python examples/embedding_tables.py

Six tables, from a hundred rows to fifty million, read by ids that are not all alike popular. The figure to make small is the time of
the slowest device, within the memory of each.
"""

import autoshard

TABLES = [  # rows, columns, ids per example
    autoshard.Table("user", 50_000_000, 64),
    autoshard.Table("item", 8_000_000, 128, pooling=20.0, skew=1.1),
    autoshard.Table("category", 20_000, 64, pooling=20.0),
    autoshard.Table("query", 2_000_000, 128, pooling=8.0, skew=0.9),
    autoshard.Table("country", 250, 16),
    autoshard.Table("hour", 24 * 7, 16),
]


def placed(hbm: float = 8e9, host_memory: float | None = None):
    """The plan with so many bytes of memory on each device and on each node's host, a tenth of them kept free."""
    mesh = autoshard.Mesh.from_bandwidths((2, 4), device="a100")
    return autoshard.plan_tables(TABLES, mesh, hbm=hbm, host_memory=host_memory, reserve=0.1, batch=4096)


if __name__ == "__main__":
    plan = placed()
    slowest, bound = plan.slowest_device_seconds * 1e3, plan.bound_seconds * 1e3
    print(f"{plan.status}: the slowest device takes {slowest:.3f} ms, and in no plan less than {bound:.3f} ms")
    for name, got in plan.tables.items():
        print(f"{name:>9}: {got.option.sharding}, devices {sorted(set(got.devices))}\n{'':>11}{got.why}")
    for rank, load in enumerate(plan.devices):
        print(f"device {rank}: {load.seconds * 1e3:.3f} ms, {load.hbm_bytes / 1e9:.2f} GB")
    print("with 1 GB per device:", placed(hbm=1e9).reason)
    small = placed(hbm=1e9, host_memory=64e9)
    print(f"and with 64 GB of memory on each host: {small.slowest_device_seconds * 1e3:.3f} ms")
