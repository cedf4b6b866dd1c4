"""Slot and page permutation: where a sequence, and an expert, physically lies changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from harness import operations as ops
from harness.check import Check, CheckContext, CheckResult
from harness.checks._lengths import boundaries, horizon
from harness.checks._paths import requires
from harness.checks._scenario import Scenario, chunked, most_sequences, run_scenarios, stream

NAME = "permutation"
PAGE = 16  # tokens of the smallest sequences opened here: about a page of most engines


def scenarios(ctx: CheckContext) -> Iterator[Scenario]:
    count, slots = horizon(ctx.config), min(8, most_sequences(ctx.engine()))
    a, b = stream(ctx, "a"), stream(ctx, "b")
    fillers = [f"f{i}" for i in range(slots)]
    operations = [ops.open_(name, PAGE) for name in fillers]
    operations += [ops.close(name) for name in fillers[::2]]  # holes in slots and pages, then larger tenants
    operations += [ops.open_("a", count), *chunked("a", a, 7)]
    operations += [ops.close(name) for name in reversed(fillers[1::2])]
    operations += [
        ops.open_("b", count),
        *chunked("b", b[: count // 2], 5),
        *chunked("b", b[count // 2 :], 1),
    ]
    yield Scenario("sequences in the holes that others left", tuple(operations), (a, b))
    names, first = "abcdefgh"[:slots], ctx.config.sliding_window + 3
    operations = [
        ops.open_(name, count) for name in names
    ]  # whichever slot is the last one, somebody is in it
    operations += [ops.step((name, stream(ctx, name)[:first])) for name in names]
    operations += [ops.step((name, stream(ctx, name)[first : first + 2])) for name in reversed(names)]
    yield Scenario("every slot at once", tuple(operations), tuple(stream(ctx, name) for name in names))
    for page in (2, 6, 48):
        operations = [ops.open_("b", page), ops.open_("a", count), ops.close("b"), *chunked("a", a, 11)]
        yield Scenario(
            f"pages of {page} tokens", tuple(operations), (a,), {"page_tokens": page}, optional=True
        )
    operations = [
        ops.open_("a", count),
        *chunked("a", a[: count // 2], 9),
        *chunked("a", a[count // 2 :][:4], 1),
    ]
    cache = {"experts_resident": ctx.config.num_experts_per_tok + 1}
    yield Scenario("experts from a small cache", tuple(operations), (a,), cache, optional=True)
    reverse = [*range(slots)][::-1]
    for n in boundaries(ctx.config, count - 2)[::4]:
        operations = [ops.open_("a", count), ops.step(("a", a[:n])), ops.step(("a", a[n : n + 2]))]
        options = {"max_sequences": slots, "slot_order": tuple(reverse)}
        yield Scenario(f"slots handed out backwards, {n}", tuple(operations), (a,), options, optional=True)


def run(ctx: CheckContext) -> CheckResult:
    return run_scenarios(ctx, NAME, "PG", scenarios(ctx), style="prefill")


CHECK = Check(
    NAME,
    "which slot and which pages a sequence gets changes no bit of its answers",
    run,
    required_paths=requires(
        "rows compared", "opened after a close", "chunk", "decode", "window wrapped", "top-k cut"
    ),
    detectors=("PG",),
)
