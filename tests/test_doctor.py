"""`k3 doctor`: what is there and what is missing, with and without a model, a native extension, and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from cli_helpers import Cli, environment
from conftest import TINY_A, TINY_C, copy_checkpoint
from k3.engine import machine
from k3.engine.forecast import diagnosis, prognosis
from k3.engine.forecast import speeds as speeds_module
from k3.engine.machine import GroupMemory, cpu_quota, file_system
from k3.storage.disk_bench import Cell, DiskReport

MACHINE = ["system", "Python", "processor", "instruction sets", "cores", "memory", "huge pages"]


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Measurements are other tests' business; disks and control groups are as a test says."""
    monkeypatch.setattr(prognosis, "measure_arithmetic", lambda _: (20e9, 40e9))
    monkeypatch.setattr(speeds_module, "_LEAST_TO_READ", 1)
    drive(monkeypatch, 3e9)
    free(monkeypatch, 2 * 10**12)
    group(monkeypatch, None)


def drive(monkeypatch, rate, *, direct=True, from_drive=1.0):
    report = rate if isinstance(rate, str) else DiskReport((), 0, (Cell(8, 1, rate),), 1, direct, from_drive)
    monkeypatch.setattr(prognosis, "measure_drives", lambda _: report)


def free(monkeypatch, nbytes):
    usage = diagnosis.shutil.disk_usage("/")._replace(free=nbytes)
    monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda _: usage)


def group(monkeypatch, found):
    monkeypatch.setattr(machine, "group_memory", lambda: found)
    monkeypatch.setattr(prognosis, "group_memory", lambda: found)


def checks(cli, *arguments, code=0):
    ran = cli("doctor", *arguments, "--json", "--quiet")
    assert ran.code == code, ran.err
    record = json.loads(ran.out)
    assert record["can_run"] == (code == 0)
    assert all(check["verdict"] in ("ok", "slow", "missing") for check in record["checks"])
    assert all(check["advice"] for check in record["checks"] if check["fatal"])
    return {check["what"]: check for check in record["checks"]}, record


# --- without a model ---


def test_without_a_model(cli):
    found, record = checks(cli)
    assert [*found] == [*MACHINE, "disk to download", "memory plan", "Kimi K3 here"]
    assert "s a token from a drive of 3 GB/s" in found["Kimi K3 here"]["value"]
    assert found["disk to download"]["verdict"] == "ok"
    assert "1.56 TB" in found["disk to download"]["value"]
    assert record["next"] == "k3 download DIR"


def test_without_room_for_the_download(cli, monkeypatch):
    free(monkeypatch, 10**12)
    found, record = checks(cli)
    assert found["disk to download"]["verdict"] == "missing"
    assert "--extra-dir" in found["disk to download"]["advice"]
    assert record["next"] == "k3 demo"


def test_the_table(cli):
    ran = cli.ok("doctor")
    lines = ran.out.splitlines()
    assert [line.split("  ")[0] for line in lines if line and line[0] not in " n"] == [
        *MACHINE,
        "disk to download",
        "memory plan",
        "Kimi K3 here",
    ]
    assert lines[-1] == "next: k3 download DIR"
    assert "measuring memory and arithmetic" in ran.err


def test_too_little_memory_for_the_released_model(cli, monkeypatch):
    group(monkeypatch, GroupMemory(6 * 10**8, 0))
    found, _ = checks(cli, code=2)
    assert found["memory"]["verdict"] == "slow"
    assert "control group's limit 600 MB" in found["memory"]["value"]
    assert found["memory plan"]["fatal"]
    assert "are missing" in found["memory plan"]["value"]


def test_little_memory_is_slow(cli, monkeypatch):
    group(monkeypatch, GroupMemory(4 * 10**9, 0))
    assert checks(cli)[0]["memory"]["verdict"] == "slow"


# --- with a model ---


def test_the_embedded_model(cli):
    found, record = checks(cli, "demo")
    assert [*found] == [
        *MACHINE,
        *("checkpoint", "tokenizer", "memory plan", "file system", "drive", "arithmetic", "expected speed"),
    ]
    assert "112 experts" in found["checkpoint"]["value"]
    assert found["expected speed"]["value"].startswith("below 0.01 s a token")
    assert record["next"] == "k3 run demo --prompt 'The capital of France is'"
    assert 0 < record["seconds_per_token"] < 0.01


def test_a_checkpoint_without_a_tokenizer(cli):
    found, record = checks(cli, TINY_A)
    assert found["tokenizer"]["verdict"] == "missing"
    assert "--ids works" in found["tokenizer"]["advice"]
    assert record["next"] == f"k3 run {TINY_A} --ids 1,2,3"


def test_the_next_command_works(cli):
    _, record = checks(cli, TINY_C)
    assert cli.ok(*record["next"].split()[1:], "--gen", 1, "--quiet").out


def test_a_model_that_is_not_there(cli, tmp_path):
    missing = tmp_path / "x" / "y"
    found, record = checks(cli, missing, code=2)
    assert found["checkpoint"]["fatal"]
    assert str(tmp_path) in found["disk to download"]["value"]
    assert record["next"] == f"k3 download {missing}"
    ran = cli("doctor", missing)
    assert ran.code == 2
    assert "missing" in ran.out
    assert ran.complaint.startswith("the model can't run here. checkpoint: ")
    assert ran.complaint.endswith("What to do: download it.")


def test_a_model_that_is_not_whole(cli, tmp_path):
    model = copy_checkpoint(TINY_C, tmp_path / "a model")
    next(iter(sorted(model.glob("model-00002*")))).unlink()
    found, record = checks(cli, model, code=2)
    assert "model-00002" in found["checkpoint"]["value"]
    assert record["next"] == f"k3 verify '{model}'"


def test_shards_on_another_drive(cli, tmp_path):
    model, other = copy_checkpoint(TINY_C, tmp_path / "model"), tmp_path / "other"
    other.mkdir()
    shard = next(iter(sorted(model.glob("model-00002*"))))
    shard.rename(other / shard.name)
    _, record = checks(cli, model, "--extra-dir", other)
    assert record["next"].endswith(f"--extra-dir {other}")


def test_a_packed_trunk(cli, tmp_path):
    cli.ok("pack", "demo", tmp_path / "trunk", "--quiet")
    _, record = checks(cli, "demo", "--trunk", tmp_path / "trunk")
    assert record["next"].endswith(f" --trunk {tmp_path / 'trunk'}")
    assert checks(cli, "demo", "--trunk", tmp_path, code=2)[0]["checkpoint"]["fatal"]


def test_a_plan_that_does_not_fit(cli, monkeypatch):
    group(monkeypatch, GroupMemory(100 << 20, 90 << 20))
    found, record = checks(cli, "demo", code=2)
    assert "interpreter, libraries, index" in found["memory plan"]["value"]
    assert record["next"] is None
    assert record["seconds_per_token"] is None


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({"rate": 3e9}, "ok"),
        ({"rate": 1e9}, "slow"),
        ({"rate": 3e9, "direct": False}, "slow"),
        ({"rate": 3e9, "from_drive": 0.2}, "slow"),
        ({"rate": 3e9, "from_drive": None}, "ok"),
        ({"rate": "there are holes"}, "missing"),
    ],
)
def test_the_drive(cli, monkeypatch, given, verdict):
    drive(monkeypatch, **given)
    found, _ = checks(cli, "demo")
    assert found["drive"]["verdict"] == verdict
    assert verdict == "missing" or f"{given['rate'] / 1e9:.2f} GB/s" in found["drive"]["value"]


def test_speed_needs_the_drive_where_bytes_must_be_read(cli, monkeypatch):
    plan_memory = prognosis.plan_memory

    def nothing_kept(needs, request, limit):
        return plan_memory(needs, replace(request, trunk_bytes=0, cache_bytes=0), limit)

    monkeypatch.setattr(prognosis, "plan_memory", nothing_kept)
    drive(monkeypatch, "there are holes")
    found, record = checks(cli, "demo")
    assert found["expected speed"]["verdict"] == "missing"
    assert "--disk-gbps" in found["expected speed"]["advice"]
    assert record["seconds_per_token"] is None
    drive(monkeypatch, 1e4)
    found, record = checks(cli, "demo")
    assert found["expected speed"]["verdict"] == "slow"
    assert record["seconds_per_token"] > 30


def test_a_file_system_without_direct_reads(cli, monkeypatch):
    monkeypatch.setattr(prognosis, "takes_direct_reads", lambda _: False)
    found, _ = checks(cli, "demo")
    assert found["file system"]["verdict"] == "slow"
    assert "refuses direct reads" in found["file system"]["value"]


# --- the machine ---


WITHOUT_EXTENSION = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "k3.kernels._native":
            raise ImportError("no such extension")
sys.meta_path.insert(0, Block())
from k3.cli.main import main
sys.exit(main(["doctor", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("model", [[], ["demo"]])
def test_without_the_native_extension(model):
    command = [sys.executable, "-c", WITHOUT_EXTENSION, *model]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "native extension  missing  can't be imported: no such extension" in done.stdout
    assert "install the package again" in done.stdout
    assert done.stderr.startswith("k3: the model can't run here. native extension: ")


def test_settings_that_slow(cli, monkeypatch):
    monkeypatch.setattr(machine, "huge_pages", lambda: "never")
    monkeypatch.setattr(machine, "cpu_quota", lambda: 0.5)
    found, _ = checks(cli, "demo")
    assert (found["huge pages"]["verdict"], found["cores"]["verdict"]) == ("slow", "slow")
    assert "--threads 1" in found["cores"]["advice"]
    monkeypatch.setattr(machine, "huge_pages", lambda: None)
    monkeypatch.setattr(machine, "cpu_quota", lambda: 1000.0)
    found, _ = checks(cli, "demo")
    assert (found["huge pages"]["verdict"], found["cores"]["verdict"]) == ("slow", "ok")


def test_processor_time_of_a_group(tmp_path):
    process = tmp_path / "cgroup"
    process.write_text("0::/job/part\n")
    (tmp_path / "job" / "part").mkdir(parents=True)
    (tmp_path / "job" / "part" / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(process, tmp_path) is None
    (tmp_path / "job" / "cpu.max").write_text("250000 100000\n")
    assert cpu_quota(process, tmp_path) == 2.5
    (tmp_path / "job" / "part" / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(process, tmp_path) == 1.5
    assert cpu_quota(tmp_path / "missing", tmp_path) is None


def test_processor_time_of_an_old_group(tmp_path):
    process = tmp_path / "cgroup"
    process.write_text("3:cpu,cpuacct:/job\n2:memory:/job\n0::/\n")
    (tmp_path / "cpu" / "job").mkdir(parents=True)
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(process, tmp_path) is None
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text("50000\n")
    assert cpu_quota(process, tmp_path) == 0.5


def test_facts_of_this_machine(tmp_path):
    assert machine.processor_name()
    assert machine.allowed_cpus() >= 1
    assert machine.huge_pages() in ("always", "madvise", "never", None)
    assert file_system(tmp_path)
    assert file_system(tmp_path / "proc") == file_system(tmp_path)
