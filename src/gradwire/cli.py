"""The command line: `gradwire run` starts a script, `gradwire plan show` explains a plan, `gradwire split` a pipeline's cuts."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from gradwire.core.mesh import AXES
from gradwire.core.pipeline import SCHEDULES, Pipeline
from gradwire.core.plan import BATCH_NORM_RULES, NONFINITE_RULES, Plan, toml_key
from gradwire.errors import GradwireError, UsageError
from gradwire.launch.job import Job, run_job
from gradwire.launch.output import OutputMode

__all__ = ["main"]

READER_GONE = 128 + 13  # what a shell reports of a program that SIGPIPE ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, a worker's own, 1 for a failure, 2 for wrong usage.

    141 if the reader of what it prints (help, a plan) has gone.
    """
    try:
        options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
        act: Callable[[argparse.Namespace], int] = options.act
        return act(options)
    except UsageError as error:
        print(f"gradwire: {error}", file=sys.stderr)
        return 2
    except GradwireError as error:
        print(f"gradwire: {error}", file=sys.stderr)
        return 1


def _say(*lines: str) -> int:
    """Print, and flush while a reader that has gone (``| head -1``) can still be met quietly; returns the exit code."""
    try:
        print(*(f"{line}\n" for line in lines), sep="", end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter flushes at its end
        return READER_GONE
    return 0


class _Parser(argparse.ArgumentParser):
    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        super().exit(_say() or status, message)  # after --help or --version

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import importlib.metadata  # only here: it costs as much as the rest of the start

        try:
            version = importlib.metadata.version("gradwire")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed)"
        parser.exit(_say(f"gradwire {version}"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="gradwire", description="Train a PyTorch model over processes and machines.")
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands.add_parser("run", help="start a script on several processes", allow_abbrev=False))
    plan = commands.add_parser("plan", help="look at a plan").add_subparsers(metavar="COMMAND", required=True)
    show = plan.add_parser("show", help="check a plan and explain it", allow_abbrev=False)
    show.add_argument("file", metavar="FILE", type=Path, nargs="?", help="the plan, TOML (default: the default plan)")
    show.add_argument("--sync", metavar="TEXT", help="in place of the file's sync: q4, local:every=16,codec=q4, ...")
    show.add_argument("-n", metavar="N", type=_count, help="check it for N ranks, and count bytes for them (default 2)")
    show.set_defaults(act=_show)
    _add_split(commands.add_parser("split", help="where a pipeline would cut a model, and why", allow_abbrev=False))
    inspect = commands.add_parser("inspect", help="what is in a checkpoint", allow_abbrev=False)
    inspect.add_argument("directory", metavar="DIR", type=Path, help="what gw.save was given, or one checkpoint in it")
    inspect.set_defaults(act=_inspect)
    export = commands.add_parser("export", help="the model of a checkpoint as one file", allow_abbrev=False)
    export.add_argument("directory", metavar="DIR", type=Path, help="what gw.save was given, or one checkpoint in it")
    export.add_argument("file", metavar="FILE", type=Path, help="a .safetensors file, under the model's own names")
    export.set_defaults(act=_export)
    return parser


def _inspect(options: argparse.Namespace) -> int:
    from gradwire.checkpoint.api import inspect  # only here: it needs torch

    return _say(inspect(options.directory))


def _export(options: argparse.Namespace) -> int:
    from gradwire.checkpoint.api import export

    export(options.directory, options.file)
    return _say(f"wrote {options.file}, {options.file.stat().st_size:,} bytes")


def _add_split(split: argparse.ArgumentParser) -> None:
    split.usage = "gradwire split FILE.py:FUNCTION --pipeline N [options]"
    split.add_argument(
        "build", metavar="FILE.py:FUNCTION", help="a function that returns the model and an example batch"
    )
    split.add_argument("--pipeline", metavar="N", type=_count, required=True, help="workers along the pipeline")
    split.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="the order of work (default 1f1b)")
    split.add_argument("--microbatches", metavar="M", type=_count, help="parts of a batch (default twice the stages)")
    split.add_argument("--stages-per-rank", metavar="V", type=_count, help="with --schedule interleaved (default 2)")
    split.add_argument("--speeds", metavar="A,B,...", type=_numbers, default=(), help="how fast the workers are")
    split.add_argument(
        "--memory", metavar="BYTES,...", type=_numbers, default=(), help="what each worker has for its part"
    )
    split.set_defaults(act=_split)


def _split(options: argparse.Namespace) -> int:
    stages: int = options.stages_per_rank or (2 if options.schedule == "interleaved" else 1)
    pipeline = Pipeline(
        schedule=options.schedule,
        microbatches=options.microbatches,
        stages_per_rank=stages,
        speeds=options.speeds,
        memory_bytes=tuple(int(number) for number in options.memory),
    )
    build = _function(options.build)
    from gradwire.parallel.report import split_report  # only here: it needs torch

    return _say(split_report(build, options.pipeline, pipeline))


def _function(text: str) -> Callable[[], object]:
    """The function that ``FILE.py:FUNCTION`` names; the file runs as when it is imported."""
    name, _, attribute = text.rpartition(":")
    file = Path(name)
    if not name or not attribute.isidentifier() or not file.is_file():
        raise UsageError(f"{text}: there is no such file and function; give FILE.py:FUNCTION, e.g. model.py:build")
    sys.path.insert(0, str(file.resolve().parent))  # as python FILE.py would have it
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{name} is no Python file; give FILE.py:FUNCTION, e.g. model.py:build")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    found: object = getattr(module, attribute, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{name} has no function {attribute!r}; it has {', '.join(functions) or 'none'}")
    return found


def _add_run(run: argparse.ArgumentParser) -> None:
    run.usage = "gradwire run [options] (-m MODULE | SCRIPT) [ARGUMENTS ...]"
    run.add_argument("-n", metavar="N", type=_count, default=1, help="processes on this host (default 1)")
    run.add_argument("--nodes", metavar="N", type=_count, default=1, help="hosts (default 1)")
    run.add_argument("--node-rank", metavar="K", type=_whole, help="this host's number, from 0")
    run.add_argument("--rendezvous", metavar="HOST:PORT", type=_address, help="where node 0 listens for the others")
    run.add_argument("--join-timeout", metavar="S", type=_seconds, default=300.0, help="wait for hosts (default 300 s)")
    run.add_argument("--output", metavar="rank0|all|DIR", default="rank0", help="what to show, or a folder for logs")
    run.add_argument("--plan", metavar="FILE", type=Path, help="the plan, TOML")
    run.add_argument("--mesh", metavar="AXIS=N,...", type=_mesh, help="sizes of the mesh axes: data=2,pipeline=2")
    run.add_argument("--sync", metavar="TEXT", help="how and when workers agree: q4, local:every=16,codec=q4, ...")
    run.add_argument("--accumulate", metavar="K", type=_count, help="micro-batches a step")
    run.add_argument("--batch-norm", choices=BATCH_NORM_RULES, help="statistics of one rank, or of all")
    run.add_argument("--on-nonfinite", choices=NONFINITE_RULES, help="what a NaN or inf in a gradient does")
    run.add_argument("--timeout", metavar="S", type=_seconds, help="end the job after a hang this long (default 300 s)")
    run.add_argument("-m", dest="module", action="store_true", help="run a module instead of a script")
    run.add_argument("program", metavar="SCRIPT", help="a Python script, or a module with -m")
    run.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="passed on to the script")
    run.set_defaults(act=_run)


def _run(options: argparse.Namespace) -> int:
    node_rank = _check_nodes(options)
    program, module = _check_program(options)
    output: str = options.output
    mode: OutputMode = "rank0" if output == "rank0" else "all" if output == "all" else Path(output)
    job = Job(
        program=program,
        arguments=tuple(options.arguments),
        module=module,
        num_local=options.n,
        nodes=options.nodes,
        node_rank=node_rank,
        rendezvous=options.rendezvous,
        join_timeout_s=options.join_timeout,
        output=mode,
        plan_text=_plan_text(options),
        timeout_s=options.timeout,
    )
    return run_job(job)


def _check_nodes(options: argparse.Namespace) -> int:
    nodes: int = options.nodes
    node_rank: int | None = options.node_rank
    if nodes > 1 and (options.rendezvous is None or node_rank is None):
        missing = "--rendezvous HOST:PORT" if options.rendezvous is None else "--node-rank K"
        raise UsageError(
            f"--nodes {nodes} needs {missing} too: the same address on every host, K from 0 to {nodes - 1}"
        )
    if node_rank is not None and node_rank >= nodes:
        raise UsageError(f"--node-rank {node_rank} is not below --nodes {nodes}: use 0 to {nodes - 1}")
    return node_rank or 0


def _check_program(options: argparse.Namespace) -> tuple[str, bool]:
    program: str = options.program
    if options.module:
        sys.path.insert(0, "")  # as python -m would find it
        try:
            found = importlib.util.find_spec(program) is not None
        except (ImportError, ValueError):
            found = False
        finally:
            sys.path.remove("")
        if not found:
            raise UsageError(f"-m {program}: there is no such module; allowed is a module that python -m can run")
        return program, True
    if not Path(program).is_file():
        what = "is a folder" if Path(program).is_dir() else "does not exist"
        raise UsageError(f"the script {program} {what}: give a Python file, or -m MODULE")
    return program, False


def _plan_text(options: argparse.Namespace) -> str | None:
    """The plan file with the options in it, as TOML; None if neither was given."""
    plan = {} if options.plan is None else _read_plan(options.plan)[1]
    names = ("sync", "accumulate", "batch_norm", "on_nonfinite")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.plan is not None and not given and options.mesh is None:
        text = _read_plan(options.plan)[0]
        if options.nodes == 1:
            Plan.from_toml(text).check(options.n)
        return text
    if options.mesh is not None:
        given["mesh"] = options.mesh
    text = _to_toml({**plan, **given}) if plan or given else None
    if text is not None and options.nodes == 1:
        Plan.from_toml(text).check(options.n)
    return text


def _read_plan(file: Path) -> tuple[str, dict[str, object]]:
    try:
        text = file.read_text()
    except OSError as error:
        raise UsageError(f"the plan {file} cannot be read ({error.strerror}): give a TOML file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the plan {file} is not valid TOML: {error}") from error
    Plan.from_toml(text, where=f"the plan {file}")
    return text, tomllib.loads(text)


def _to_toml(table: dict[str, object], prefix: str = "") -> str:
    """Plain values first, then tables; JSON's strings, numbers, booleans and lists of them are TOML's too."""
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"{toml_key(key)} = {json.dumps(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += [f"[{prefix}{toml_key(key)}]", _to_toml(value, f"{prefix}{toml_key(key)}.").rstrip("\n")]  # pyright: ignore
    return "\n".join(line for line in lines if line) + "\n"


def _show(options: argparse.Namespace) -> int:
    plan = Plan() if options.file is None else Plan.from_toml(_read_plan(options.file)[0])
    if options.sync is not None:
        plan = replace(plan, sync=options.sync)
    if options.n is not None:
        plan.check(options.n)
    from gradwire.sync.named import explain  # only here: it needs torch, which the launcher does not

    return _say(plan.words(), explain(plan.sync, options.n or plan.mesh.get("data", 2)))


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use a whole number, 0 or more")
    return int(text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < len(text) < 7 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use a whole number, 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use a number of seconds above 0")
    return seconds


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = (0.0,)
    if not all(0 < number < 1e18 for number in numbers):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; use numbers above 0 with commas between, one for each worker"
        )
    return numbers


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port[:6]) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use HOST:PORT with a port from 1 to 65535")
    return host, int(port)


def _mesh(text: str) -> dict[str, int]:
    mesh: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in mesh:
            raise argparse.ArgumentTypeError(f"{text!r}: {axis!r} is not a mesh axis; allowed is {', '.join(AXES)}=N")
        mesh[axis] = _count(size)
    return mesh
