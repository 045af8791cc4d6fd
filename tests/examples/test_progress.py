import fcntl
import os
import pty
import select
import struct
import sys
import termios

import progress
from progress import Progress


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
        bar = Progress("reading", total=1000)
        bar._bar.mininterval = 0
        for done in (100, 300, 600):
            bar.at(done)
        shown = _read_bar("60%", master)
        bar.close()
    os.close(master)
    assert "reading:  60%" in shown
    assert "600/1.00k [00:00<00:00, " in shown
    assert "B/s]" in shown


def test_a_log_has_a_line_from_time_to_time(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = Progress("reading", total=10_000_000_000)
    for second in range(0, 100, 10):  # goes on at 1 GB, 10 MB a second
        now[0] = float(second)
        bar.at(1_000_000_000 + 10_000_000 * second)
    bar.close()
    assert capsys.readouterr().err.splitlines() == [
        "reading: 13 %, 10.0 MB/s, 14 minutes left",
        "reading: 16 %, 10.0 MB/s, 14 minutes left",
        "reading: 19 %, 10.0 MB/s, 14 minutes left",
    ]
