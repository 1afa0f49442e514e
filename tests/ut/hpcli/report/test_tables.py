from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from hpcli.report.tables import norm_table, plain_console


def rendered(rows: list[dict[str, Any]], width: int = 100) -> list[str]:
    stream = io.StringIO()
    plain_console(stream, width).print(norm_table(rows, "Gradient norm of every rank, step 10", width))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def ranks_shown(lines: list[str]) -> list[int]:
    body = lines[next(number for number, line in enumerate(lines) if "───" in line) + 1 :]
    return [int(line.split()[0]) for line in body if line[:5].strip().isdigit()]


WIDE = {
    "host": "gpu-cluster-node-0017.example.internal",
    "device": "cuda:7",
    "coordinates": {"pp": 3, "dp_replicate": 11, "dp_shard": 127, "tp": 7},
    "with_gradient": 12345,
    "without_gradient": 12345,
    "local_norm": 1.2345678e-12,
    "contributed": 1.2345678e-12,
}


@pytest.mark.parametrize("world_size", [1, 8, 64, 65, 200])
@pytest.mark.parametrize("fields", [{}, WIDE], ids=["usual", "wide"])
def test_fits_100_columns(events: SimpleNamespace, world_size: int, fields: dict[str, Any]) -> None:
    lines = rendered(events.rows(world_size, **fields))
    assert max(map(len, lines)) <= 100
    assert not any("too narrow" in line for line in lines)


def test_has_a_row_for_each_of_8_ranks_with_all_that_is_known(events: SimpleNamespace) -> None:
    lines = rendered(events.rows(8))
    assert ranks_shown(lines) == list(range(8))
    row = next(line for line in lines if line.split()[:1] == ["5"])
    assert row.split() == ["5", "node17,", "cuda:5", "1,", "2", "38", "1", "0.274381", "0.274381", "0.776062"]
    heading = " ".join(lines[:4])
    for title in (
        "rank",
        "host, device",
        "dp_replicate",
        "dp_shard",
        "local norm",
        "contributed",
        "global norm",
    ):
        assert title in heading
    assert "pp" not in heading.replace("dp_", "")


def test_digits_show_the_rank_that_differs(events: SimpleNamespace) -> None:
    lines = rendered(events.rows(4, norm=0.7760620001, odd={2: 0.7760620002}))
    assert sum("0.7760620001" in line for line in lines) == 3
    assert sum("0.7760620002" in line for line in lines) == 1


def test_a_large_world_shows_its_ends_and_those_that_differ(events: SimpleNamespace) -> None:
    rows = events.rows(200, odd={50: 0.1, 120: float("nan")})
    rows[77]["without_gradient"] = 9
    lines = rendered(rows)
    assert ranks_shown(lines) == [*range(8), 50, 77, 120, *range(192, 200)]
    assert "181 of 200 ranks left out" in lines
    assert sum(line.strip() == "..." for line in lines) == 4


def test_a_large_world_in_which_all_differ_stays_readable(events: SimpleNamespace) -> None:
    lines = rendered(events.rows(1000, odd={rank: float(rank) for rank in range(1000)}))
    assert len(lines) < 80
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80])
def test_a_narrow_terminal_loses_columns_and_no_numbers(events: SimpleNamespace, width: int) -> None:
    lines = rendered(events.rows(8), width)
    assert max(map(len, lines)) <= width
    assert ranks_shown(lines) == list(range(8))
    if width >= 30:
        assert sum("0.776062" in line for line in lines) == 8
    assert any("too narrow for" in line for line in lines) == (width < 96)


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), None, 1e308, 0.0])
def test_any_norm_can_be_shown(events: SimpleNamespace, norm: float | None) -> None:
    assert ranks_shown(rendered(events.rows(2, norm=norm, local_norm=norm, contributed=norm))) == [0, 1]


def test_names_are_text_and_not_markup(events: SimpleNamespace) -> None:
    assert any("[red]x[/red]" in line for line in rendered(events.rows(1, host="[red]x[/red]")))
