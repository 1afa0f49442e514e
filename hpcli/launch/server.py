"""The rank server: a process that has imported everything once and forks ranks on request.

Ranks that are forked share its memory and start in milliseconds. Python's own forkserver is not used: it
ignores an ImportError of its preload (each rank would import everything again), takes its environment from
the parent's, imports `__main__` in every child and cannot be ended or started anew.

The parent holds the other end of the control socket. When that end closes, for whatever reason, the server
ends all ranks, removes the private folder and leaves; the kernel ends the ranks if the server itself dies.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import sys
import traceback
from pathlib import Path

from hpcli.launch.channel import PACKET_SIZE, Message, receive_packet, send_packet
from hpcli.launch.process import die_with_parent, set_process_name, thread_count
from hpcli.launch.rank import RankRequest, load_function, run_rank

# The kernel's word to the server; no terminal can send it, because the session is the server's own.
PARENT_GONE = signal.SIGHUP


class _ParentGone(BaseException):
    pass


def _on_parent_gone(*_: object) -> None:
    raise _ParentGone


class Server:
    """Forks ranks and reaps them; single-threaded, and so safe to fork."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.ranks: dict[int, int] = {}  # pid -> rank
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.wake_read, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self.wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_read, 4096)
            self.reap()
            if self.control.fileno() in ready:
                message, descriptors = receive_packet(self.control)
                if message is None:
                    return
                if message["do"] == "fork":
                    self.fork(message, descriptors)
                elif message["do"] == "kill":
                    self.kill()

    def fork(self, message: Message, descriptors: list[int]) -> None:
        request = RankRequest(**message["request"], descriptors=tuple(descriptors))
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            send_packet(self.control, {"forked": None, "error": str(error)})
            return
        finally:
            if os.getpid() == server:
                for descriptor in descriptors:
                    os.close(descriptor)
        if pid == 0:
            self.become_rank(server, request)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the child does the same; whoever is first
        self.ranks[pid] = request.rank
        send_packet(self.control, {"forked": pid})

    def become_rank(self, server: int, request: RankRequest) -> None:
        """In the child, never returns."""
        try:
            if not die_with_parent(server, signal.SIGKILL):
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(PARENT_GONE, signal.SIG_DFL)
            os.setpgid(0, 0)
            for descriptor in (self.control.fileno(), self.wake_read, self.wake_write):
                os.close(descriptor)
            run_rank(request)
        except BaseException:  # noqa: BLE001 (nothing may run on as a second server)
            traceback.print_exc()  # to the rank's output if it has got that far, else to the server's log
            sys.stderr.flush()
        finally:
            os._exit(1)

    def reap(self) -> None:
        """Report every rank that has ended, and end what it left behind in its process group."""
        for pid in list(self.ranks):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            # The group's number cannot be taken by others as long as its leader has not been waited for.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            send_packet(self.control, {"ended": self.ranks.pop(pid), "pid": pid, "status": status})

    def kill(self) -> None:
        for pid in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        for pid in self.ranks:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.ranks.clear()


def warm_up(name: str) -> Message:
    """Import and run the warm-up; what the parent is told about it."""
    try:
        load_function(name)()
    except Exception as error:  # noqa: BLE001 (the parent shows it)
        kind = type(error).__name__
        return {
            "ready": False,
            "message": str(error) if kind == "LaunchError" else f"{kind}: {error}"[:2000],
            "details": traceback.format_exc()[-PACKET_SIZE // 2 :],
        }
    if thread_count() != 1:
        return {
            "ready": False,
            "message": f"the warm-up left {thread_count()} threads, so ranks cannot be forked safely "
            "(is OMP_NUM_THREADS changed by an import?)",
            "details": "",
        }
    return {"ready": True}


def main() -> None:
    """Arguments: control descriptor, parent's pid or 0, private folder, warm-up function."""
    descriptor, parent, folder, warm_up_name = sys.argv[1:5]
    control = socket.socket(fileno=int(descriptor))
    control.set_inheritable(False)
    set_process_name("hpcli:server")
    # The parent decides how a run ends: Ctrl-C and a scheduler's SIGTERM to every process must not part the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(PARENT_GONE, _on_parent_gone)
    server = Server(control)
    try:
        if int(parent) and not die_with_parent(int(parent), PARENT_GONE):
            return
        gc.disable()  # no collections while importing; also keeps pages free of holes
        answer = warm_up(warm_up_name)
        gc.collect()
        gc.freeze()  # collections in ranks then leave the shared pages alone
        gc.enable()
        send_packet(control, answer)
        if answer["ready"]:
            server.serve()
    except (_ParentGone, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        signal.signal(PARENT_GONE, signal.SIG_IGN)
        server.end()
        shutil.rmtree(Path(folder), ignore_errors=True)
        os._exit(0)
