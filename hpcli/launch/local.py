"""Local ranks: `RankServer` keeps one warmed-up server process and runs sets of ranks forked from it.

This process never imports a framework, so it stays small and starts at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hpcli.launch.channel import Message, receive_packet, send_packet
from hpcli.launch.errors import LaunchError
from hpcli.launch.output import print_line
from hpcli.launch.watch import RankSet

if TYPE_CHECKING:
    from typing_extensions import Self

# The server sees the modules that this process sees, wherever it was started from.
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv.pop()); import hpcli.launch.server as s; s.main()"
)

_WARM_UPS = {"cpu": "warm", "sim-npu": "warm_simulated_npu", "npu": "load_npu"}


class RankServer:
    """Context manager around one server process that has imported everything and warmed up.

    The server starts when the block is entered and warms up while the caller goes on; `run` waits for it.
    Open it in the main thread, or in a thread that lives as long as the server is needed.
    """

    def __init__(self, device: str = "cpu", *, warm_up: str | None = None) -> None:
        """Prepare a server for ranks that train on `device`.

        Args:
            device: "cpu" and "sim-npu" warm up with a training step; for others modules are only imported,
                since a device must not be touched before the fork.
            warm_up: "package.module:function" to call in the server instead.
        """
        self._device = device
        self._warm_up = warm_up or f"hpcli.launch.warm:{_WARM_UPS.get(device, 'load')}"
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder: Path | None = None
        self._ready = False
        self._notices: list[Message] = []
        self._runs = 0
        self._current: RankSet | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def folder(self) -> Path | None:
        """The private temporary folder, None when closed."""
        return self._folder

    def run(
        self,
        target: str,
        payload: dict[str, Any],
        world_size: int,
        *,
        timeout_seconds: float,
        on_event: Callable[[dict[str, Any]], None],
        on_output: Callable[[int, str], None] = print_line,
    ) -> None:
        """Run `target` ("package.module:function", called with a RankContext and the payload) on `world_size` ranks.

        Args:
            payload: JSON-able; every rank gets its own copy.
            timeout_seconds: after this time without a sign of life a rank counts as hung.
            on_event: called here, in order, with what ranks emit; an exception in it ends the run and is raised.
            on_output: called with rank and line for what ranks print.

        Raises:
            RankFailure: a rank failed; no rank runs any more.
            LaunchError: ranks could not be started.
        """
        if world_size < 1:
            raise LaunchError(f"cannot start {world_size} ranks: at least 1 is needed")
        if self._current is not None:
            raise RuntimeError("a set of ranks is running on this server already")
        try:
            data = json.dumps(payload).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise LaunchError(f"the payload cannot be sent to the ranks as JSON: {error}") from error
        self.wait_until_ready()
        assert self._folder is not None
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        try:
            folder.mkdir()
            (folder / "payload.json").write_bytes(data)
            ranks = RankSet(self, folder, target, world_size, timeout_seconds, on_event, on_output)
        except OSError as error:
            raise LaunchError(f"cannot prepare the ranks in {folder}: {error}") from error
        self._current = ranks
        ended = False
        try:
            try:
                ranks.start()
            except OSError as error:
                raise LaunchError(f"cannot start rank {len(ranks.ranks)} of {world_size}: {error}") from error
            ranks.watch()
        finally:
            self._current = None
            try:
                ended = ranks.close()
            finally:
                if not ended:
                    self.close()  # the kernel ends the ranks with their server
                shutil.rmtree(folder, ignore_errors=True)

    def request_stop(self) -> None:
        """Ask the running ranks to end early (`RankContext.stop_requested`); safe in a signal handler."""
        if self._current is not None:
            self._current.board.request_stop()

    def close(self) -> None:
        """End the server and its ranks and remove the private folder; `run` would start a new server."""
        process, control, folder = self._process, self._control, self._folder
        self._process = self._control = self._folder = None
        self._ready = False
        self._notices.clear()
        try:
            if control is not None:
                control.close()
            if process is not None:
                try:
                    process.wait(timeout=1.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        finally:
            if process is not None and process.poll() is None:
                process.kill()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    # -- the server's process ---------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="hpcli-"))
            self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            in_main_thread = threading.current_thread() is threading.main_thread()
            arguments = [str(other.fileno()), str(os.getpid() if in_main_thread else 0), str(self._folder)]
            with other, open(self._folder / "server.log", "wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, *arguments, self._warm_up, json.dumps(sys.path)],
                    env={"TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor")} | server_environment(os.environ, self._device),
                    pass_fds=(other.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # the terminal's Ctrl-C is for this process alone
                )
        except OSError as error:
            self.close()
            raise LaunchError(f"cannot start the rank server: {error}") from error
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """Return when the server has warmed up, as `run` does by itself; for those who measure what comes after.

        Raises:
            LaunchError: it cannot.
        """
        if self._ready:
            return
        if self._process is None:
            self._start()
        try:
            answer = self._receive()
            if not answer.get("ready"):
                raise LaunchError(f"the ranks cannot be started: {answer['message']}", answer["details"])
        except BaseException:
            self.close()
            raise
        self._ready = True

    def _receive(self, flags: int = 0) -> Message:
        assert self._control is not None
        message, _ = receive_packet(self._control, flags)
        if message is None:
            raise self._server_died()
        return message

    def _server_died(self) -> LaunchError:
        assert self._process is not None and self._folder is not None
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(timeout=1.0)
        how = (
            f"was killed by signal {-status}"
            if status is not None and status < 0
            else f"exited with {status}"
        )
        log = ""
        with contextlib.suppress(OSError):
            log = (self._folder / "server.log").read_text(errors="replace")
        tail = "".join(f"\n  {line}" for line in log.splitlines()[-12:])
        return LaunchError(f"the rank server {how}{tail}", log)

    # -- ServerLink -------------------------------------------------------------------------------------------

    def fork(self, request: Message, descriptors: tuple[int, ...]) -> int:
        assert self._control is not None
        try:
            send_packet(self._control, {"do": "fork", "request": request}, descriptors)
        except (BrokenPipeError, ConnectionResetError):
            raise self._server_died() from None
        while True:
            answer = self._receive()
            if "forked" not in answer:
                self._notices.append(answer)
            elif answer["forked"] is None:
                raise LaunchError(f"cannot start rank {request['rank']}: {answer['error']}")
            else:
                return int(answer["forked"])

    def notices(self) -> list[Message]:
        """What the server has reported about ranks' ends since the last call."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._notices.append(self._receive(socket.MSG_DONTWAIT))
        notices, self._notices = self._notices, []
        return notices

    def kill_ranks(self) -> None:
        assert self._control is not None
        send_packet(self._control, {"do": "kill"})

    def fileno(self) -> int:
        assert self._control is not None
        return self._control.fileno()


def use_one_thread(environment: MutableMapping[str, str]) -> None:
    """Before torch or NumPy is imported: one thread per rank, whatever the machine has."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[name] = "1"


def meet_on_loopback(environment: MutableMapping[str, str]) -> None:
    """For ranks of one machine: gloo looks up the machine's own name otherwise, which need not resolve."""
    if os.path.isdir("/sys/class/net/lo"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")


def server_environment(environment: Mapping[str, str], device: str) -> dict[str, str]:
    """One thread per rank, decided before any library reads it, and local ranks meet on the loopback device."""
    result = dict(environment)
    use_one_thread(result)
    # torch_npu is loaded where it is asked for; by itself it breaks `import torch` on machines without CANN.
    result["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    if device in ("cpu", "sim-npu"):
        # Autograd starts a thread for every accelerator it sees, and initialises CUDA: neither survives a fork.
        result["CUDA_VISIBLE_DEVICES"] = ""
    meet_on_loopback(result)
    return result
