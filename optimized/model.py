"""The stack over slots and pages: one general forward for any rows of any sequences, eager or as one graph.

    plan the rows, embed, hash;  every layer;  last collapse, norm, head;  commit the n-gram ring

Prefill, a chunk, a decode step, a verify of k tokens and a batch are this same list of launches over
another row table.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from optimized import seams, tables
from optimized.experts import ExpertCache
from optimized.graph import GraphRunner, StepHooks
from optimized.launch import Launcher, OpTable
from optimized.layer import Block, Flow, LayerState, settle
from optimized.ops.engram import Hash
from optimized.state_pool import StatePool
from optimized.step import HostTable, RunRows
from optimized.taps import finish
from optimized.weights import LayerWeights, Weight, load_layer, pack
from optimized.workspace import Workspace, make_workspace
from reference.config import LayerRole, V41Config
from reference.engram import hash_constants
from reference.errors import UnsupportedError
from reference.linear import Linear
from reference.weights import Weights

WORKSPACES = 96  # kept, least recently used out first; one with a graph stays


@dataclass(frozen=True)
class Output:
    """hidden [n, D] float32 after the final norm, logits [n, V] float32, taps by name: the live rows,
    copies.
    """

    hidden: Tensor
    logits: Tensor
    taps: dict[str, Tensor]


class OptimizedModel:
    """config.layers() on the pool's device.

    ops: the table of ops ("torch" backend by default).  experts: a cache that holds the routed experts;
    None = all resident. buckets: row counts of captured steps.  poison: NaN bytes into the workspace before
    every step.  banks: gives a layer's routed experts as (w13, w2) banks, in place of those of `weights`
    (hundreds of wide experts are drawn much faster on the device).
    """

    def __init__(
        self,
        config: V41Config,
        weights: Weights,
        pool: StatePool,
        *,
        ops: OpTable | None = None,
        experts: ExpertCache | None = None,
        buckets: tuple[int, ...] = tables.ROW_BUCKETS,
        poison: bool = False,
        release_underfilled_selection: bool = False,
        banks: Callable[[LayerRole], tuple[Weight, Weight]] | None = None,
    ) -> None:
        self.config, self.pool, self.device = config, pool, pool.device
        self.ops = ops or OpTable("torch")
        self.launch = Launcher(self.ops)
        self.runner = GraphRunner(self.launch, self.device)
        self.experts, self.buckets, self.poison = experts, tuple(sorted(buckets)), poison
        self.keep_unreachable = release_underfilled_selection
        self.dense = self.ops.backend == "torch"
        self.layer_weights: dict[int, LayerWeights] = {
            role.index: self._load(weights, role, banks) for role in config.layers()
        }
        self.blocks = self._blocks()
        self.embed = weights["embed.weight"].to(self.device)
        self.norm = weights["norm.weight"].float().to(self.device)
        self.head: Weight = pack(Linear(weights["head.weight"], None, "fp32"), self.device, dense=self.dense)
        self.hash = self._hash(weights)
        self.ngram = pool.ngram.flatten() if pool.ngram is not None else None
        self._workspaces: OrderedDict[tuple[int, int], Workspace] = OrderedDict()

    # a step

    def step(
        self,
        runs: Sequence[RunRows],
        *,
        taps: Collection[str] = (),
        replay: bool = False,
        hooks: StepHooks | None = None,
    ) -> Output:
        """Rows of the runs, in their order; the pool's rows of these tokens are written. Checked input is
        the caller's duty.

        replay: through the captured step of the bucket, hooks in the contract's order; not with an expert
        cache, whose routing is read on the host.
        """
        if replay and self.experts is not None:
            raise UnsupportedError(
                field="replay", expected="all experts resident", actual="an expert cache",
                hint="step eagerly, or build the engine without experts_resident",
            )  # fmt: skip
        host = HostTable.of(runs)
        ws = self._workspace(host, replay)
        if self.poison:
            ws.poison()
        self.launch.scratch, self.launch.launches, self.launch.live = ws.scratch, 0, host.columns
        wanted = tuple(sorted(set(taps)))
        flow = Flow(
            ws, self.launch, host.n_rows, wanted, experts=self.experts, keep_unreachable=self.keep_unreachable
        )
        if replay:
            self._replayed(host, flow, hooks)
        else:
            ws.rows.upload(host)
            self.forward(flow)
        n = host.n_rows
        values = finish(flow.recorded, host, self.config, self.layer_weights)
        return Output(ws.normed[:n].float(), ws.logits[:n].clone(), values)

    def _replayed(self, host: HostTable, flow: Flow, hooks: StepHooks | None) -> None:
        ws = flow.ws
        key = (*seams.graph_key(ws.n_rows, ws.rows.context, flow.wanted), self.ops.version)

        def warm_up() -> None:
            ws.rows.upload(HostTable.of(()))
            self.forward(Flow(ws, self.launch, 0, flow.wanted))

        layers = [role.index for role in self.config.layers()]
        self.runner.step(
            key, layers, lambda: ws.rows.upload(host, replay=True), lambda: self.forward(flow), warm_up, hooks
        )
        if not flow.recorded:
            # the body did not run in Python: the copies lie where its capture put them
            flow.recorded = self._tap_copies(ws, flow.wanted)

    @staticmethod
    def _tap_copies(ws: Workspace, wanted: Collection[str]) -> dict[str, tuple[Tensor, ...]]:
        found: dict[str, tuple[Tensor, ...]] = {}
        for (name, part), buffer in sorted(ws.taps.items(), key=lambda item: item[0]):
            if name in wanted or (name.endswith(".entry") and "main_hidden" in wanted):
                assert len(found.get(name, ())) == part
                found[name] = (*found.get(name, ()), buffer)
        return found

    def forward(self, flow: Flow) -> None:
        """Every launch of a step, over the row table that is in flow.ws."""
        ws, launch, config = flow.ws, self.launch, self.config
        launch.layer = -1
        launch("plan_rows", ws.rows)
        launch("embed", flow.streams, ws.pre_ffn, self.embed, ws.rows)
        if self.hash is not None:
            launch("engram_hash", ws.hashes, ws.ngram_row, self.ngram, self.hash, ws.rows)
            flow.tap("engram_hash", ws.hashes)
        for block in self.blocks:
            launch.layer = block.role.index
            block.forward(flow)
        launch.layer = -1
        settle(flow)
        final = (ws.collapsed, ws.normed, flow.streams, ws.pre_ffn, self.norm)
        launch("final_collapse", *final, norm_eps=config.rms_norm_eps)
        launch("linear", ws.logits, ws.normed, None, None, self.head)
        flow.tap("final_collapsed", ws.collapsed)
        flow.tap("final_normed", ws.normed)
        flow.tap("hidden", ws.normed)
        flow.tap("logits", ws.logits)
        if self.hash is not None:
            launch("commit_ngram", self.ngram, ws.ngram_row, ws.rows)

    # buffers

    def _workspace(self, host: HostTable, replay: bool) -> Workspace:
        context = tables.context_bucket(max(host.ends), self.pool.page_tokens, self.pool.max_pages)
        # eager steps on a CPU take the rows as they are: cheaper, and a row's result doesn't depend on it
        exact = not replay and self.device.type == "cpu"
        n_rows = host.n_rows if exact else tables.row_bucket(host.n_rows, self.buckets)
        return self.workspace(n_rows, context)

    def workspace(self, n_rows: int, context: int) -> Workspace:
        """The buffers of a bucket, made at its first use."""
        key = (n_rows, context)
        if key not in self._workspaces:
            self._workspaces[key] = self._new_workspace(n_rows, context)
            self._evict()
        self._workspaces.move_to_end(key)
        return self._workspaces[key]

    def _new_workspace(self, n_rows: int, context: int) -> Workspace:
        scratch, splits = None, 1
        if self.ops.backend == "triton":
            from optimized import kernels

            scratch = kernels.scratch(self.config, n_rows, context)
            splits = tables.hyper_splits(self.config.hidden_size)
        return make_workspace(
            self.config, self.pool, n_rows, context, splits=splits, scratch=scratch, plain=self.dense
        )

    def _evict(self) -> None:
        held = {(key[0], key[1]) for key in self.runner.graphs}
        for key in list(self._workspaces):
            if len(self._workspaces) <= WORKSPACES:
                return
            if key not in held:
                del self._workspaces[key]

    # load

    def _load(
        self, weights: Weights, role: LayerRole, banks: Callable[[LayerRole], tuple[Weight, Weight]] | None
    ) -> LayerWeights:
        cached = self.experts is not None and self.experts.has(role.index)
        loaded = load_layer(
            weights, role, self.device, dense=self.dense, resident=banks is None and not cached
        )
        if banks is None or cached:
            return loaded
        w13, w2 = banks(role)
        return replace(loaded, ffn=replace(loaded.ffn, w13=w13, w2=w2))

    def _blocks(self) -> list[Block]:
        pool, roles = self.pool, self.config.layers()

        def flat(store: dict[int, Tensor], layer: int) -> Tensor | None:
            return store[layer].flatten(0, 1) if layer in store else None

        blocks = []
        for place, role in enumerate(roles):
            i = role.index
            state = LayerState(
                window=pool.window[i].flatten(0, 1),
                latent=flat(pool.latent, i),
                index_key=flat(pool.index_key, i),
                pending=flat(pool.pending, i),
            )
            following = roles[place + 1].index if place + 1 < len(roles) else None
            router = self.layer_weights[following].ffn if following is not None else None
            blocks.append(Block(self.config, role, self.layer_weights[i], state, router, following))
        return blocks

    def _hash(self, weights: Weights) -> Hash | None:
        if not self.config.hashes_ngrams:
            return None
        constants, token_map = hash_constants(self.config), weights.token_map
        return Hash(
            token_map=token_map.to(self.device),
            multipliers=constants.multipliers.to(self.device),
            primes=constants.primes.to(self.device),
            offsets=constants.offsets.to(self.device),
            pad=int(token_map[self.config.engram_pad_token_id]),
        )
