"""What a check is, what it is given, what it must answer; and the registry of the checks in harness/checks/.

A check that can't fail is a defect, and so is one that passes without having been anywhere: every check
names the paths that it must take (groups closed, ring wrapped, top-k cut, ...), counts them in
`CheckResult.paths`, and `run_check` turns a path never taken into a finding. A check whose `needs` the
engine declines is "declined"; it never counts as passed.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.engine import CAPABILITIES, Engine
from harness.findings import Finding
from reference.errors import ConfigError

PathNames = Iterable[str] | Callable[[Any], Iterable[str]]


@dataclass
class CheckResult:
    """What a check answers: findings, how often it took each path, engine operations spent."""

    findings: list[Finding] = field(default_factory=list)
    paths: dict[str, int] = field(default_factory=dict)
    operations: int = 0
    declined: frozenset[str] = frozenset()
    check: str = ""
    seconds: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)  # counters worth showing, for example accepted ties

    def took(self, path: str, times: int = 1) -> None:
        self.paths[path] = self.paths.get(path, 0) + times

    @property
    def status(self) -> str:
        if self.findings:
            return "failed"
        return "declined" if self.declined else "passed"


@dataclass
class CheckContext:
    """What a check may use. `engine_factory(**options)` builds the engine under test,
    `reference_factory(**options)` the reference.
    """

    engine_factory: Callable[..., Engine]
    reference_factory: Callable[..., Engine]
    config: Any
    seed: int = 0
    budget: float = 10.0  # seconds that a searching check may spend; fixed checks ignore it
    progress: Callable[[str], None] = lambda text: None
    weights: Any = None
    engine_name: str = "?"
    engine_options: dict[str, Any] = field(default_factory=dict)
    config_name: str | None = None  # a preset's name, when the config is one
    _shared: dict[tuple, Engine] = field(default_factory=dict, repr=False)

    def engine(self, **options: Any) -> Engine:
        """The engine under test with these options; built once and shared by the checks of this context."""
        return self._get("engine", self.engine_factory, options)

    def reference(self, **options: Any) -> Engine:
        """The reference with these options (precision="float64", ...), built once and shared."""
        return self._get("reference", self.reference_factory, options)

    def _get(self, role: str, factory: Callable[..., Engine], options: dict[str, Any]) -> Engine:
        key = (role, repr(sorted(options.items())))
        if key not in self._shared:
            self._shared[key] = factory(**options)
        return self._shared[key]

    def forget(self, engine: Engine) -> None:
        """Drop a shared engine that an error may have left in an unknown state; the next call builds a new
        one.
        """
        self._shared = {key: value for key, value in self._shared.items() if value is not engine}

    def forget_all(self) -> None:
        """Drop every shared engine."""
        self._shared = {}

    def rng(self, name: str) -> np.random.Generator:
        """A generator that depends on the seed and this name alone, so that checks don't move each other's
        draws.
        """
        return np.random.default_rng([self.seed, *name.encode()])

    def tokens(self, count: int, name: str = "tokens") -> tuple[int, ...]:
        """`count` token ids; a longer draw of the same name begins with the shorter one."""
        return tuple(int(t) for t in self.rng(name).integers(0, self.config.vocab_size, size=count))

    def finding(self, check: str, detector: str, message: str, **where: Any) -> Finding:
        """A finding with engine, options, config and seed filled in."""
        config = self.config_name or (self.config.to_dict() if hasattr(self.config, "to_dict") else None)
        where.setdefault("engine", self.engine_name)
        where.setdefault("engine_options", dict(self.engine_options))
        return Finding(
            check=check, detector=detector, message=message, config=config, seed=self.seed, **where
        )


@dataclass(frozen=True)
class Check:
    """One check: what it proves in one sentence, what it needs, and the paths without which it proved
    nothing.
    """

    name: str
    proves: str
    run: Callable[[CheckContext], CheckResult]
    needs: frozenset[str] = frozenset()
    required_paths: PathNames = ()
    detectors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = frozenset(self.needs) - CAPABILITIES.keys()
        if unknown:
            raise ConfigError(
                field=f"check {self.name}: needs",
                expected=f"of {', '.join(CAPABILITIES)}",
                actual=", ".join(sorted(unknown)),
                hint="capability names stand in harness/engine.py",
            )

    def paths_for(self, config: Any) -> tuple[str, ...]:
        """The required paths under this config; a callable answers for configs without, say, a candidate
        source.
        """
        return tuple(self.required_paths(config) if callable(self.required_paths) else self.required_paths)


def run_check(check: Check, ctx: CheckContext) -> CheckResult:
    """Run one check. An exception of the check or of the engine is a finding; a required path never taken
    is one too.
    """
    began = time.perf_counter()
    try:
        declined = frozenset(check.needs) & frozenset(ctx.engine().declines())
        result = CheckResult(declined=declined) if declined else check.run(ctx)
    except (
        Exception
    ) as error:  # the engine under test is somebody's code: whatever it raises is a finding, not our crash
        ctx.forget_all()
        result = CheckResult([crash_finding(check.name, ctx, error)])
    if not result.declined:
        taken = [path for path, count in result.paths.items() if count > 0]
        missing = [path for path in check.paths_for(ctx.config) if path not in taken]
        if (
            not result.findings
        ):  # a check that stopped at a finding has its reason not to have been everywhere
            for path in missing:
                message = f"the check never took the path {path!r}, so it proves nothing about it"
                result.findings.append(
                    ctx.finding(
                        check.name, "PATH", message, expected=f"{path} > 0", actual=result.paths.get(path, 0)
                    )
                )
    result.check = check.name
    result.seconds = time.perf_counter() - began
    return result


def crash_finding(check: str, ctx: CheckContext, error: BaseException, **where: Any) -> Finding:
    """The finding of an exception: its own detector and place when it carries them (a remote engine's),
    CRASH otherwise.
    """
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    place = " <- ".join(
        f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in reversed(frames)
    )
    detector = getattr(error, "detector", "CRASH")
    return ctx.finding(
        check, detector, f"{type(error).__name__}: {error}", details={"raised at": place}, **where
    )


def discover(package: str = "harness.checks") -> dict[str, Check]:
    """Every `CHECK` (or list `CHECKS`) of the modules of a package, by name. Raises ConfigError on a name
    given twice.
    """
    found: dict[str, Check] = {}
    root = importlib.import_module(package)
    for info in sorted(pkgutil.iter_modules(root.__path__), key=lambda i: i.name):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{package}.{info.name}")
        one = getattr(module, "CHECK", None)
        for check in (*([one] if one is not None else []), *getattr(module, "CHECKS", ())):
            if check.name in found:
                raise ConfigError(
                    field="check",
                    expected="one check of a name",
                    actual=f"{check.name} twice",
                    hint="rename one of them",
                )
            found[check.name] = check
    return found


def select(names: Iterable[str] | None, checks: dict[str, Check] | None = None) -> list[Check]:
    """The checks of these names, all when None; ConfigError for a name that does not exist."""
    checks = discover() if checks is None else checks
    if names is None:
        return list(checks.values())
    names = list(names)
    unknown = [name for name in names if name not in checks]
    if unknown:
        raise ConfigError(
            field="--checks",
            expected=f"of {', '.join(checks)}",
            actual=", ".join(unknown),
            hint="`dsv41 checks` lists them",
        )
    return [checks[name] for name in names]
