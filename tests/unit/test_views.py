"""What the terminal shows: pure views at every size of screen and job, keys, bytes of a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.style import Style

from tmrun.core.conditions import condition
from tmrun.tui import live, styles, timeline, views
from tmrun.tui.grid import attention, columns, grid, legend
from tmrun.tui.ui import Order, Shown, Ui, press
from tmrun.tui.views import Screen

SIZES = [(80, 24), (120, 40), (200, 60)]
COUNTS = [8, 64, 1000]


def node(index: int, state: str = "active", reason: str = "", **more: Any) -> dict[str, Any]:
    seated = state in ("active", "draining", "failed", "down")
    ranks = [8 * index + r for r in range(8)] if seated else []
    row = {
        "name": f"node{index}", "state": state, "reason": reason, "role": "active" if ranks else "standby",
        "slot": index if ranks else None, "ranks": ranks, "pids": [100 + index], "step": 88231 if ranks else None,
        "step_s": 0.5, "step_age_s": 0.2,
        "labels": {"rack": f"r{index // 8}"}, "address": f"10.0.0.{index}", "cordoned": False, "cordon_reason": "",
        "gpus": {"total": 8, "used": 8 if ranks else 0},
    }  # fmt: skip
    return row | more


def job(count: int, **states: str) -> dict[str, Any]:
    """A status of ``count`` nodes, the last few being standbys; ``states``: node5="failed"."""
    nodes = [node(i, "standby" if i >= count - max(1, count // 16) else "active") for i in range(count)]
    for name, state in states.items():
        index = int(name.removeprefix("node"))
        nodes[index] = node(index, state, f"why {name} is {state}")
    return {
        "api_version": 1, "job": "train", "state": "running", "reason": "", "epoch": 11, "step": 88231, "step_s": 0.52,
        "coordinator": "node3", "exit_code": None, "checks": [], "paused": None, "migration": None, "requests": [], "last": None,
        "standby": {"warm": max(1, count // 16), "warming": 0, "wanted": max(1, count // 16)}, "nodes": nodes,
        "gpus": {"total": 8 * count, "used": 8 * (count - max(1, count // 16))},
    }  # fmt: skip


ROW = {
    "epoch": 12, "cause": "drain", "reason": "ECC", "leaver": "node7", "joiner": "node63", "ranks": list(range(24, 32)), "step": 88231,
    "detect_s": 0.0, "bind_s": 0.2, "comm_s": 0.1, "state_s": 0.6, "redo_s": 0.05, "pause_s": 0.95, "bytes": 3_200_000_000,
}  # fmt: skip
MIGRATION = {
    "id": 3, "epoch": 12, "kind": "drain", "phase": "preparing", "reason": "ECC, ticket 8812", "op": "d-41f",
    "moves": [{"slot": 3, "ranks": list(range(24, 32)), "leaver": "node7", "joiner": "node63"}],
    "phases": [
        {"name": "prepare", "state": "now", "done": 40, "total": 65, "detail": "waiting for stayer node9"},
        {"name": "commit", "state": "next", "done": 0, "total": 1, "detail": ""},
        {"name": "state", "state": "next", "done": 0, "total": 8, "detail": ""},
    ],
}  # fmt: skip


def render(renderable: Any, width: int, *, color: bool = False) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=200, force_terminal=color, no_color=not color, highlight=False).print(renderable)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("page", ["", "details", "events", "logs", "help"])
def test_top_fills_the_screen_exactly_and_names_every_bad_node(size: tuple[int, int], count: int, page: str) -> None:
    width, height = size
    status = {**job(count, node5="failed", node7="draining"), "migration": MIGRATION, "checks": [condition("STANDBY_LOW", "3 of 4")]}
    events = [{"time": 1000.0 + i, "node": "node1", "text": f"event {i}"} for i in range(300)]
    lines = render(views.top(Screen(status, [ROW], events, 1.5), width, height, Ui("node5", page)), width)
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "STANDBY_LOW" in text
    if not page:
        assert "node5 failed (slot 5, ranks 40-47): why node5 is failed" in text
        assert "node7 draining" in text
        assert "prepare" in text and "40/65" in text
        assert "event 299" in text
        assert "= active" in text and "F failed 1" in text


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_many_failures_are_folded_but_none_is_hidden(size: tuple[int, int], count: int) -> None:
    width, height = size
    broken = {f"node{i}": "failed" for i in range(count // 4)}
    text = "\n".join(render(views.top(Screen(job(count, **broken)), width, height, Ui()), width))
    last = count // 4 - 1
    assert f"failed: node[0-{last}]" in text or f"node{last} failed" in text
    assert f"F failed {count // 4}" in text


def test_the_roomiest_form_that_fits() -> None:
    few, many, most = job(8)["nodes"], job(64)["nodes"], job(1000)["nodes"]
    assert "ranks 0-7 step 88231" in grid(few, 80, 10)[0].plain
    assert "node0 =" in grid(many, 120, 12)[0].plain
    assert grid(most, 120, 12)[0].plain.startswith("node0") and "==========" in grid(most, 120, 12)[0].plain
    assert grid(most, 80, 15)[14].plain.split() == ["node938", "..", "node999", "s62"]
    assert len(grid(job(8000)["nodes"], 80, 10)) <= 10
    assert grid([], 80, 10) == [] and grid(few, 80, 0) == []


def test_every_letter_has_a_meaning_and_cordoned_nodes_stand_out() -> None:
    nodes = [node(0), node(1, cordoned=True), node(2, "failed", "x"), node(3, "unheard-of")]
    told = legend(nodes, 120).plain
    assert told.startswith(("F failed 1", "? unheard-of"))
    assert "C active cordoned 1" in told and "= active 1" in told


def test_attention_says_why_worst_first() -> None:
    nodes = [node(0, "warming", "rehearsing"), node(1, "failed", "ECC"), node(2, "down", "its lease is gone")]
    lines = [line.plain for line in attention(nodes, 100, 5)]
    assert [line.split()[0] for line in lines] == ["F", "X"], "a node that warms up needs nobody, while others do"
    assert attention([nodes[0]], 100, 5)[0].plain.split()[0] == "w"
    assert attention([node(0)], 100, 5) == []


@pytest.mark.parametrize("count", COUNTS)
def test_up_and_down_move_by_a_line_of_the_grid(count: int) -> None:
    nodes = job(count)["nodes"]
    for width, height in ((80, 10), (200, 30)):
        per_line = columns(nodes, width, height)
        assert len(grid(nodes, width, height)) == -(-count // per_line)


def test_status_of_few_is_a_table_of_many_a_grid() -> None:
    text = "\n".join(render(views.status_view({**job(8, node2="failed"), "last": ROW}, 120), 120))
    assert "healthy" in text and "node2  failed" in " ".join(text.split("\n")).replace("   ", "  ")
    assert "last: epoch 12 drain node7 -> node63 (ranks 24-31), paused 0.95 s" in text
    many = render(views.status_view(job(1000, node500="down"), 100), 100)
    assert len(many) < 60 and any("node500 down" in line for line in many)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_history_and_nodes_lose_nothing_on_a_narrow_screen(width: int) -> None:
    why = "node1 rank 2: killed by SIGKILL: perhaps out of memory; `dmesg` on this host knows"
    lines = render(views.history_view([{**ROW, "reason": why}], width), width)
    text = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width and "…" not in text
    assert all(word in text for word in ("node7", "node63", "24-31", "88231", "0.95", *why.split()))
    assert ("pause_s" in text) == (width >= 120), "a table where there is room for one"
    if width >= 80:
        told = render(views.nodes_table([node(0), node(1, "failed", why)]), width)
        assert all(any(word in line for line in told) for word in ("node1", "failed", "8-15", "88231", *why.split()))


def test_only_a_job_that_trains_is_called_healthy() -> None:
    for state, healthy in (("running", True), ("recovering", False), ("migrating", False), ("succeeded", False), ("rendezvous", False)):
        assert [line.plain for line in views.health({**job(8), "state": state})] == (["healthy"] if healthy else [])


def test_a_paused_job_a_silent_store_and_an_open_request_are_shown() -> None:
    paused = {**job(8), "state": "paused", "paused": {"reason": "debugging"}, "checks": [condition("PAUSED", "automatic ...")]}
    paused["requests"] = [{"id": "d-1", "verb": "drain", "nodes": ["node1"], "reason": "ECC", "force_after_s": 600.0}]
    silent = views.stale(views.stale(paused, 11.0, ""), 12.0, "the workers of this machine are in step 9")
    text = "\n".join(render(views.top(Screen(silent), 120, 24, Ui()), 120))
    assert (
        "AUTOMATION PAUSED" in text
        and "STORE_LOST: no answer for 12 s, all below is what was last known; the workers of this machine are in" in text
    )
    assert text.count("STORE_LOST") == 1
    assert "open request d-1: drain node1 (ECC), by force after 10 min" in "\n".join(render(views.status_view(paused), 120))


def test_where_a_pause_went_is_one_bar() -> None:
    head, bar, words = timeline.where_it_went(ROW, 80)
    assert head.plain.startswith("epoch 12 drain node7 -> node63") and len(bar.plain.strip()) in range(55, 62)
    assert "state 0.60 s" in words.plain
    assert len(timeline.where_it_went({**ROW, "pause_s": None}, 80)) == 1


def test_transfers_show_bytes_rate_and_what_is_left() -> None:
    moving = {**MIGRATION, "transfers": [{"node": "node63", "done": 1.2e9, "total": 3.2e9, "rate": 1.1e9, "left_s": 1.8}]}
    text = "\n".join(line.plain for line in timeline.going_on(moving, 120))
    assert "1.2 GB of 3.2 GB at 1.1 GB/s, 1.80 s left" in text


def test_plain_lines_carry_everything_that_matters() -> None:
    line = views.plain_line({**job(8, node5="failed"), "migration": MIGRATION})
    assert "train  running" in line and "node5 failed: why node5 is failed" in line and "prepare 40/65" in line


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0852, "85 ms"), (0.92, "0.92 s"), (12.3, "12 s"), (200, "3 min"), (9000, "2.5 h")]
)
def test_durations_read_as_people_say_them(value: float | None, text: str) -> None:
    assert styles.seconds(value) == text


def test_sizes_read_as_people_say_them() -> None:
    assert [styles.size(v) for v in (None, 12, 1500, 3.2e9, 4e12)] == ["-", "12 B", "1.5 kB", "3.2 GB", "4.0 TB"]


# -- keys
SHOWN = Shown(tuple(f"node{i}" for i in range(8)), ("node5",), frozenset({"node6"}), False, 4, 100)


def walk(keys: str | list[str], ui: Ui | None = None) -> tuple[Ui, Order | None]:
    ui, order = ui or Ui(), None
    for key in keys:
        ui, order = press(ui, key, SHOWN)
    return ui, order


def test_arrows_select_and_stop_at_the_edges() -> None:
    assert walk(["right"])[0].selected == "node5", "who has selected nothing means the worst node"
    assert walk(["right", "up"])[0].selected == "node1"
    assert walk(["right", "up", "up"])[0].selected == "node1"
    assert walk(["right", "right", "right", "right"])[0].selected == "node7"
    assert walk(["k", "j"], Ui("node2"))[0].selected == "node6"
    assert walk(["n"], Ui("node2"))[0].selected == "node5"


def test_nothing_is_done_without_a_yes() -> None:
    asked, order = walk("d", Ui("node3"))
    assert (asked.asking, order) == (Order("drain", "node3", "drain node3: move its ranks to a warm standby?"), None)
    refused, order = press(asked, "x", SHOWN)
    assert (refused.asking, refused.said, order) == (None, "not done", None)
    assert press(asked, "y", SHOWN)[1] == asked.asking
    assert walk("c", Ui("node6"))[0].asking.verb == "uncordon"  # type: ignore[union-attr]
    assert walk("p")[0].asking.verb == "pause"  # type: ignore[union-attr]
    assert press(Ui(), "d", Shown(()))[0].said == "there is no node yet"


def test_pages_open_and_close() -> None:
    assert walk("e")[0].page == "events"
    assert walk("ee")[0].page == ""
    assert walk(["enter"])[0] == Ui("node5", "details")
    assert walk(["l", "esc"])[0].page == ""
    assert walk("q")[0].done
    scrolled = walk(["e", "up", "up", "down"])[0]
    assert (scrolled.scroll, scrolled.selected) == (1, "node5")
    assert walk(["e", "down"])[0].scroll == 0


def test_the_bytes_of_a_terminal_become_keys() -> None:
    assert live.split(b"\x1b[Aj\x1bOB\rq\x03") == ["up", "j", "down", "enter", "q", "ctrl-c"]
    assert live.split(b"\x1b") == ["esc"]
    assert live.split(b"\xff\x00?") == ["?"]


# -- colours
BACKGROUNDS = {"white": (255, 255, 255), "cream": (253, 246, 227), "black": (0, 0, 0), "dark grey": (30, 30, 30)}


def luminance(color: tuple[int, int, int]) -> float:
    """Relative, as WCAG 2.2 defines it."""
    linear = [v / 255 / 12.92 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", BACKGROUNDS)
def test_every_colour_can_be_read_on_light_and_on_dark(name: str) -> None:
    used = {
        *styles.STYLE.values(), *styles.JOB_STYLE.values(), *timeline._TONE.values(),
        styles.GOOD, styles.WARN, styles.BAD, styles.DIM,
    }  # fmt: skip
    ground = luminance(BACKGROUNDS[name])
    for style in used:
        color = Style.parse(style).color
        assert color is not None
        tone = luminance(tuple(color.get_truecolor()))  # type: ignore[arg-type]
        contrast = (max(tone, ground) + 0.05) / (min(tone, ground) + 0.05)
        assert contrast >= 3.0, f"{style} on {name}: {contrast:.1f} to 1"
