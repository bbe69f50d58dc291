"""Peak memory of one implementation above its inputs and parameters.

Measured in a process of its own, forked from one that has computed nothing yet, so that neither cached scratch nor
pages that an earlier row left behind hide what a call needs. A small call first loads code and starts threads; then the
peak of the resident set is reset, and the row's work done once. Outputs and gradients count: they too have to fit.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import re
import resource
import sys
from multiprocessing.connection import Connection

from .rows import Row

TIMEOUT_SECONDS = 600


def peak_memory(row: Row, name: str, threads: int) -> int | None:
    """Bytes that implementation `name` needs for the row, or None where that cannot be told."""
    if name == "compiled" or not sys.platform.startswith("linux"):
        return None  # compiling takes more memory than running
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "mha_ext"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, row, name, threads), daemon=True)
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(TIMEOUT_SECONDS) else None
    except EOFError:  # it died, out of memory most likely
        return None
    finally:
        process.kill()
        process.join()


def _measure(sender: Connection, row: Row, name: str, threads: int) -> None:
    import torch

    from .peers import make_candidates, make_problem

    torch.set_num_threads(threads)
    (candidate,) = make_candidates(make_problem(row.small()), only=name)
    candidate.prepare()
    candidate()
    (candidate,) = make_candidates(make_problem(row), only=name)
    candidate.prepare()
    before = reset_peak()
    candidate()
    sender.send(max(0, peak() - before))


def reset_peak() -> int:
    """Gives free pages back and returns the resident set's size, from which the peak now grows."""
    import mha_ext

    mha_ext._C.release_kept_memory()
    ctypes.CDLL(None).malloc_trim(0)
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:  # not allowed here: the peak so far is the inputs', little more
        return peak()
    return _status("VmRSS")


def peak() -> int:
    """Bytes of the largest resident set since reset_peak. The fallback counts the starting process too."""
    return _status("VmHWM") or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes; 0 when it is not there."""
    try:
        with open("/proc/self/status") as file:
            found = re.search(rf"^{field}:\s+(\d+) kB", file.read(), re.MULTILINE)
    except OSError:
        return 0
    return 1024 * int(found.group(1)) if found else 0
