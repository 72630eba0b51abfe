"""The program in whose processes BFCL's API objects live: one an episode, forked from one that has imported them.

    python -I worker.py SOCKET       listens there until its standard input ends, with its owner

A connection is an episode. Requests and replies are lines of JSON:

    {"open": {class: configuration}, "long_context": bool, "known": [[[name, positional, named], ...], ...]}
        -> {"pid": of this episode's process}
    {"call": name, "arguments": {...}}   -> {"result": text} or {"error": text}
    {"end_turn": true}                   -> {"problem": text}     empty: the turn of the user was served

A function is looked up by its name among the public methods of the objects, and called with the arguments; no text of
the policy is evaluated. The known answer runs on objects of its own. A turn is served as BFCL's checker has it: the
public attributes of the objects are equal to those of the known answer's, and the known results of the turn are among
the results so far, each as often. Standard library and `bfcl_eval` only.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from typing import Any, cast

MODULES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
"""The API classes of the multi-turn categories, each with the name of its module and of its documents."""
MEMORY_BYTES = 1 << 30
_PREFIX = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"


class Objects:
    """The API objects of one side of an episode."""

    def __init__(self, configurations: dict[str, Any], *, long_context: bool) -> None:
        self.by_class: dict[str, Any] = {}
        self._methods: dict[str, Any] = {}
        for name, configuration in configurations.items():
            made = getattr(importlib.import_module(f"{_PREFIX}.{MODULES[name]}"), name)()
            if hasattr(made, "_load_scenario"):
                made._load_scenario(copy.deepcopy(configuration), long_context=long_context)
            self.by_class[name] = made
            members = inspect.getmembers(made, predicate=inspect.ismethod)
            self._methods.update((method, bound) for method, bound in members if not method.startswith("_"))

    def call(self, name: str, positional: list[Any], named: dict[str, Any]) -> tuple[str, bool]:
        """The result as the policy reads it, and whether the function raised."""
        try:
            found = self._methods[name](*positional, **named)
        except Exception as problem:  # noqa: BLE001 (whatever the function raises is what the caller is told)
            return f"Error during execution: {problem}", True
        if isinstance(found, str):
            return found, False
        if not isinstance(found, dict):
            return str(found), False
        result = cast("dict[str, Any]", found)
        try:
            return json.dumps(result), False
        except (TypeError, ValueError):
            return str(result), False


class Episode:
    """The policy's objects, the known answer's, and what both have been told so far."""

    def __init__(self, request: dict[str, Any]) -> None:
        def make() -> Objects:
            return Objects(request["open"], long_context=request["long_context"])

        self._own, self._known = make(), make()
        self._answers = iter(request["known"])
        self._results: list[str] = []
        self._num_calls = 0

    def call(self, request: dict[str, Any]) -> dict[str, str]:
        """Run a call of the policy."""
        said, failed = self._own.call(request["call"], [], request["arguments"])
        self._results.append(said)
        self._num_calls += 1
        return {"error" if failed else "result": said}

    def end_turn(self) -> dict[str, str]:
        """Run the known calls of the turn and compare."""
        known, num_calls, self._num_calls = next(self._answers), self._num_calls, 0
        expected = [self._known.call(*call)[0] for call in known]
        if not known:
            return {"problem": ""}
        if not num_calls:
            return {"problem": "no call was made"}
        for name, made in self._known.by_class.items():
            for attribute, value in cast("dict[str, Any]", vars(made)).items():
                if not attribute.startswith("_") and getattr(self._own.by_class[name], attribute) != value:
                    return {"problem": f"{name}.{attribute} is not what it should be"}
        left = list(self._results)
        for result in expected:
            if result not in left:
                return {"problem": "a result that was asked for is missing"}
            left.remove(result)
        return {"problem": ""}


def serve(connection: socket.socket) -> None:
    """One episode, until the connection ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    episode: Episode | None = None
    with connection.makefile("rw", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            request = json.loads(line)
            if "open" in request:
                episode = Episode(request)
                reply: dict[str, Any] = {"pid": os.getpid()}
            elif episode is None:
                raise ValueError(f"worker: the first request must open an episode, got {line[:80]!r}")
            else:
                reply = episode.call(request) if "call" in request else episode.end_turn()
            lines.write(json.dumps(reply) + "\n")
            lines.flush()


def main() -> None:
    """Listen and fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for name in MODULES.values():
        importlib.import_module(f"{_PREFIX}.{name}")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(sys.argv[1])
        server.listen(64)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            ready, _, _ = select.select([server, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                try:
                    serve(connection)
                except BaseException:  # noqa: BLE001 (a fork must never go on as the server)
                    traceback.print_exc()
                finally:
                    os._exit(0)
            connection.close()


if __name__ == "__main__":
    main()
