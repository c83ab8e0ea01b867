"""Last words of real processes: they name the requests that stopped the process, and nobody where others did."""

import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from raydix.actors.last_words import condemn, named_requests
from tests.unit.processes import Process, running

NAME = "worker:1"
BEGINNING = """
import ctypes, faulthandler, re, sys, threading, time
from pathlib import Path
from raydix.actors.last_words import LastWords
words = LastWords(Path(sys.argv[1]), sys.argv[2])
begun = threading.Barrier(3)

def engine(work=lambda: time.sleep(3600)):
    words.note(["a", "b"])
    begun.wait()
    work()

def grammar(work=lambda: time.sleep(3600)):
    words.note(["a"])
    words.note(["c"])
    begun.wait()
    work()

def start(first, second, says=lambda: print(flush=True)):
    for target in (first, second):
        threading.Thread(target=target, daemon=True).start()
    begun.wait()
    says()
    time.sleep(3600)

def hold():
    print(flush=True)
    re.match("(a+)+$", "a" * 60 + "b")  # C code that returns to no other thread

def wait_for_word():
    sys.stdin.readline()

def overflow():
    wait_for_word()
    deep = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    array = (ctypes.c_int * 2)()
    compare = deep(lambda *_: ctypes.CDLL(None).qsort(array, 2, 4, compare) or 0)
    sys.setrecursionlimit(10**9)
    compare(None, None)
"""


def process(folder: Path, work: str) -> AbstractContextManager[Process]:
    """A process with two threads that compute, which has begun."""
    return running(BEGINNING + work, str(folder), NAME)


def named_at_end(folder: Path, process: Process) -> tuple[str, ...]:
    """The requests named after the process has been let go on, and has ended."""
    process.let_go()
    process.wait()
    return named_requests(NAME, is_dead=True, folder=folder)


@pytest.mark.parametrize(
    ("work", "named"),
    [
        ("start(lambda: engine(lambda: (wait_for_word(), ctypes.string_at(0))), grammar)", ("a", "b")),
        ("start(engine, lambda: grammar(lambda: (wait_for_word(), ctypes.CDLL(None).abort())))", ("c",)),
        ("start(engine, lambda: grammar(overflow))", ("c",)),
        (
            "start(engine, lambda: (grammar(wait_for_word), words.end('the device is broken'), exit_now()))",
            ("a", "b", "c"),
        ),
    ],
    ids=["a read of nowhere", "abort", "a stack that overflows", "a device that is broken"],
)
def test_an_end_by_what_was_computed_names_the_requests(tmp_path: Path, work: str, named: tuple[str, ...]) -> None:
    code = "import os\nexit_now = lambda: os._exit(1)\n" + work
    with process(tmp_path, code) as child:
        assert named_at_end(tmp_path, child) == named


def test_sigkill_names_nobody(tmp_path: Path) -> None:
    with process(tmp_path, "start(lambda: engine(hold), grammar, says=int)") as child:
        child.kill(is_reaped=False)
        assert not named_requests(NAME, is_dead=True, folder=tmp_path)
        assert not named_requests(NAME, is_dead=False, folder=tmp_path)


def test_a_process_whose_lock_is_held_names_the_holder_until_it_is_stopped(tmp_path: Path) -> None:
    with process(tmp_path, "start(engine, lambda: grammar(hold), says=int)") as child:
        end = time.monotonic() + 60
        while (named := named_requests(NAME, is_dead=False, folder=tmp_path)) != ("c",) and time.monotonic() < end:
            time.sleep(0.01)  # the thread has just said that it begins
        assert named == ("c",)
        child.stop()
        assert not named_requests(NAME, is_dead=False, folder=tmp_path)
        condemn(NAME, tmp_path)
        assert not named_requests(NAME, is_dead=True, folder=tmp_path), "whoever stopped it is to blame"


def test_an_event_loop_that_computes_names_nobody(tmp_path: Path) -> None:
    code = "threading.Thread(target=engine, daemon=True).start()\n"
    code += "threading.Thread(target=grammar, daemon=True).start()\nbegun.wait()\nhold()"
    with process(tmp_path, code):
        assert not named_requests(NAME, is_dead=False, folder=tmp_path)


def test_a_process_that_its_host_kills_because_it_hangs_names_all(tmp_path: Path) -> None:
    with process(tmp_path, "start(engine, grammar)") as child:
        end = time.monotonic() + 60
        while (named := named_requests(NAME, is_dead=False, folder=tmp_path)) and time.monotonic() < end:
            time.sleep(0.01)  # the threads are about to wait
        assert not named, "nobody computes"
        condemn(NAME, tmp_path)
        child.kill()
        assert named_requests(NAME, is_dead=True, folder=tmp_path) == ("a", "b", "c")


def test_more_requests_than_there_is_room_for_are_never_one(tmp_path: Path) -> None:
    code = "many = ['r' * 30000, 's' * 30000]\n"
    code += "start(lambda: (begun.wait(), words.note(many), wait_for_word(), ctypes.string_at(0)), grammar)"
    with process(tmp_path, code) as child:
        assert len(named_at_end(tmp_path, child)) == 2


def test_without_words_nobody_is_named(tmp_path: Path) -> None:
    condemn(NAME, tmp_path)
    assert not named_requests(NAME, is_dead=True, folder=tmp_path)
    (tmp_path / NAME).write_bytes(b"cut")
    assert not named_requests(NAME, is_dead=False, folder=tmp_path)
