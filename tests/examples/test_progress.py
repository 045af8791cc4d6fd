import fcntl
import os
import pty
import select
import struct
import sys
import termios

import progress as module
import pytest
from progress import move, progress


def _read_bar(percentage, master):
    """What the terminal shows to the end of this bar; it comes in pieces."""
    shown = ""
    while "]" not in shown.partition(percentage)[2] and select.select([master], [], [], 5)[0]:
        shown += os.read(master, 1 << 16).decode(errors="ignore")
    return shown


def test_a_terminal_has_a_bar_with_rate_and_time_left(monkeypatch):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        bar = progress("reading", total=1000, unit="B")
        bar.mininterval = 0
        for done in (100, 300, 600):
            move(bar, done)
        shown = _read_bar("60%", master)
        bar.close()
    os.close(master)
    assert "reading:  60%" in shown
    assert "600/1.00k [00:00<00:00, " in shown
    assert "B/s]" in shown


@pytest.fixture
def now(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: seconds[0])
    return seconds


def test_a_log_has_a_line_from_time_to_time(now, capsys):
    with progress("reading", total=10_000_000_000, unit="B") as bar:
        for second in range(0, 26, 5):  # goes on at 1 GB, 10 MB a second
            now[0] = float(second)
            move(bar, 1_000_000_000 + 10_000_000 * second)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 11 %, 1.10G of 10.0GB, 10.0MB/s, 14:50 left",
        "reading: 12 %, 1.20G of 10.0GB, 10.0MB/s, 14:40 left",
    ]


def test_steps_go_on_where_they_were_and_have_a_note(now, capsys):
    with progress("epoch 0", total=100, unit=" steps", first=60) as bar:
        for second in range(1, 13):
            now[0] = float(second)
            bar.set_postfix_str("loss 0.5", False)
            bar.update()
    assert capsys.readouterr().err == (
        "epoch 0: 70 %, 70 of 100 steps, 1.00 steps/s, 00:30 left, loss 0.5\n"
    )


def test_what_is_silent_shows_nothing(monkeypatch, capsys):
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0)
    with progress("epoch 0", total=5, unit=" steps", is_silent=True) as bar:
        bar.update()
    assert capsys.readouterr().err == ""
