"""lockstep verify on runs, checkpoints and exported models."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.jobs.verify import main
from lockstep.storage.documents import seal, unseal
from lockstep.storage.fs import filesystem
from lockstep.storage.verify import kind_of, verify
from tests.storage.make_run import make_run

CHECKPOINT = "checkpoints/step-0000000200.g0002"
# What nothing holds a digest of: a lease lives, logs and reports are for people.
UNSEALED = ("lease.json", "logs/", "metrics/", "reports/")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(str(tmp_path / "run"))
    return tmp_path / "run"


def files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_a_whole_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[1].rstrip(":") for line in lines if line.startswith("ok ") and not line.split()[1].isdigit()}
    assert listed == {path for path in files(run) if not path.startswith(("lease.json", "reports/"))}


def test_every_flipped_byte_of_what_is_sealed(run: Path) -> None:
    for name in files(run):
        if name.startswith(UNSEALED):
            continue
        path = run / name
        data = path.read_bytes()
        for place in (0, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            findings = verify(str(run))
            assert findings and name in {finding.path for finding in findings}
        path.write_bytes(data[:-1])
        assert name in {finding.path for finding in verify(str(run))}
        path.write_bytes(data)
    assert verify(str(run)) == []


def test_every_missing_file(run: Path) -> None:
    for name in files(run):
        if name.startswith((*UNSEALED, "results/")):
            continue  # the newest result may not be there yet
        path = run / name
        data = path.read_bytes()
        path.unlink()
        assert (name, "missing") in {(finding.path, finding.what) for finding in verify(str(run))}
        path.write_bytes(data)


@pytest.mark.parametrize("left", ["checkpoints", "audit", "metrics", "logs", "models", "results"])
def test_a_newest_claim_is_missed_by_anything_of_its_generation(run: Path, left: str) -> None:
    (run / "generations" / "000002.json").unlink()
    for path in [*run.glob("*/g0002*"), *run.glob("*/*.g0002")]:
        if path.parent.name not in (left, "reports"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert ("generations/000002.json", "missing") in {(finding.path, finding.what) for finding in verify(str(run))}


@pytest.mark.parametrize(
    ("name", "first", "up_to"),
    [
        ("generations/9999999999999.json", "generations/000003.json", "generations/9999999999998.json"),
        ("metrics/g99999999999999", "generations/000003.json", "generations/99999999999999.json"),
        ("metrics/g0001/part-99999999999.jsonl", "metrics/g0001/part-00001", "metrics/g0001/part-99999999998"),
    ],
)
def test_what_is_told_of_a_gap_does_not_grow_with_it(run: Path, name: str, first: str, up_to: str) -> None:
    (run / name).mkdir() if name.endswith("999") else (run / name).write_bytes(b"{}\n")
    told = [finding for finding in verify(str(run)) if "missing" in finding.what]
    assert told[0].path == first and len(told) == 21 and told[-1].what == f"missing, as are all up to {up_to}"


@pytest.mark.parametrize(
    "name", [f"{CHECKPOINT}/rank-00002.safetensors", "models/g0002/x/y", "generations/x", "results/g1.json"]
)
def test_an_extra_file(run: Path, name: str) -> None:
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(b"")
    findings = verify(str(run))
    assert [finding.path for finding in findings] == [name] and "extra" in findings[0].what


def test_leftovers_of_a_dead_writer_are_no_damage(run: Path) -> None:
    (run / "generations" / ".000003.json.0123456789abcdef.tmp").write_bytes(b"half")
    (run / ".staging" / "g0003-ab" / "step-0000000300").mkdir(parents=True)
    (run / "metrics" / "g0002" / "now.part").write_bytes(b"{")
    assert verify(str(run)) == []


@pytest.mark.parametrize(
    ("data", "record", "offset"),
    [(b'{"a":1}\n{"b"', 1, 12), (b'{"a":1}\n{"b":\n{"c":1}\n', 1, 8), (b"[1]\n", 0, 0), (b"\xff\n", 0, 0)],
)
def test_lines_of_metrics(run: Path, data: bytes, record: int, offset: int) -> None:
    (run / "metrics/g0001/part-00000.jsonl").write_bytes(data)
    (finding,) = verify(str(run))
    assert (finding.path, finding.record, finding.offset) == ("metrics/g0001/part-00000.jsonl", record, offset)


def test_a_part_that_is_missing(run: Path) -> None:
    (run / "metrics/g0001/part-00002.jsonl").write_bytes(b"{}\n")
    (finding,) = verify(str(run))
    assert finding.path == "metrics/g0001/part-00001"


def test_audits_of_trashed_checkpoints_stay_checked(run: Path) -> None:
    trash = run / ".trash" / "g0002"
    trash.mkdir(parents=True)
    shutil.move(run / "checkpoints/step-0000000100.g0001", trash)
    assert verify(str(run)) == []
    audit = run / "audit/g0001/rank-00000/step-0000000100.csv"
    audit.write_bytes(audit.read_bytes().replace(b"1,0", b"1,1"))
    (finding,) = verify(str(run))
    assert finding.path == "audit/g0001/rank-00000/step-0000000100.csv"


def test_one_checkpoint_and_one_model(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fs = filesystem(str(run))
    assert kind_of(fs, str(run / CHECKPOINT)) == "checkpoint"
    assert kind_of(fs, str(run / "models/g0002")) == "model"
    assert kind_of(fs, str(run)) == "run"
    assert main([str(run / CHECKPOINT), "--all"]) == 0
    assert "audit/g0002" in capsys.readouterr().out  # its audits too, where its run is around it
    alone = shutil.copytree(run / CHECKPOINT, tmp_path / "step-0000000200.g0002")
    assert main([str(alone)]) == 0
    (alone / "rank-00001.safetensors").write_bytes(b"x")
    assert main([str(alone)]) == 1
    assert "rank-00001.safetensors, offset 1" in capsys.readouterr().out
    (alone / "_manifest.json").unlink()
    assert [(finding.path, finding.what) for finding in verify(str(alone))] == [("_manifest.json", "missing")]
    (run / "models/g0002/_manifest.json").write_bytes(b"{")
    assert main([str(run / "models/g0002")]) == 1


@pytest.mark.parametrize(
    "change",
    [{"step": 300}, {"kind": "model"}, {"files": {"../../run.json": {"bytes": 1, "sha256": "0" * 64}}}, {"files": []},
     {"audit": None}, {"audit": {"/etc/passwd": {"bytes": 1, "sha256": "0" * 64}}}],
)  # fmt: skip
def test_a_forged_manifest(run: Path, change: dict[str, object]) -> None:
    path = run / CHECKPOINT / "_manifest.json"
    path.write_bytes(seal({**unseal(path.read_bytes(), "m"), **change}))
    assert f"{CHECKPOINT}/_manifest.json" in {finding.path for finding in verify(str(run))}
