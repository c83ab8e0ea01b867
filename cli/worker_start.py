"""Program that Ray's raylet starts for each of its worker processes, in the place of Ray's own.

It hands its arguments, environment and open files to the template of workers (`raydix.cli.worker_template`), which
forks the worker, and ends: the raylet knows a worker by the id in its arguments, and by the process that registers
under this id. Where the template is gone, or the worker is to have an environment of its own (Ray's `runtime_env`),
this program becomes Ray's own, as long as there is a raylet.

Only builtin modules are used, without `site`: Python is to start quickly.
"""

import _signal  # type: ignore[import-not-found]  # `signal` and `socket` take longer to import than all the rest
import _socket
import marshal
import os
import resource
import struct
import sys

TEMPLATE = "RAYDIX_WORKER_TEMPLATE"  # environment variable: socket of the template of workers
# Environment variable: the folder of the programs that Ray itself starts workers with.
RAYS_PROGRAMS = "RAYDIX_RAYS_WORKER_PROGRAMS"
RAYLET_PID = "RAY_RAYLET_PID"  # environment variable: the raylet, which starts this program
# The program that sets the environment of a worker up, and the worker itself.
SETUP, WORKER = "setup_worker.py", "default_worker.py"
FRAME = struct.Struct("!Q")  # length of the marshalled message that follows, in bytes
# Arguments of the program that sets up the environment; the others are the worker's.
RAYS_OWN_ARGUMENTS = ("--serialized-runtime-env-context=", "--language=")
NO_RUNTIME_ENV = ("", "{}")


def main() -> None:
    """Have the template fork the worker, or become Ray's own program."""
    arguments = sys.argv[1:]
    path = os.environ.get(TEMPLATE)
    if path and _is_plain(arguments) and _is_forked(path, arguments):
        return
    # The template ends with the server, and so does the raylet: a worker of Ray's own would look for it for seconds.
    if os.getppid() == int(os.environ[RAYLET_PID]):
        programs = os.environ[RAYS_PROGRAMS]
        command = [sys.executable, f"{programs}/{SETUP}", f"{programs}/{WORKER}", *arguments]
        os.execv(sys.executable, command)


def _is_plain(arguments: list[str]) -> bool:
    """Whether this is a worker in Python with the environment of the raylet."""
    context, language = RAYS_OWN_ARGUMENTS
    return f"{language}PYTHON" in arguments and all(
        argument.removeprefix(context) in NO_RUNTIME_ENV for argument in arguments if argument.startswith(context)
    )


def _is_forked(path: str, arguments: list[str]) -> bool:
    """Have the template fork the worker with this process's environment; False if it does not."""
    order = {
        "arguments": [argument for argument in arguments if not argument.startswith(RAYS_OWN_ARGUMENTS)],
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109  (`pathlib` would have to be imported)
        "blocked_signals": [int(number) for number in _signal.pthread_sigmask(_signal.SIG_BLOCK, ())],
        "niceness": os.nice(0),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }
    message = marshal.dumps(order)
    files = struct.pack("3i", 0, 1, 2)

    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.connect(path)
        connection.sendmsg([FRAME.pack(len(message))], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
        connection.sendall(message)
        return bool(connection.recv(1))  # nothing where the template has ended
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    main()
