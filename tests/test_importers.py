"""Importers: small files in the formats of the tools, and every bad input as one sentence."""

from pathlib import Path

import numpy as np
import pytest

from autoshard.calibrate.importers import known, parse
from tests.helpers_models import refusal

DATA = Path(__file__).parent / "data" / "collectives"


def read(name, **given):
    return parse((DATA / name).read_text(), name, **given)


def test_nccl_tests():
    (s,) = read("nccl_tests_all_reduce.txt")
    assert (s.collective, s.devices, s.nodes, s.dtype, len(s.sizes)) == ("all_reduce", 8, 1, "half", 21)
    wanted = "all_reduce on a100_sxm@nccl-2.27.3, 8 devices, half"
    twin = next(m for m in read("measured.csv") if m.name == wanted)
    assert s.sizes == twin.sizes
    np.testing.assert_allclose(s.seconds, twin.seconds, atol=0.006e-6)  # printed to 0.01 us


def test_nccl_tests_of_two_nodes_and_two_collectives_in_one_file():
    text = (DATA / "nccl_tests_all_reduce.txt").read_text()
    text += text.replace("all_reduce_perf", "all_gather_perf").replace("on      node0 device  4", "on      node1 device  4")
    first, second = parse(text, "both.txt")
    assert (first.collective, first.devices, first.nodes) == ("all_reduce", 8, 1)
    assert (second.collective, second.devices, second.nodes) == ("all_gather", 8, 2)


def test_param_comms():
    (s,) = read("all_to_all_4.txt")
    assert (s.collective, s.devices, s.sizes[0], len(s.sizes)) == ("all_to_all", 4, 512.0, 21)
    # the reader adds 4e-4 GB/s, as published


def test_param_general_all_to_allv_is_the_mean_over_ranks():
    (s,) = read("general_all_to_allv_4.txt")
    assert (s.collective, s.devices, len(s.sizes)) == ("all_to_allv", 4, 4)
    assert s.seconds[0] == pytest.approx((36.90 + 38.95 + 41.00 + 43.05) / 4 * 1e-6)


def test_nnscaler():
    found = {s.collective: s for s in read("intra_2.json")}
    assert set(found) == {"all_gather", "all_reduce", "reduce_scatter", "all_to_all"}
    assert found["all_reduce"].devices == 2
    assert found["all_reduce"].sizes[0] == 2**18 and found["all_reduce"].seconds[0] == pytest.approx(97.346e-6, rel=1e-4)
    assert found["all_to_all"].sizes[0] == 2**17  # its size is all ranks' together


def test_csv():
    found = read("measured.csv")
    assert len(found) == 52 and {s.source for s in found} == {"aiconfigurator", "nnscaler"}
    assert found[0].name == "all_gather on a100_sxm@nccl-2.27.3, 2 devices, half"


def test_csv_units_are_in_the_names_of_columns():
    (s,) = parse("op,num_gpus,size_mib,time_ms\nAllReduce,8,1,0.5\nAllReduce,8,2,0.75\n", "x.csv")
    assert (s.collective, s.sizes, s.seconds) == ("all_reduce", (2.0**20, 2.0**21), (5e-4, 7.5e-4))


def test_rows_that_were_not_measured_are_left_out():
    (s,) = parse("collective,gpus,size_bytes,latency_us,kind\nreduce,2,8,5,measured\nreduce,2,9,5,interpolated\n", "x.csv")
    assert s.sizes == (8.0,)


def test_mixed_collectives_become_a_curve_each():
    text = "collective,gpus,size_bytes,latency_us\nall_reduce,2,16,5\nall_gather,2,16,5\nall_reduce,2,8,4\n"
    first, second = parse(text, "x.csv")
    assert (first.sizes, second.sizes) == ((16.0, 8.0), (16.0,))


@pytest.mark.parametrize("written", ["all_reduce_perf", "AllReduce", "all-reduce", "all reduce", "ALLREDUCE"])
def test_names_of_others(written):
    assert known(written, "x") == "all_reduce"


HEADER = "collective,gpus,size_bytes,latency_us\n"
NCCL = "#  size count type redop root time algbw busbw #wrong\n"


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("", "x.csv", "x.csv is empty"),
        ("hello\n", "x.txt", "x.txt has the columns hello; expected one of size_bytes"),
        (HEADER, "x.csv", "x.csv holds no measurements"),
        (HEADER + "all_reduce,8,1024,nan\n", "x.csv", "x.csv:2: latency_us is 'nan'; expected a number"),
        (HEADER + "all_reduce,8,1024,5\nall_reduce,8,2048,0\n", "x.csv", "x.csv:3: time is 0 s"),
        (HEADER + "all_reduce,8,1024,-1\n", "x.csv", "x.csv:2: time is -1e-06 s"),
        (HEADER + "all_reduce,8,1024,1e300\n", "x.csv", "x.csv:2: time is 1e+294 s"),
        (HEADER + "all_reduce,8,1024,1e-300\n", "x.csv", "x.csv:2: time is 1e-306 s"),
        (HEADER + "all_reduce,8,1e300,5\n", "x.csv", "x.csv:2: size is 1e+300 bytes"),
        (HEADER + "all_reduce,8,0,1\n", "x.csv", "x.csv:2: size is 0 bytes"),
        (HEADER + "all_reduce,8,1024,\n", "x.csv", "x.csv:2: latency_us is ''; expected a number"),
        (HEADER + "all_reduce,8,1024\n", "x.csv", "x.csv:2: latency_us is ''"),
        (HEADER + "all_reduce,1.5,1024,1\n", "x.csv", "1.5 devices on 1 nodes; expected whole numbers"),
        (HEADER + "all_reduce,0,1024,1\n", "x.csv", "0 devices on 1 nodes can't be"),
        (HEADER + "everything,8,1024,1\n", "x.csv", "the collective is 'everything'; expected one of all_gather"),
        ("size_bytes,latency_us\n8,1\n", "x.csv", "x.csv does not say its collective"),
        ("size_bytes,latency_us\n8,1\n", "all_reduce.csv", "all_reduce.csv does not say its number of devices"),
        ('{"all gather": [[1, 2], [3]]}', "intra_2.json", "'all gather' holds something else"),
        ('{"all gather": [[1, 2], [3, "x"]]}', "intra_2.json", "has 2, 'x' in place 2; expected numbers"),
        ('{"all gather": [[1], [0.0]]}', "intra_2.json", "time is 0 s"),
        ('{"all gather"', "intra_2.json", "intra_2.json ends early"),
        ("[]", "intra_2.json", "holds a list; expected"),
        ('{"matmul": [[1], [1]]}', "intra_2.json", "a key is 'matmul'"),
        ('{"all gather": [[1], [1.0]]}', "intra.json", "does not say its number of devices"),
        (NCCL + "1024 256 float sum -1 5.0 1.0\n", "all_reduce_8.txt", "all_reduce_8.txt:2: 7 words under 9 columns; the line is cut off"),
        (NCCL + "1024 256 float sum -1 N/A 1.0 1.0 0\n", "all_reduce_8.txt", "time is 'N/A'; expected a number"),
        (NCCL + "1024 256 float sum -1 5.0 1.0 1.0 0\n", "x_8.txt", "does not say its collective"),
        ("COMMS-RES size\nCOMMS-RES 1024 256\n", "all_reduce_8.txt", "all_reduce_8.txt:2: 3 words; expected COMMS-RES"),
        ("COMMS-RES size\nCOMMS-RES 1024 256 5.0 5.0 1.0 1.0\n", "x.txt", "does not say its collective"),
    ],
)
def test_bad_input_is_one_sentence(text, name, sentence):
    assert sentence in refusal(parse, text, name)


def test_what_the_caller_says_overrules_the_file():
    (s,) = parse("size_bytes,latency_us\n8,1\n16,2\n", "x.csv", collective="AllGather", devices=4, system="ours")
    assert (s.collective, s.devices, s.system) == ("all_gather", 4, "ours")
    with pytest.raises(ValueError, match="the collective given for x.csv is 'shout'"):
        parse("size_bytes,latency_us\n8,1\n", "x.csv", collective="shout", devices=4)
