from __future__ import annotations

import builtins
import io
import json
import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcli.report import ReportError, Sink, make_sink
from hpcli.report.folder import run_folder
from hpcli.report.metrics import MetricsFile

PNG = b"\x89PNG\r\n\x1a\n"
ALL = SimpleNamespace(jsonl=True, tensorboard=True, plot=True)


def sink_into(folder: Path | None, **options: Any) -> tuple[Sink, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return make_sink(folder, stdout=out, stderr=err, **options), out, err


def feed(sink: Sink, events: list[dict[str, Any]]) -> None:
    for event in events:
        sink.handle(event)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mount = tmp_path / "tiny"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_run_leaves_metrics_and_a_plot_and_says_where(events: SimpleNamespace, tmp_path: Path) -> None:
    sink, out, _ = sink_into(tmp_path / "a" / "b", max_norm=1.0)
    with sink:
        feed(sink, events.whole_run())
    assert not sink.failed
    kinds = [record["event"] for record in records(tmp_path / "a" / "b")]
    assert kinds == ["start", "step", "step", "step", "step", "norm_table", "end"]
    assert (tmp_path / "a" / "b" / "loss_and_norm.png").read_bytes().startswith(PNG)
    assert str(tmp_path / "a" / "b" / "metrics.jsonl") in out.getvalue()
    assert str(tmp_path / "a" / "b" / "loss_and_norm.png") in out.getvalue()
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [
        "loss_and_norm.png",
        "metrics.jsonl",
    ]


def test_json_output_carries_the_verdict_and_the_files(events: SimpleNamespace, tmp_path: Path) -> None:
    sink, out, _ = sink_into(tmp_path, json=True)
    with sink:
        feed(sink, events.whole_run())
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines[5]["agree"] is True
    assert lines[5]["verdict"] == "8 of 8 ranks hold 0.776062, bit for bit"
    assert set(lines[6]["files"]) == {"metrics", "plot"}
    assert lines == records(tmp_path)


def test_a_step_is_on_disk_before_the_next_one(events: SimpleNamespace, tmp_path: Path) -> None:
    sink, _, _ = sink_into(tmp_path)
    with sink:
        feed(sink, [events.start(), events.step(1)])
        assert records(tmp_path)[-1]["step"] == 1


def test_disagreement_fails_the_run(events: SimpleNamespace, tmp_path: Path) -> None:
    sink, _, _ = sink_into(tmp_path)
    with sink:
        feed(sink, [events.start(), events.step(1), events.table(1, events.rows(4, odd={2: 0.5}))])
        feed(sink, [events.table(2, events.rows(4)), events.end()])
    assert sink.failed


def test_an_interrupted_run_keeps_what_there_is(events: SimpleNamespace, tmp_path: Path) -> None:
    sink, out, _ = sink_into(tmp_path)
    with pytest.raises(KeyboardInterrupt), sink:
        feed(sink, [events.start(), events.step(1), events.step(2)])
        raise KeyboardInterrupt
    last = records(tmp_path)[-1]
    assert (last["event"], last["step"], last["steps"]) == ("stopped", 2, 4)
    assert (tmp_path / "loss_and_norm.png").read_bytes().startswith(PNG)
    assert "stopped after step 2 of 4" in out.getvalue()


def test_a_run_that_stops_before_its_first_step_draws_nothing(
    events: SimpleNamespace, tmp_path: Path
) -> None:
    sink, _, err = sink_into(tmp_path)
    with sink:
        sink.handle(events.start())
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert err.getvalue() == ""


@pytest.mark.parametrize("loss, norm", [(math.nan, math.nan), (math.inf, 1.0), (1e300, 1e-300), (0.0, 0.0)])
def test_any_numbers_can_be_plotted(
    events: SimpleNamespace, tmp_path: Path, loss: float, norm: float
) -> None:
    sink, _, err = sink_into(tmp_path, logging=ALL, max_norm=math.inf)
    with sink:
        feed(
            sink,
            [events.start(), *(events.step(i, loss=loss, grad_norm=norm, skipped=i > 1) for i in (1, 2, 3))],
        )
        sink.handle(events.end())
    assert (tmp_path / "loss_and_norm.png").exists() and err.getvalue() == ""


def test_a_second_run_in_the_same_folder_adds_to_its_metrics(events: SimpleNamespace, tmp_path: Path) -> None:
    for _ in range(2):
        sink, _, _ = sink_into(tmp_path)
        with sink:
            feed(sink, events.whole_run())
    assert [record["event"] for record in records(tmp_path)].count("start") == 2


def test_a_record_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "st')
    metrics = MetricsFile(tmp_path)
    metrics.handle({"event": "start"})
    metrics.close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[1] == '{"event": "start"}'


def test_tensorboard_can_read_what_was_written(events: SimpleNamespace, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink, _, _ = sink_into(tmp_path, logging=ALL)
    with sink:
        feed(sink, events.whole_run())
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    losses = read.Scalars("train/loss")
    assert [(point.step, point.value) for point in losses] == [
        (step, pytest.approx(5.5 / step)) for step in range(1, 5)
    ]
    assert "train/grad_norm" in read.Tags()["scalars"]


@pytest.mark.parametrize("package, setting", [("tensorboard", "tensorboard"), ("matplotlib", "plot")])
def test_a_missing_package_is_named_with_its_remedy(
    events: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, setting: str
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    choices = SimpleNamespace(jsonl=True, tensorboard=package == "tensorboard", plot=True)
    message = ""
    try:
        sink, out, err = sink_into(tmp_path, logging=choices)
        with sink:
            feed(sink, events.whole_run())
        message = err.getvalue()
        assert sink.failed and "done: 4 steps" in out.getvalue()
    except ReportError as error:
        message = str(error)
    assert package in message and "pip install" in message and f"logging.{setting}=false" in message


def test_a_full_disk_is_one_message_that_names_the_file(events: SimpleNamespace, tiny_disk: Path) -> None:
    sink, _, _ = sink_into(tiny_disk)
    with (
        pytest.raises(ReportError, match="cannot write the metrics .*metrics.jsonl: No space left on device"),
        sink,
    ):
        sink.handle(events.start(steps=10_000))
        for step in range(1, 10_000):
            sink.handle(events.step(step))


def test_a_disk_too_full_for_the_plot_fails_the_run_at_its_end(
    events: SimpleNamespace, tiny_disk: Path
) -> None:
    (tiny_disk / "filler").write_bytes(bytes(48 * 1024))
    sink, out, err = sink_into(tiny_disk)
    with sink:
        feed(sink, events.whole_run())
    assert sink.failed
    assert (
        err.getvalue()
        == f"error: cannot write the plot {tiny_disk}/loss_and_norm.png: No space left on device\n"
    )
    assert "done: 4 steps" in out.getvalue()
    assert sorted(path.name for path in tiny_disk.iterdir()) == ["filler", "metrics.jsonl"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="cannot write the metrics /proc/nowhere/metrics.jsonl: "):
        make_sink(Path("/proc/nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="Not a directory|File exists"):
        make_sink(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ReportError, match="Permission denied"):
        make_sink(tmp_path / "run")


def test_the_default_folder_is_unique_even_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [run_folder(Path("configs/fsdp8.yaml"), None) for _ in range(5)]
    assert len(set(folders)) == 5
    assert all(folder.is_dir() and folder.name.startswith("fsdp8-20") for folder in folders)


def test_a_folder_is_made_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(Path("x.yaml"), None, create=False)
    assert list(tmp_path.iterdir()) == []
    assert run_folder(Path("x.yaml"), Path("here/now")) == Path("here/now")
    assert Path("here/now").is_dir()
    with pytest.raises(ReportError, match="cannot write to the output folder /proc/x: "):
        run_folder(Path("x.yaml"), Path("/proc/x"))


def test_without_a_folder_nothing_is_recorded(
    events: SimpleNamespace, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    sink, out, _ = sink_into(None)
    with sink:
        feed(sink, events.whole_run())
    assert "done: 4 steps" in out.getvalue() and list(tmp_path.iterdir()) == []
