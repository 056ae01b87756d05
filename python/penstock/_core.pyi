"""The engine of Penstock; use it through `penstock` and `torch.distributed`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

__all__ = [
    "AGGREGATION_VERSION",
    "ENDPOINT_MOST_BYTES",
    "STREAMED_MOST_BUFFERS",
    "CurrentPass",
    "Daemon",
    "EndpointCall",
    "EndpointClient",
    "EndpointMemory",
    "EndpointServer",
    "EndpointWork",
    "Engine",
    "Group",
    "ReadyHook",
    "Reducer",
    "TensorCheck",
    "Ticket",
    "UdpSockets",
    "__version__",
    "aggregate",
    "aggregated_stats",
    "check_daemon_option",
    "check_fork",
    "choose_interfaces",
    "crc32c",
    "daemon_options",
    "first_changed",
    "init_logging",
    "is_reduced",
    "memory_layout",
    "merge",
    "parse_address",
    "settle_callbacks",
    "simd_level",
    "simulate_aggregation",
    "simulate_collective",
    "traffic",
]

__version__: str
AGGREGATION_VERSION: int
ENDPOINT_MOST_BYTES: int
STREAMED_MOST_BUFFERS: int

@final
class Engine:
    def __new__(
        cls,
        *,
        rank: int,
        host: str,
        generation: int,
        addresses: Sequence[str],
        ports: tuple[int, int],
        io_threads: int,
        streams: int,
        streams_within_host: int,
        shared_memory: bool,
        checksum: bool,
        dead_after_s: float,
        socket_buffer_bytes: int,
        flight_recorder: str | None,
        ptracer: str = "launcher",
    ) -> Engine: ...
    def contact(self) -> str: ...
    def join(
        self,
        *,
        id: int,
        generation: int,
        rank: int,
        members: Sequence[str],
        secret: bytes,
        algorithm: str | None,
        name: str,
    ) -> tuple[Group, Ticket]: ...
    def record(self) -> str: ...
    def take_ended(
        self,
    ) -> tuple[list[tuple[str, int | None, str, int, int, int, tuple[int, int] | None]], int, int]: ...
    def write_record(self) -> None: ...
    def share(self, file: int, address: int, length: int) -> int: ...
    def unshare(self, number: int) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def memory_read_bytes(self) -> int: ...
    def stop(self, *, wait: bool = True) -> None: ...

@final
class Group:
    def start(
        self,
        collective: str,
        *,
        dtype: str,
        elements: int,
        bytes: int,
        input: int,
        output: int,
        op: str | None = None,
        factor: float = 1.0,
        rank: int = 0,
        tag: int = 0,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        layout: int = 0,
        priority: int = 0,
        coflow: int = 0,
        hold: bool = False,
        timeout_s: float,
        keep: Any = None,
    ) -> Ticket: ...
    def release(self, ticket: Ticket) -> None: ...
    def reprioritise(self, ticket: Ticket, priority: int) -> None: ...
    def hosts(self) -> list[int]: ...
    def check(self, ranks: Sequence[int], *, whole: bool, farewells: bool = True) -> None: ...
    def channel(self, name: str, *, timeout_s: float) -> tuple[Group, Ticket]: ...
    def leave(self, *, leaves_group: bool = False) -> None: ...
    def expire(self, waited_s: float) -> None: ...
    def abort(self, reason: str, kind: str | None = None) -> None: ...

@final
class Ticket:
    def wait(self, timeout_s: float | None = None) -> bool: ...
    def done(self) -> bool: ...
    def source(self) -> int | None: ...
    def on_done(self, callback: Callable[[], object]) -> None: ...

@final
class EndpointServer:
    def __new__(
        cls, name: str, *, calls: int, request_bytes: int, push_bytes: int, in_flight_bytes: int
    ) -> EndpointServer: ...
    def serve(self, kind: str, name: str, is_served: bool) -> None: ...
    def accept(
        self, engine: Engine, *, id: int, generation: int, members: tuple[str, str], secret: bytes, name: str
    ) -> None: ...
    def next(self) -> EndpointCall | None: ...
    def stats(self) -> dict[str, int] | None: ...
    def close(self, grace_s: float) -> Ticket: ...

@final
class EndpointCall:
    @property
    def client(self) -> int: ...
    @property
    def who(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def priority(self) -> int: ...
    def body(self) -> EndpointMemory | None: ...
    def answer(self, address: int, length: int, keep: Any) -> None: ...
    def fail(self, text: str) -> None: ...

@final
class EndpointMemory:
    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...

@final
class EndpointClient:
    @staticmethod
    def connect(
        engine: Engine,
        *,
        id: int,
        generation: int,
        members: tuple[str, str],
        secret: bytes,
        name: str,
        server: str,
        timeout_s: float,
    ) -> tuple[EndpointClient, EndpointWork]: ...
    def ask(
        self,
        kind: str,
        name: str,
        *,
        body: int = 0,
        length: int = 0,
        into: tuple[int, int] | None = None,
        room: int = 0,
        priority: int = 0,
        timeout_s: float,
        keep: Any = None,
    ) -> EndpointWork: ...
    def reprioritise(self, work: EndpointWork, priority: int) -> None: ...
    def close(self, grace_s: float) -> Ticket: ...

@final
class EndpointWork:
    def wait(self, timeout_s: float | None = None) -> bool: ...
    def done(self) -> bool: ...
    def on_done(self, callback: Callable[[], object]) -> None: ...
    def without_reply(self) -> EndpointWork: ...
    def reply(self) -> EndpointMemory | None: ...

@final
class Reducer:
    def __new__(
        cls,
        *,
        rounds: Group,
        buckets: Group,
        rank: int,
        world: int,
        gradients: Sequence[tuple[str, int, str, int]],
        op: str,
        bucket_bytes: int,
        wire: str | None,
        error_feedback: bool = False,
        check_finite: bool,
        priority: int = 0,
        last_first: bool = False,
        tapers: bool = True,
        timeout_s: float,
    ) -> Reducer: ...
    def submit(self, index: int, address: int, bytes: int, keep: Any, *, absent: bool = False) -> None: ...
    def flush(self) -> Ticket: ...
    def agreed(self) -> Ticket: ...
    def arrival(self, index: int) -> Ticket | None: ...
    def late(self) -> list[int]: ...
    def withdraw(self) -> Ticket: ...
    def was_absent(self, index: int) -> bool: ...
    def apply(self, *, bucket_bytes: int, wire: str | None, algorithm: str | None, streams: int) -> None: ...
    def stats(self) -> dict[str, Any]: ...

@final
class CurrentPass:
    def __new__(cls, task_now: Callable[[], int]) -> CurrentPass: ...
    def follow(
        self,
        task: int,
        handed: dict[int, Any],
        addresses: dict[int, int],
        versions: dict[int, int],
        shared: list[int],
    ) -> None: ...
    def end(self) -> None: ...

@final
class ReadyHook:
    def __new__(
        cls,
        current: CurrentPass,
        reducer: Reducer,
        index: int,
        check: TensorCheck,
        bytes: int,
        element_bytes: int,
        otherwise: Callable[[Any], None],
    ) -> ReadyHook: ...
    def __call__(self, parameter: Any) -> None: ...

@final
class TensorCheck:
    def __new__(cls, example: Any) -> TensorCheck: ...
    def address(self, tensor: Any) -> int | None: ...

@final
class Daemon:
    def __new__(
        cls,
        role: str,
        options: Mapping[str, str],
        *,
        secret: bytes | None,
    ) -> Daemon: ...
    @property
    def address(self) -> str: ...
    @property
    def memory_bytes(self) -> int: ...
    def jobs(self, start: int = 0) -> str | None: ...
    def answer(self, method: str, path: str, body: bytes) -> tuple[int, str]: ...
    def stream(self, call: EndpointCall) -> None: ...
    def drain(self) -> None: ...
    def wait(self, timeout_s: float) -> bool: ...

def check_daemon_option(name: str, text: str) -> None: ...
def check_fork() -> None: ...
def choose_interfaces(named: Sequence[tuple[str, str]], master: str | None) -> tuple[list[tuple[str, str]], str]: ...
def crc32c(address: int, length: int) -> int: ...
def daemon_options(role: str) -> list[tuple[str, str | None, str | None, str]]: ...
def first_changed(parameters: list[Any], gradients: dict[int, Any], versions: dict[int, int]) -> int | None: ...
def init_logging(level: str) -> None: ...
def is_reduced(op: str, dtype: str) -> bool: ...
def memory_layout(sizes: Sequence[int], dimensions: Sequence[int]) -> int: ...
def merge(entries: Sequence[tuple[int, int]], bucket_bytes: int) -> list[list[int]]: ...
def parse_address(text: str) -> str: ...
def settle_callbacks(timeout_s: float) -> bool: ...
def simd_level() -> str: ...
def traffic(collective: str, ranks: int, bytes: int) -> dict[tuple[int, int], int]: ...
def simulate_aggregation(
    seed: int,
    *,
    jobs: int | None = None,
    workers: int | None = None,
    shape: str | None = None,
    tree: Sequence[Any] | None = None,
    blocks: int | None = None,
    shards: int | None = None,
    operation: int | None = None,
    queued: int | None = None,
    window: int | None = None,
    payload: int | None = None,
    floats: bool | None = None,
    finite: bool = False,
    keyed: bool | None = None,
    loss: float | None = None,
    edge_loss: bool = False,
    duplicate: float | None = None,
    delay_ms: float | None = None,
    jitter_ms: float | None = None,
    rate_mbit: float | None = None,
    queue: int | None = None,
    patient: bool = False,
    fat: bool = False,
    switches: bool = True,
    faults: bool = True,
    trace: bool = False,
) -> dict[str, Any]: ...
def simulate_collective(
    *,
    switches: int,
    hosts: int,
    ranks: Sequence[int],
    links: Sequence[tuple[int, int, int, int, int, int]],
    collective: str,
    bytes: int,
    algorithm: str | None,
    repetitions: int,
    progress: Callable[[int, int, int], object],
) -> dict[str, Any]: ...

@final
class UdpSockets:
    def __new__(cls, addresses: Sequence[str], *, offloads: bool, buffer_bytes: int) -> UdpSockets: ...
    def addresses(self) -> list[str]: ...

def aggregate(
    group: Group,
    sockets: UdpSockets,
    *,
    rank: int,
    world: int,
    name: str,
    format: str,
    payload_bytes: int,
    min_bytes: int,
    gives_way: bool,
    servers: Sequence[tuple[str, int, tuple[str, int] | None, int, int, int, bytes | None, int, int]],
    timeout_s: float,
) -> Ticket: ...
def aggregated_stats(group: Group) -> dict[str, Any] | None: ...
