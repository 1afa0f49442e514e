"""``hpcli plan``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpcli.app import main

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
VOID = {"meta"}


class Page(HTMLParser):
    """Checks that every element is closed in its order, and remembers which there are and what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """hpcli in this process, which has torch already, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Done:
        code = main(arguments)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_every_example_has_a_plan_and_a_page_that_stands_alone(here: Any, name: str) -> None:
    done = here("plan", str(CONFIGS / name), "--output", "report.html")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("FITS: ") and lines[0].endswith(lines[-1])
    assert max(map(len, lines[1:])) <= 100
    page = Page(Path("report.html").read_text())
    assert {"h1", "table"} <= set(page.tags) and not page.references
    assert ("svg" in page.tags) == ("\nPipeline\n" in done.stdout)


def test_a_config_that_does_not_fit_says_by_how_much_and_what_would_help(here: Any) -> None:
    tower = str(CONFIGS / "tower_1t_fsdp128_ep128.yaml")
    done = here("plan", tower, "--no-enable-offload")
    assert done.returncode == 0
    assert re.search(r"DOES NOT FIT: the fullest device needs 1\d\d GiB, [\d.]+ GiB more than its 64.0 GiB$", done.stdout)
    assert re.search(r"\n  offload +\d\d\.\d GiB +\d+ GiB  fits\n", done.stdout)


def test_json_holds_the_same_numbers(here: Any, good: str) -> None:
    told = json.loads(here("plan", good, "--json", "--device-memory", "1MB", "--rank", "2").stdout)
    shown = told["shown"]
    assert shown["rank"] == 2 and told["limits"]["device"] == 10**6
    assert sum(shown["device"].values()) - shown["never_at_once"] == shown["device_total"] == told["needs"]["device"]
    assert told["fits"] == (told["needs"]["device"] <= 10**6)
    assert {one["purpose"] for one in told["communication"]} == {"parameters", "gradients", "gradient norm", "loss"}
    assert sum(ranks["ranks"] for ranks in told["classes"]) == told["world_size"] == 4


def test_markdown_has_the_tables_and_the_schedule(here: Any, tmp_path: Path) -> None:
    here("plan", str(CONFIGS / "pp4_interleaved_fsdp2.yaml"), "--output", "deep/report.md")
    text = (tmp_path / "deep" / "report.md").read_text()
    assert "| parameters | 224 KiB | - |" in text and "rank 0  holds 8 |0>>1>>" in text
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    assert len(tables) >= 4
    assert all(len({line.count("|") for line in table.splitlines()}) == 1 for table in tables)


def test_what_train_refuses_is_refused_in_the_same_words(hpcli: Any, tmp_path: Path, bad: str) -> None:
    (tmp_path / "layout.yaml").write_text("device: cpu\nparallelism: {tensor_parallel: 3, sequence_parallel: true}\n")
    (tmp_path / "frozen.yaml").write_text("device: cpu\nmodel: {freeze: [layer.*]}\n")
    for name in (bad, "layout.yaml", "frozen.yaml"):
        planned, trained = hpcli("plan", name), hpcli("train", name)
        assert planned.returncode == trained.returncode == 2
        assert planned.stderr == trained.stderr and planned.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", "4"], "the run has the ranks 0 to 3"),
        (["--device-memory", "plenty"], "'plenty' is no amount of memory; write 64GiB, 80GB or a number of bytes"),
        (["--output", "report.pdf"], "the name must end in .html or .md"),
        (["--ranks", "0"], "a run has from 1 to"),
    ],
)
def test_a_wrong_option_is_one_message(hpcli: Any, good: str, arguments: list[str], message: str) -> None:
    done = hpcli("plan", good, *arguments)
    assert done.returncode == 2 and message in re.sub(r"\s+", " ", done.stderr)


def test_a_device_that_is_not_here_is_planned_all_the_same(here: Any, good: str) -> None:
    assert here("plan", good, "--device", "npu").returncode == 0


def test_a_report_that_cannot_be_written_is_said(here: Any, good: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = here("plan", good, "--output", "file/report.md")
    assert done.returncode == 1 and done.stderr.startswith("error: cannot write to file/report.md")


def test_what_is_not_counted_is_said(here: Any) -> None:
    zero_bubble = str(CONFIGS / "pp2_zero_bubble_fsdp4.yaml")
    recomputed = ["--set", "training.activation_checkpointing=full"]
    assert "NOT COUNTED" not in here("plan", zero_bubble).stdout
    assert "NOT COUNTED: torch computes a recomputed layer again" in here("plan", zero_bubble, *recomputed).stdout
