"""The page of a launch and what is on it: the launches on the frontier, what other links do, the nearest published run; two launches."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from autoshard.devices import DEVICES, link_of
from autoshard.launch import Launch, LaunchConfig, ModelSizes, Site, check_launch
from autoshard.launch.launch_prices import prices_of
from autoshard.launch.published import nearest, published_runs
from autoshard.launch.ranking import ALIKE, ranking
from autoshard.launch.runs import TrainingRuns
from autoshard.report.launchers import launch_table
from autoshard.report.page_of_launch import SECTIONS, _by_kind, launch_page
from autoshard.report.terminal import as_text
from autoshard.units import seconds, size
from tests.helpers_command import record_of, refusal, run
from tests.helpers_report import HOSTILE, Elements

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data" / "launchers"
LLAMA = DATA / "torchtitan" / "llama3_8b.toml"
TINY = f"{ROOT}/models/llama.py:tiny"
ALONE = ("--launcher", "accelerate", "--seq", "64", "--microbatch", "1")
CONFIGURATIONS = {  # one of each launcher
    "torchtitan": (str(DATA / "torchtitan" / "llama3_405b.toml"), "--devices", "128"),
    "megatron": (str(DATA / "megatron" / "gpt3_175b.sh"), "--devices", "1024"),
    "accelerate": (str(DATA / "accelerate" / "cp.yaml"), f"hf:{ROOT}/tests/data/hf/llama", *ALONE),
    "nanotron": (str(DATA / "nanotron" / "llama3b.yaml"), "--launcher", "nanotron"),
}  # fmt: skip
SMALL = ModelSizes(8, 1024, 4096, 16, 4, 32000)


def problems(text: str) -> list[str]:
    """What axe would say of a page, as far as its elements show it."""
    page = Elements(text)
    ids = Counter(attributes["id"] for _, attributes in page.tags if "id" in attributes)
    labels = Counter(attributes["aria-label"] for _, attributes in page.tags if attributes.get("role") == "region")
    headings = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    links = {attributes["href"][1:] for tag, attributes in page.tags if tag == "a"}
    said = [f"crossed {tag}" for tag in page.crossed] + [f"open {tag}" for tag in page.open]
    said += [f"{name} twice" for name, count in (ids + labels).items() if count > 1]
    said += ["an empty heading of a table"] * len(re.findall(r"<th[^>]*>\s*</th>", text))
    said += [f"h{a} before h{b}" for a, b in zip(headings, headings[1:]) if b > a + 1] + [f"no {name}" for name in links - set(ids)]
    said += [f"{tag} without a name" for tag, of in page.tags if of.get("role") in ("img", "region") and not of.get("aria-label")]
    said += ["a region that no key reaches"] * sum(of.get("role") == "region" and "tabindex" not in of for _, of in page.tags)
    return said


@pytest.mark.parametrize("launcher", CONFIGURATIONS)
def test_check_of_each_launcher_has_its_reasons_and_its_page(launcher, tmp_path):
    out = tmp_path / "page.html"
    record = record_of("check", *CONFIGURATIONS[launcher], "--html", str(out))
    lines = as_text(launch_table(record, CONFIGURATIONS[launcher][0])).splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 100 and any(line.startswith("nearest published run: ") for line in lines)
    assert sum(record["bytes_by_kind"].values()) == pytest.approx(record["memory_bytes"]) and record["changes"]
    for change in record["changes"]:
        assert sum(change["seconds_by_kind"].values()) == pytest.approx(change["seconds"])
        assert sum(change["why"].values()) == pytest.approx(change["seconds"] - record["seconds"])
        assert sum(change["bytes_by_kind"].values()) == pytest.approx(change["memory_bytes"])
        assert sum(change["why_bytes"].values()) == pytest.approx(change["memory_bytes"] - record["memory_bytes"])
        assert list(change["why"].values()) == sorted(change["why"].values(), key=abs, reverse=True)
    text = out.read_text()
    page = Elements(text)
    assert problems(text) == [] and [of["id"] for tag, of in page.tags if tag == "section"] == list(SECTIONS)
    best = record["changes"][0]
    for words in (seconds(record["seconds"]), size(record["memory_bytes"]), best["change"], seconds(best["seconds"]), "tokens/s"):
        assert words in page.text, words
    assert "Ring: this launch" in page.text and record["published"]["source"] in page.text and "://" not in text


def test_fits_and_degrees_have_the_page_too(tmp_path):
    out = tmp_path / "page.html"
    words = ("fits", f"{ROOT}/models/llama.py:llama3_8b", "--devices", "8", "--microbatch", "2", "--recompute", "selective_op")
    fits = record_of(*words, "--html", str(out), code=1)
    page = Elements(out.read_text())
    assert problems(out.read_text()) == [] and "The largest microbatch that surely fits: 1 sequence." in page.text
    assert "Limit memory" in page.text and "fits with a chance of 19 %" in page.text
    for change in fits["changes"]:
        assert change["change"] in page.text and size(change["device_bytes"]) in page.text
        assert sum(change["why_bytes"].values()) == pytest.approx(change["device_bytes"] - fits["fullest"]["device_bytes"])
    record = record_of("degrees", TINY, *"--devices 8 --seq 16 --global-batch 16 --no-bound --row 2".split(), "--html", str(out))
    page, second = Elements(out.read_text()), record["configurations"][1]
    assert problems(out.read_text()) == [] and "llama.py:tiny, launch 2 on 8 h100" in page.text and "The best launches" in page.text
    assert seconds(second["seconds"]) in page.text and "legal launches on 8 h100" in page.text


@pytest.mark.parametrize("memory", ["80GB", "1GB"])
def test_what_can_t_start_and_what_never_fits_have_a_page(memory, tmp_path):
    job, out = tmp_path / "job.toml", tmp_path / "page.html"
    job.write_text(LLAMA.read_text().replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 16"))
    words = (str(job), "--devices", "64", "--memory", memory)
    assert record_of("check", *words, "--html", str(out), code=1)["sensitivity"] == []
    page = Elements(out.read_text())
    assert problems(out.read_text()) == [] and "8 key-value heads do not divide by tp 16" in page.text
    assert ("No launch is likely to fit." in page.text) is (memory == "1GB") and not re.search(r"\b(inf|nan|None)\b", page.text)
    run("fits", *words, "--html", str(out))
    assert problems(out.read_text()) == []


def test_kinds_that_take_nothing_are_left_out():
    text = as_text(_by_kind("seconds", {"matmul": 3.0, "attention": 1.0, "bubble": 0.0}, str))
    assert "matmul" in text and "attention" in text and "together" in text and "bubble" not in text


def test_hostile_names_are_shown_and_change_nothing():
    record = check_launch(LaunchConfig(Launch(8, 2048, 64, data=8, shard=8, zero=3), SMALL), "torchtitan", Site()).to_dict()
    text = launch_page(record, HOSTILE)
    assert problems(text) == [] and text.count("<script") == 1 and "<script>alert(1)</script>" in Elements(text).text


@cache
def sound_page() -> str:
    described = LaunchConfig(Launch(16, 2048, 64, data=2, tensor=4, expert_tensor=4, pipeline=2), SMALL)
    return launch_page(check_launch(described, "megatron", Site()).to_dict(), "job.sh")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('id="time"', 'id="memory"', "memory twice"),
        ('<th scope="col">with</th>', '<th scope="col"></th>', "an empty heading of a table"),
        ("Table: Changes that gain", "Table: Speed against memory", "Table: Speed against memory twice"),
        (' tabindex="0" role="region"', ' role="region"', "a region that no key reaches"),
        ("<h2", "<h4", "h1 before h4"),
        ("</main>", "", "crossed div"),
    ],
)
def test_a_planted_fault_is_found(old, new, said):
    text = sound_page()
    assert old in text and problems(text) == [] and said in problems(text.replace(old, new, 1))


def contrast(a: str, b: str) -> float:
    """WCAG 2: of two colours #rrggbb."""

    def luminance(color: str) -> float:
        parts = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        return float(np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722))

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_is_readable_in_light_and_in_dark():
    assert contrast("#ffffff", "#767676") > 4.5 > contrast("#ffffff", "#777777") and contrast("#000000", "#ffffff") == pytest.approx(21)
    style = (ROOT / "autoshard" / "report" / "templates" / "report.css.j2").read_text()
    for block in (style.split("@media")[0], style.split("prefers-color-scheme: dark")[1].split("* {")[0]):
        colors = {name: "#" + "".join(c * 2 for c in value[1:]) if len(value) == 4 else value
                  for name, value in re.findall(r"--([a-z-]+): (#[0-9a-f]{3,6})\b", block)}  # fmt: skip
        pairs = [(text, back) for text in ("ink", "soft", "accent") for back in ("back", "card")]
        pairs += [("good", "good-soft"), ("open", "open-soft"), ("ink", "good-soft"), ("ink", "open-soft")]
        assert [(text, back) for text, back in pairs if contrast(colors[text], colors[back]) < 4.5] == []


# --- what is on it


@pytest.mark.parametrize("launcher", ["torchtitan", "megatron"])
def test_the_frontier_is_what_no_launch_beats(launcher):
    ranked = ranking(Launch(16, 2048, 64), SMALL, Site(memory=9e9), launcher)
    p, rows = ranked.prices, ranked.frontier(count=10**6)
    few = np.flatnonzero(p.fits)
    assert 3 < len(rows) < len(few) < len(ranked)
    for row in few:  # each launch that is fast enough needs as much memory as one on the frontier that is as fast
        if 2 * p.tokens_per_second[row] > p.tokens_per_second[few].max():
            assert any(
                p.bytes[i] <= p.bytes[row] and (1 + ALIKE) * p.tokens_per_second[i] >= p.tokens_per_second[row] for i in rows
            )  # fmt: skip
    memory, rates = p.bytes[rows], p.tokens_per_second[rows]
    assert p.fits[rows].all() and (np.diff(memory) > 0).all() and (np.diff(rates) > 0).all() and 2 * rates[0] > rates[-1]
    short = ranked.frontier(count=3)
    assert len(short) == 3 and short[0] == rows[0] and short[-1] == rows[-1] and set(short) < set(rows)
    assert ranking(Launch(16, 2048, 64), SMALL, Site(memory=1e6), launcher).frontier() == []


@pytest.mark.parametrize("launcher", ["torchtitan", "megatron", "accelerate", "nanotron"])
def test_what_a_step_depends_on_is_the_price_under_these_links(launcher):
    site, sequence_parallel = Site("a100"), launcher != "accelerate"
    one = Launch(32, 2048, 64, data=8, shard=8, zero=1, tensor=4, expert_tensor=4, sequence_parallel=sequence_parallel)
    checked = check_launch(LaunchConfig(one, SMALL), launcher, site, changes=False)
    rows = {row["what"]: row for row in checked.sensitivity()}

    def price(launch: Launch, **links: float) -> float:
        return float(prices_of(TrainingRuns.of([launch]), SMALL, replace(site, **links), launcher).seconds[0])

    now, inside = float(checked.prices.seconds[0]), link_of(DEVICES["a100"])
    assert price(one, inside=inside) == pytest.approx(now)  # so that a factor of it is one of what counts now
    expected = {f"network {said}": price(one, network=factor * 50e9) for factor, said in ((0.5, "half as fast"), (2.0, "twice as fast"))}
    expected |= {f"links inside a node {said}": price(one, inside=factor * inside)
                 for factor, said in ((0.5, "half as fast"), (2.0, "twice as fast"))}  # fmt: skip
    expected |= {f"microbatch {n}": price(replace(one, microbatch=n)) for n in (2, 4, 8)}  # 64 sequences on 8 ranks
    assert {what: row["seconds"] for what, row in rows.items()} == pytest.approx(expected)
    assert all(row["change"] == pytest.approx(row["seconds"] / now - 1) for row in rows.values())
    assert rows["network half as fast"]["change"] > 0 > rows["network twice as fast"]["change"]
    alone = check_launch(LaunchConfig(Launch(1, 2048, 8), SMALL), launcher, site, changes=False)
    assert {row["what"].split()[0] for row in alone.sensitivity()} == {"microbatch"}


def test_a_published_run_is_the_nearest_to_itself():
    runs = published_runs()
    assert len(runs) > 100 and len({run.name for run in runs}) > 20 and all(run.source and run.rate > 0 for run in runs)
    for one in runs:
        found = nearest(one.launch, one.sizes, one.device)
        assert one.distance(one.launch, one.sizes, one.device) == 0.0 == found.distance(one.launch, one.sizes, one.device)
        assert (found.name, found.device, found.launch.precision) == (one.name, one.device, one.launch.precision)
    off = [abs(run.to_dict()["predicted"] / run.rate - 1) for run in runs[::5]]
    assert np.median(off) < 0.1 and max(off) < 0.6


def test_a_difference_of_models_counts_more_than_one_of_devices_or_degrees():
    one = replace(published_runs()[0], device="h100", launch=Launch(8, 4096, 16, data=8), sizes=ModelSizes(32, 4096, 14336, 32, 8, 128256))
    mixture = replace(one.sizes, experts=8, active=2, expert_ffn=14336)
    larger, faster = math.log2(mixture.parameters / one.sizes.parameters), math.log2(DEVICES["h100"].flops / DEVICES["a100"].flops)
    assert one.distance(one.launch, mixture, "h100") == pytest.approx(3 * larger + 3)
    assert one.distance(one.launch, one.sizes, "a100") == pytest.approx(2 * faster + 0.5)
    for name, value, distance in (("devices", 16, 0.5), ("seq", 1024, 1.0), ("pipeline", 8, 0.75), ("precision", "fp8", 1.0)):
        assert one.distance(replace(one.launch, **{name: value}), one.sizes, "h100") == pytest.approx(distance)


@pytest.mark.parametrize(
    ("sizes", "devices", "device", "precision", "name"),
    [
        (ModelSizes(80, 8192, 28672, 64, 8, 128256), 64, "h100", "fp8", "Llama 3 70B"),
        (ModelSizes(126, 16384, 53248, 128, 8, 128256), 16384, "h100", "bf16", "Llama 3.1 405B"),
        (ModelSizes(96, 12288, 49152, 96, 96, 51200, gated=False), 1024, "a100", "bf16", "gpt3-175B"),
        (ModelSizes(61, 7168, 18432, 128, 128, 129280, experts=256, active=8, expert_ffn=2048, shared_ffn=2048, dense_layers=3), 1024,
         "h800", "fp8", "DeepSeek-V3"),
    ],
)  # fmt: skip
def test_the_nearest_run_is_of_the_same_model(sizes, devices, device, precision, name):
    assert nearest(Launch(devices, 4096, 1024, data=devices, precision=precision), sizes, device).name == name


# --- launches compared


def test_two_configurations_are_compared_by_seconds_bytes_and_keys(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(LLAMA.read_text().replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 2"))
    words = (str(LLAMA), str(job), "--devices", "64", "--global-batch", "64")
    record = record_of("show", *words)
    assert not record["same"] and record["reasons"] == [[], []]
    assert record["keys"]["parallelism.tensor_parallel_degree"] == [1, 2] and "parallelism.data_parallel_shard_degree" in record["keys"]
    assert not {"training.seq_len", "training.global_batch_size", "devices"} & set(record["keys"])
    one, two = (record_of("show", path, *words[2:]) for path in words[:2])
    for key, of, total in (("seconds", "seconds_by_kind", "step_seconds"), ("bytes", "bytes_by_kind", "peak_bytes")):
        assert record[key] == {
            kind: [one[of].get(kind), two[of].get(kind)] for kind in {**one[of], **two[of]} if one[of].get(kind) != two[of].get(kind)
        }  # fmt: skip
        a, b = record[total]
        assert sum(x or 0 for x, _ in record[key].values()) - sum(y or 0 for _, y in record[key].values()) == pytest.approx(a - b)
    code, text, said = run("diff", *words, "--exit-code")
    assert code == 1 and "`diff A B` is now `show A B`" in said
    for line in ("Where the time moved", "Where the bytes moved", "Keys that differ", "parallelism.tensor_parallel_degree"):
        assert line in text, line
    same = record_of("show", str(LLAMA), str(LLAMA), "--devices", "64", "--exit-code")
    assert same["same"] and same["keys"] == same["seconds"] == same["bytes"] == {}


def test_configurations_of_two_launchers_and_an_illegal_one_are_compared(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(LLAMA.read_text().replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 16"))
    record = record_of("show", str(job), str(DATA / "megatron" / "llama3_8b_fp8.sh"), "--devices", "64")
    assert record["keys"]["launcher"] == ["torchtitan", "megatron"] and record["keys"]["tp"][0] == 16
    assert record["step_seconds"][0] is None and record["reasons"][0] == ["8 key-value heads do not divide by tp 16"]
    text = run("show", str(job), str(LLAMA), "--devices", "64")[1]
    assert "a is illegal: 8 key-value heads do not divide by tp 16" in " ".join(text.split())
    plan = ROOT / "solutions" / "gpt2-small-2x4.json"
    assert "is a launcher's configuration and the other a plan; give two of a kind" in refusal("show", str(LLAMA), str(plan))


def test_show_and_explain_answer_for_a_configuration(tmp_path):
    out = tmp_path / "report.html"
    code, text, _ = run("show", str(LLAMA), "--devices", "64")
    assert code == 0 and "Where the seconds and the bytes go" in text and "at the same global batch" not in text
    assert run("show", str(LLAMA), "--devices", "64", "--html", str(out))[0] == 0 and problems(out.read_text()) == []
    code, text, _ = run("explain", str(LLAMA), "--devices", "64")
    assert code == 0 and "network half as fast" in text and "nearest published run" in text
    assert "NAME has no effect on a launcher's configuration" in refusal("explain", str(LLAMA), "layers.0")
    assert json.loads(run("explain", str(LLAMA), "--devices", "64", "--json")[1])["sensitivity"]
