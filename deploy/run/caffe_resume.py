"""Caffe's solver state and weights as a snapshot, for a run that continues where Caffe stopped."""

from pathlib import Path

from deploy.run.infer import fit_net
from ps.snapshots.catalog import SnapshotCatalog
from ps.snapshots.manifest import save_snapshot
from ps.storage import open_store
from shards.errors import BadInput
from shards.ledger import Ledger, LedgerEntry
from shards.shard_state import WEIGHTS, SavedProgress, ShardState, array_name
from shards.shard_status import Standing
from shards.tables import DenseTable, Layout, cut_evenly
from worker.caffe.model import CaffeModel
from worker.caffe.solver import Solver, read_solver
from worker.caffe.solver_state import SolverState, read_solver_state, slots_of
from worker.caffe.weights import Floats, read_weights


def adopt(
    state: Path, folder: Path, solver: Path, weights: Path | None, data: Path | None, workers: int
) -> str:
    """Write the snapshot into `folder`, by the state's iteration; returns its name.

    Without `weights` they are in the file that the state names, which is looked for next to the
    state, too. `data` is needed if the net does not state the shape of a row. Raises BadInput.
    """
    solver_state, read = read_solver_state(state), read_solver(solver)
    net = read.train if data is None else fit_net(read.train, data, "train")[1]
    model = CaffeModel(net)
    needed = {tensor.name for tensor in model.table.tensors}
    file = _weights_of(solver_state, state) if weights is None else weights
    arena, _ = read_weights(file, model.net, model.initial(0), needed)
    arrays = slots_of(solver_state, model.table, read.rule, str(state)) | {WEIGHTS: arena}
    name = str(solver_state.iteration)
    if name in SnapshotCatalog(folder):
        raise BadInput(folder, expected=f"a place without a snapshot {name}", got="one with it")
    layout = Layout((model.table,))
    save_snapshot(
        open_store(folder).below(name),
        [_shard_state(solver_state, read, model, arrays, workers)],
        layout=layout,
        shard_map=cut_evenly(layout, 1),
        rules=(str(read.rule.__struct_config__.tag),),
        workers=workers,
    )
    return name


def _weights_of(state: SolverState, path: Path) -> Path:
    """The file of the weights that belong to a state, as Caffe's own path or next to the state."""
    named = Path(state.learned_net)
    for file in (path.parent / named.name, named):
        if state.learned_net and file.is_file():
            return file
    raise BadInput(
        f"{path}: learned_net: found no file {named.name or '(no name)'} next to it; name the"
        " weights with --weights"
    )


def _shard_state(
    state: SolverState,
    solver: Solver,
    model: CaffeModel,
    arrays: dict[str, Floats],
    workers: int,
) -> ShardState:
    """One shard's state in which every worker has taken the iterations of Caffe's solver."""
    steps = state.iteration * workers
    entry = LedgerEntry(
        0,
        seq=state.iteration,
        clock=state.iteration,
        step=state.iteration,
        standing=Standing.LEFT,
        acknowledged=state.iteration,
    )
    ledger = Ledger({f"w{number}": entry for number in range(workers)}, floor=state.iteration)
    table: DenseTable = model.table
    saved = SavedProgress(
        version=steps,
        steps=steps,
        samples=steps * model.net.batch_size * solver.iter_size,
        ledger=ledger,
        updates={table.name: steps},
    )
    return ShardState(saved, {array_name(table.name, array): a for array, a in arrays.items()})
