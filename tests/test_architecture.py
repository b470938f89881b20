"""The shape of the source, checked from day one: layout, who may import whom, sizes, where literals live."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.support.source import REPOSITORY, ROOTS, Module, modules, repository_files

MODULE_LINES = 350
FUNCTION_LINES = 60
MESSAGE_PATH_LINES = 40

ACTORS = ("millstream.dispatcher", "millstream.governor", "millstream.worker", "millstream.tracker")
MESSAGE_PATH = ("dispatcher", "worker", "executor", "governor")
TRACKER_ACTOR = ("millstream.tracker", "millstream.tracker.actor")

# What a decision may not touch. `now`, ids and randomness come in as arguments; results go out as verdicts.
IMPURE = (
    "asyncio", "concurrent", "http", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "signal",
    "socket", "sqlite3", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
)  # fmt: skip
CLOCKS = ("now", "utcnow", "today")
DOERS = ("open", "print", "input", "eval", "exec")

# The server's own words and ours; both are spelled in one module of the contract (or known to the adapter).
BROKER_LITERAL = re.compile(r"\$JS\b|\$KV\b|\$SYS\b|Nats-|\bMILL_|(?<![\w.-])mill\.(?!toml\b)")
MAY_LEAVE_TASKS_BEHIND = ("millstream.worker.executor",)
"""Runs the code of users, some of which ignores its cancellation: a group would wait for it for ever."""
# server.py runs the development server, demo is an application of its own: their errors concern nobody else.
ERRORS_LIVE_IN = ("millstream.errors", "millstream.server", "millstream.demo")

# Written in two halves, so that this file does not contain what it forbids.
FORBIDDEN = tuple(
    first + second
    for first, second in (
        ("/wo", "rk/"),
        ("/tmp/ba", "sh"),
        ("/ro", "ot/"),
        ("/home/", "ubuntu"),
        ("pypi", ".org"),
        ("pythonhosted", ".org"),
        ("registry.npm", "js.org"),
        ("deb.debian", ".org"),
    )
)


def _ours(*packages: str) -> list[Module]:
    return [module for module in modules() if module.inside(*packages)]


def _outside(module: Module, allowed: tuple[str, ...]) -> Iterator[str]:
    for line, name in module.imports():
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names and top not in IMPURE_IN.get(_layer(module), ()):
            continue
        if not any(name == prefix or name.startswith(prefix + ".") for prefix in allowed):
            yield f"{module.where}:{line} imports {name}"


def _layer(module: Module) -> str:
    return "policy" if module.inside("millstream.policy") else ""


IMPURE_IN = {"policy": IMPURE}


def _report(found: list[str], remedy: str) -> None:
    assert not found, "\n".join([*found, f"→ {remedy}"])


def test_there_is_source_to_check() -> None:
    """Both roots hold their package; otherwise every rule below would pass on nothing."""
    names = {module.name for module in modules()}
    assert set(ROOTS.values()) <= names


def test_the_source_roots_are_folders_and_not_packages() -> None:
    """An `__init__.py` in a root works from the checkout and breaks type checkers or the installed copy."""
    found = [f"{root}/__init__.py" for root in ROOTS if (REPOSITORY / root / "__init__.py").exists()]
    _report(found, "remove it: the roots are on the import path")


def test_nothing_else_in_a_source_root_can_be_imported() -> None:
    """Data folders carry a hyphen; a name that can be imported would shadow a library of that name."""
    found: list[str] = []
    for root, package in ROOTS.items():
        for entry in (REPOSITORY / root).iterdir():
            importable = entry.is_dir() and entry.name.isidentifier() and entry.name != "__pycache__"
            if entry.name != package and (importable or entry.suffix in (".py", ".pth", ".so")):
                found.append(f"{root}/{entry.name}")
    _report(found, "move it into the package, or give a data folder a name with a hyphen")


def test_both_packages_tell_type_checkers_that_they_are_typed() -> None:
    """Without the marker, users of the installed package lose every type."""
    found = [f"{r}/{p}/py.typed" for r, p in ROOTS.items() if not (REPOSITORY / r / p / "py.typed").is_file()]
    _report(found, "add the empty file")


def test_every_folder_with_modules_is_a_regular_package() -> None:
    """A forgotten `__init__.py` makes a namespace package, which wheels and type checkers treat differently."""
    found = [
        m.where for m in modules() if m.path.name != "__init__.py" and not (m.path.parent / "__init__.py").is_file()
    ]
    _report(found, "add an `__init__.py` beside it")


def test_the_contract_imports_only_the_standard_library_and_msgspec() -> None:
    """A service may depend on the contract without pulling in NATS or the runtime."""
    allowed = ("msgspec", "millstream_schemas")
    found = [line for module in _ours("millstream_schemas") for line in _outside(module, allowed)]
    _report(found, "what needs more belongs to `millstream`")


def test_policy_imports_nothing_that_acts() -> None:
    """Decisions know no loop, clock, chance or outside world: so a model can run all of them."""
    allowed = ("msgspec", "millstream_schemas", "aiolimiter", "millstream.policy")
    found = [line for module in _ours("millstream.policy") for line in _outside(module, allowed)]
    _report(found, "take it as an argument, or return a verdict that an actor performs")


def test_policy_reads_no_clock_and_does_nothing() -> None:
    """`datetime` may be imported for its types; asking it for the time may not."""
    found: list[str] = []
    for module in _ours("millstream.policy"):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.AsyncFunctionDef | ast.Await):
                found.append(f"{module.where}:{node.lineno} is async")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS:
                found.append(f"{module.where}:{node.lineno} reads a clock: .{node.func.attr}()")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in DOERS:
                found.append(f"{module.where}:{node.lineno} calls {node.func.id}()")
    _report(found, "take `now` as an argument")


def test_only_the_adapter_imports_nats() -> None:
    """A second user of the client library would need its traps explained a second time."""
    found = [
        f"{module.where}:{line} imports {name}"
        for module in modules()
        if not module.inside("millstream.jetstream")
        for line, name in module.imports()
        if name.partition(".")[0] == "nats"
    ]
    _report(found, "ask through `millstream.ports`")


def test_the_adapter_knows_ports_errors_settings_and_the_contract_alone() -> None:
    """The adapter moves bytes; whoever decides about them lies above it."""
    allowed = (
        "nats", "msgspec", "millstream_schemas",
        "millstream.jetstream", "millstream.ports", "millstream.errors", "millstream.settings",
    )  # fmt: skip
    found = [line for module in _ours("millstream.jetstream") for line in _outside(module, allowed)]
    _report(found, "move the decision to `policy/`, the wiring to `supervisor.py`")


def test_actors_share_nothing_but_messages() -> None:
    """No actor imports another; only the supervisor and the command line know them all."""
    found = [
        f"{module.where}:{line} imports {name}"
        for actor in ACTORS
        for module in _ours(actor)
        for line, name in module.imports()
        for other in ACTORS
        if other != actor and (name == other or name.startswith(other + "."))
    ]
    _report(found, "send a message, or move what both need out of the actor")


def test_names_of_the_broker_are_spelled_in_one_module() -> None:
    """A subject, stream or header that is written out elsewhere escapes the prefix and the next rename."""
    found = [
        f"{module.where}:{line} spells {text!r}"
        for module in modules()
        if not module.inside("millstream_schemas.names", "millstream.jetstream")
        for line, text in module.strings()
        if BROKER_LITERAL.search(text)
    ]
    _report(found, "build it in `millstream_schemas/names.py`")


def test_no_task_runs_outside_a_group() -> None:
    """A bare task is neither awaited nor cancelled with its actor, and its exception is lost."""
    found: list[str] = []
    for module in modules():
        found += [
            f"{module.where}:{line} imports {name}"
            for line, name in module.imports()
            if name in ("asyncio.create_task", "asyncio.ensure_future")
        ]
        for node in () if module.inside(*MAY_LEAVE_TASKS_BEHIND) else ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_bare_task(node.func):
                found.append(f"{module.where}:{node.lineno} {ast.unparse(node.func)}()")
    _report(found, "start it in a TaskGroup")


def _is_bare_task(call: ast.Attribute) -> bool:
    if call.attr == "ensure_future":
        return True
    owner = ast.unparse(call.value)
    return call.attr == "create_task" and (owner == "asyncio" or "loop" in owner.rpartition(".")[2])


def test_exceptions_live_in_one_module() -> None:
    """Whoever handles errors finds all of them in one place, split by whose fault they are."""
    found = [
        f"{module.where}:{node.lineno} defines {node.name}"
        for module in _ours("millstream")
        if not module.inside(*ERRORS_LIVE_IN)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and any(_is_exception(base) for base in node.bases)
    ]
    _report(found, "define it in `millstream/errors.py`")


def _is_exception(base: ast.expr) -> bool:
    return ast.unparse(base).rpartition(".")[2].endswith(("Error", "Exception"))


def test_modules_fit_in_a_head() -> None:
    """A module that outgrows the limit does two things."""
    sized = [(module.where, len(module.text.splitlines())) for module in modules()]
    _report([f"{where}: {n} lines" for where, n in sized if n > MODULE_LINES], f"at most {MODULE_LINES}: split it")


def _anywhere(_module: Module) -> bool:
    return True


def _on_message_path(module: Module) -> bool:
    top = module.name.split(".")[1:2]
    return module.name in TRACKER_ACTOR or (module.inside("millstream") and top != [] and top[0] in MESSAGE_PATH)


@pytest.mark.parametrize(
    ("applies", "limit"),
    [
        pytest.param(_anywhere, FUNCTION_LINES, id="everywhere"),
        pytest.param(_on_message_path, MESSAGE_PATH_LINES, id="message path"),
    ],
)
def test_functions_fit_a_screen(applies: Callable[[Module], bool], limit: int) -> None:
    """The path of one message reads top to bottom; docstrings do not count."""
    found = [
        f"{module.where}:{function.lineno} {function.name} has {lines} lines"
        for module in modules()
        if applies(module)
        for function, lines in module.functions()
        if lines > limit
    ]
    _report(found, f"at most {limit}: name its parts")


def test_no_file_names_a_machine_or_a_registry() -> None:
    """The repository is for strangers: no path of one machine, no host of one registry."""
    found: list[str] = []
    for path in repository_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture or another binary
        where = path.relative_to(REPOSITORY).as_posix()
        found += [f"{where}:{i} says {word}" for i, line in enumerate(lines, 1) for word in FORBIDDEN if word in line]
    _report(found, "say it without")
