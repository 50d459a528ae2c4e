"""A simulated cluster: the real sessions, shards, replicas and coordinator, under injected faults.

    outcome = play(scenario)        the same scenario always has the same outcome

No fault begins after `quiet_s`, and then every worker and shard must finish.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from deploy.simulation import row_model
from deploy.simulation.addresses import generation_of
from deploy.simulation.config import SimulationConfig
from deploy.simulation.coordinator import SimulatedCoordinator
from deploy.simulation.faults import AnyFault, ReshardFault
from deploy.simulation.invariants import BLOCK, Counted, Promise, Violation, check_one_push
from deploy.simulation.network import Network
from deploy.simulation.operator import (
    HoldOperator,
    Operator,
    ReshardOperator,
    SettingsOperator,
)
from deploy.simulation.process import SimulatedProcess
from deploy.simulation.replicated_shards import ReplicatedShardHost
from deploy.simulation.scenarios import Scenario
from deploy.simulation.shard_hosts import ShardHost
from deploy.simulation.single_shards import LoggedShardHost, SingleShardHost
from deploy.simulation.workers import SimulatedWorker
from deploy.simulation_kinds import ClusterConfig, Profile
from deploy.virtual_clock import Clock
from ps.durability import Durability
from ps.session.admin_plans import SettingsChange
from ps.session.compression import Compression
from ps.session.events import Send
from shards import wire_format
from shards.errors import BadMessage, DownpourError, Fenced, Mismatch
from shards.messages import LiveSettings
from shards.rules import ROW_RULES, RULES
from shards.schedules import Fixed
from shards.spec import ShardSpec, TableSpec, cut_tables
from shards.tables import DenseTable, Layout, ShardMap, TensorSpec

HORIZON_S = 200.0  # longer than two quiesces of a minute: a death near the end starts one again
BEYOND_S = 12.0  # how long a run beyond its fault budget continues after its faults
NOTED = 200  # the number of event lines that are kept

_HOSTS: dict[ClusterConfig, type[ShardHost]] = {
    ClusterConfig.SINGLE: SingleShardHost,
    ClusterConfig.COMPRESSED: SingleShardHost,
    ClusterConfig.LOGGED: LoggedShardHost,
    ClusterConfig.REPLICATED: ReplicatedShardHost,
}


class SimulationOutcome(msgspec.Struct, frozen=True):
    """The result of a run: `violation` is empty if every promise was kept."""

    scenario: Scenario
    violation: str
    seconds: float
    counted: Counted
    noted: list[str]


class Simulation:
    """One run; call `play` to execute a scenario."""

    job, build = "sim-job", "sim-build"

    def __init__(self, scenario: Scenario) -> None:
        self.setting = setting = scenario.setting
        self.clock = Clock(scenario.seed)
        self.counted = Counted()
        self.network = Network(self.clock, setting.delay_s, self.counted)
        moves = [fault.shards for fault in scenario.faults if isinstance(fault, ReshardFault)]
        self.blocks = max([setting.shards, *moves])
        self.layout = _layout(setting, self.blocks)
        self.blocks = self.layout.size // BLOCK
        self.compression = _compression(setting, self.layout)
        self.map = self.cut(setting.shards)
        self.durable = scenario.profile is Profile.WITHIN
        self.lossy = any(getattr(fault, "lost_s", 0.0) for fault in scenario.faults)
        self.ordered = not self.lossy and not _forgetful(scenario)
        # Until a worker or shard dies or times out, clocks equal the number of applied pushes.
        self.calm = True
        self.thawed_at = 0.0  # when the last of all stopped processes has continued, or will
        self.noted: deque[str] = deque(maxlen=NOTED)
        self.workers: dict[int, SimulatedWorker] = {}
        self._by_address: dict[bytes, SimulatedWorker] = {}
        self._operators: dict[bytes, Operator] = {}
        self.proposed: list[LiveSettings] = []  # what operators have asked for
        self._boots = 0
        self._unfinished: set[int] = set()
        self.generations: list[Sequence[ShardHost]] = []
        self._coordinators: list[SimulatedCoordinator] = []
        self._settle(fresh=False)
        for fault in scenario.faults:
            self.clock.after(fault.at, self._strike, fault)

    def _strike(self, fault: AnyFault) -> None:
        self.note(f"fault: {fault}")
        fault.strike(self)

    def run(self) -> None:
        """Play to the end; raises Violation, or any error of the code under test."""
        self._begin()
        for number in range(self.setting.workers):
            self._start_worker(number, 0, self.clock.random.random() * 1.5)
        end = HORIZON_S if self.durable else self.setting.quiet_s + BEYOND_S
        still = not self.clock.run(self._unfinished.__len__, end)
        if self.durable:
            still = still or not self.clock.run(self._busy, end)
            if still:
                self._report_stuck()
        for host in self.hosts:
            host.finish()
        check_one_push(rows for host in self.hosts for rows in host.pushes())
        self._check_left()

    def _busy(self) -> bool:
        return not all(host.is_finished() for host in self.hosts)

    def _report_stuck(self) -> None:
        workers = [worker for worker in self.workers.values() if worker.number in self._unfinished]
        shards = [f"shard {host.number}" for host in self.hosts if not host.is_finished()]
        raise Violation(
            Promise.PROGRESS, f"{workers or shards} not finished at {self.clock.now:.0f} s"
        )

    def note(self, text: str) -> None:
        """Add a line to the events of the outcome."""
        self.noted.append(f"{self.clock.now:8.3f}  {text}")

    # --- for shards, workers and operators --------------------------------------------------------

    def cut(self, shards: int, epoch: int = 1) -> ShardMap:
        """The map of this number of shards."""
        return cut_tables(self._table_specs, self.setting.merging, shards, epoch)

    @property
    def _table_specs(self) -> tuple[TableSpec, ...]:
        setting, rate = self.setting, Fixed(base_rate=1.0)
        return (
            *(
                TableSpec(table, RULES[setting.rules[table.name]](), rate)
                for table in self.layout.tables
            ),
            *(TableSpec(table, ROW_RULES[setting.rows](), rate) for table in self.layout.sparse),
        )

    def spec(self, shard: int, shard_map: ShardMap) -> ShardSpec:
        """The configuration with which a shard starts."""
        setting = self.setting
        return ShardSpec(
            job=self.job,
            shard=shard,
            tables=self._table_specs,
            map=shard_map,
            bound=setting.bound,
            workers=setting.workers,
            build=self.build,
            merge=setting.merging,
            stale=setting.stale,
            lease_s=setting.lease_s,
            warm_steps=setting.warm_steps,
            least_bound=int(setting.prefetch),
        )

    def next_boot(self) -> int:
        """A boot number that no other process has."""
        self._boots += 1
        return self._boots

    def process(self, name: str) -> SimulatedProcess | None:
        """The process that a fault names; None if it does not exist now."""
        if name == "coordinator":
            return self.coordinator if self._coordinators else None
        role, _, number = name.partition(" ")
        if number:
            hosts = self.hosts
            return hosts[int(number)].process(role) if int(number) < len(hosts) else None
        return self.workers[int(name[1:])]

    def worker_at(self, address: bytes) -> SimulatedWorker:
        """The incarnation of a worker that has this address."""
        return self._by_address[address]

    def end_at(self, address: bytes) -> SimulatedWorker | Operator:
        """The worker or operator that has this address."""
        return self._operators.get(address) or self._by_address[address]

    def send(self, worker: SimulatedWorker, send: Send) -> None:
        """Send a worker's message over the network."""
        route = worker.hosts[send.shard].route(worker)
        if route is not None:
            to, deliver = route
            header = wire_format.encode(send.message)
            self.network.carry(worker.name, to, header, send.frames, deliver)

    # --- resharding -------------------------------------------------------------------------------

    @property
    def hosts(self) -> Sequence[ShardHost]:
        """The shards that hold the job: the first ones that do not redirect their workers."""
        hosts = self.generations[0]
        while len(self.generations) > 1 and (to := _successors(hosts)) is not None:
            hosts = self.generations[to]
        return hosts

    @property
    def coordinator(self) -> SimulatedCoordinator:
        """The coordinator of the shards that hold the job."""
        return self._coordinators[self.generations.index(self.hosts)]

    def reshard(self, fault: ReshardFault) -> None:
        """Start an operator that reshards the job."""
        self._operate(ReshardOperator(self, fault, len(self._operators)))

    def hold(self, for_s: float) -> None:
        """Start an operator that quiesces the shards for some seconds."""
        self._operate(HoldOperator(self, for_s, len(self._operators)))

    def change_settings(self, change: SettingsChange) -> None:
        """Start an operator that changes settings of the job."""
        self._operate(SettingsOperator(self, change, len(self._operators)))

    def _operate(self, operator: Operator) -> None:
        self._operators[operator.address] = operator
        operator.begin()

    def add_generation(self, shard_map: ShardMap) -> tuple[int, Sequence[ShardHost]]:
        """Create the shards of a new map; returns their generation number and the shards."""
        self.map = shard_map
        self._settle(fresh=True)
        self._begin()
        return len(self.generations) - 1, self.generations[-1]

    def _settle(self, *, fresh: bool) -> None:
        """Create the shards of the newest map."""
        kind = _HOSTS[self.setting.cluster]
        hosts = [kind(self, shard, fresh=fresh) for shard in range(self.map.shards)]
        self.generations.append(hosts)
        groups = [host for host in hosts if isinstance(host, ReplicatedShardHost)]
        if groups:
            self._coordinators.append(SimulatedCoordinator(self, groups))

    def _begin(self) -> None:
        """Start the newest shards and their coordinator, if any."""
        for coordinator in self._coordinators[-1:]:
            coordinator.begin()
        for host in self.generations[-1]:
            host.begin()

    def _check_left(self) -> None:
        for hosts in self.generations:
            if len(self.generations) > 1 and _successors(hosts) is not None:
                for host in hosts:
                    host.check_handed_over()

    # --- incarnations of workers ------------------------------------------------------------------

    def _start_worker(self, number: int, incarnation: int, delay_s: float) -> None:
        worker = SimulatedWorker(self, number, incarnation)
        self.workers[number] = self._by_address[worker.address] = worker
        self._unfinished.add(number)
        worker.after(delay_s, worker.begin)

    def kill(self, name: str, back_s: float, zombie: bool) -> None:
        """End a worker's incarnation, or leave it running as a zombie, and start the next one."""
        worker = self.workers[int(name[1:])]
        worker.alive = zombie
        self.calm = False
        self._start_worker(worker.number, worker.incarnation + 1, back_s)

    def note_departure(self, worker: SimulatedWorker) -> None:
        """Every shard knows that this worker has left."""
        if self.workers[worker.number] is worker:
            self._unfinished.discard(worker.number)

    def note_failure(self, worker: SimulatedWorker, error: DownpourError) -> None:
        """An error ends an incarnation: either the faults explain it, or it is a violation."""
        worker.alive = False
        current = self.workers[worker.number] is worker
        self.note(f"{worker.name}/{worker.incarnation} fails: {error}")
        if isinstance(error, Fenced) and not current:
            return
        # A greeting that was mangled on its way reads like one of another protocol.
        if isinstance(error, BadMessage | Mismatch) and self.counted.mangled:
            if current:  # Spark retries a failed task
                self.calm = False
                self._start_worker(worker.number, worker.incarnation + 1, 0.5)
            return
        if self.durable or isinstance(error, Fenced):
            raise Violation(
                Promise.NO_SURPRISE, f"{worker} met {type(error).__name__}: {error}"
            ) from error
        self._unfinished.discard(worker.number)

    def crash_coordinator(self, back_s: float) -> None:
        """Stop the coordinators, if any, for `back_s` seconds."""
        for coordinator in self._coordinators:
            coordinator.crash(back_s)


def _compression(setting: SimulationConfig, layout: Layout) -> dict[str, Compression]:
    """How the workers' messages carry each table."""
    is_compressed = setting.cluster is ClusterConfig.COMPRESSED
    dense = Compression.parse(setting.push, setting.pull) if is_compressed else Compression()
    rows = Compression.parse(setting.row_push, setting.row_pull)
    return {table: dense if table in layout.names else rows for table in layout.all_names}


def _layout(setting: SimulationConfig, blocks: int) -> Layout:
    """The tables: all blocks in one, or a third of them, rounded up, in the second."""
    second = -(-blocks // 3) if setting.second else 0
    sizes = (blocks + bool(setting.second) - second, second)
    return Layout(
        tuple(
            # A tensor for each block: the reference model knows the pushes to one block alone.
            DenseTable(name, tuple(TensorSpec(f"w{block}", (BLOCK,)) for block in range(size)))
            for name, size in zip(setting.rules, sizes, strict=False)
        ),
        (row_model.TABLE,) if setting.rows else (),
    )


def _successors(hosts: Sequence[ShardHost]) -> int | None:
    addresses = [to for host in hosts if (to := host.new_address) is not None]
    return generation_of(addresses[0]) if addresses else None


def _forgetful(scenario: Scenario) -> bool:
    """Return whether the power fails at `process`, which does not promise to survive that."""
    process = scenario.setting.durability is Durability.PROCESS
    return process and any(getattr(fault, "power", False) for fault in scenario.faults)


def play(scenario: Scenario) -> SimulationOutcome:
    """Run a scenario. Any error of the code under test counts as a violation, ours or not."""
    violation = ""
    world = Simulation(scenario)
    try:
        world.run()
    except Violation as found:
        violation = str(found)
    except Exception as error:  # noqa: BLE001  # the code under test may raise anything
        violation = str(Violation(Promise.NO_SURPRISE, f"{type(error).__name__}: {error}"))
    return SimulationOutcome(scenario, violation, world.clock.now, world.counted, list(world.noted))
