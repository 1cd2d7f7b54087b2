"""benchmarks/calibration.py: its table fits 80 columns, however many systems were measured, and shows each of them."""

from benchmarks.calibration import table


def rows_of(num):
    errors = {"gmae": 1.23456, "mean": 0.987654}
    systems = {f"system-{k:03d}-of-a-long-name": errors for k in range(num)}
    return [{"what": "held out, pooled, strict", "points": 123456, "failures": 1234, "systems": systems, **errors} for _ in range(13)]


def test_the_table_of_many_systems_fits_80_columns():
    for num in (1, 60):
        lines = table(rows_of(num))
        assert max(map(len, lines)) <= 80
        assert sum(line.count("123.46 / 98.77") for line in lines) == 13 * (num + 1)  # each method for all, and for each system
