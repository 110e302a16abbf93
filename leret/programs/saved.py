"""Save an optimized program to disk, and load it in any DSPy application.

The directory contains ``program.json``, the program's source file (if there is one) and the trained
policies. It contains no pickles and no API keys. Loading runs the program's source, so only load
programs that you trust.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import dspy
from dspy.predict.parameter import Parameter

from leret.config.base import Settings, portable, resolve_paths, secrets_in
from leret.config.data import DataSettings
from leret.config.policy import PolicySettings
from leret.config.retriever import RetrieverSettings
from leret.core.classes import class_at, is_in_file, path_of, plain_value
from leret.core.dspy_internals import carried_run, current_adapter, run_program
from leret.core.errors import ConfigError, LeretError, ProgramError, raised
from leret.core.files import atomic_file, write_atomically
from leret.core.stages import FILE_MODULE, source_digest, source_files
from leret.datasets.load import load_corpus
from leret.policies.load import policy_state
from leret.policies.saved import Servers, lm_record, open_lm, open_policy, policy_record
from leret.programs.adapters import adapter_record, load_adapter, takes_tools
from leret.programs.load import load_program
from leret.programs.pick import named_picks
from leret.programs.search import Search
from leret.retrieval.base import Retriever
from leret.retrieval.caching import with_cache
from leret.retrieval.load import load_retriever, reopen, retriever_record

_VERSION = 3
_FILE = "program.json"
_LOG = logging.getLogger("leret")

P = TypeVar("P", bound=dspy.Module)


@dataclass(frozen=True)
class ProgramSource:
    """A program's file, class name and constructor arguments."""

    path: Path
    name: str
    arguments: dict[str, Any]


class TrainedProgram(dspy.Module):
    """A program with its saved LMs, adapter and retriever.

    Use it like the program itself. It ignores ``dspy.configure``: the predictors keep their LMs,
    and the adapter applies only during the forward pass. `close`, or leaving a ``with`` block,
    stops the servers started by `load`.
    """

    def __init__(
        self,
        program: dspy.Module,
        adapter: dspy.Adapter,
        servers: Servers | None = None,
        rm: Any = None,
    ) -> None:
        super().__init__()
        self.program = program
        self.adapter = adapter
        self.rm = rm
        self._servers = servers or Servers()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "program" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.program, name)

    def _context(self) -> Any:
        if self.rm is None or carried_run() is not None:  # leret itself answers searches
            return dspy.context(adapter=self.adapter)
        return dspy.context(adapter=self.adapter, rm=self.rm)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:  # DSPy warns about direct calls of forward
        with self._context():
            return run_program(self.program, *args, **kwargs)

    async def aforward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program.

        A program without ``aforward`` runs in a worker thread, so that other tasks can run.
        """
        if not callable(getattr(type(self.program), "aforward", None)):
            return await dspy.asyncify(self._run)(*args, **kwargs)
        with self._context():
            return await self.program.acall(*args, **kwargs)

    def save(self, path: str | Path, *args: Any, **kwargs: Any) -> None:
        """Save to a directory that `load` reads.

        With a file name or other arguments, save as DSPy does.
        """
        _save(self, path, *args, **kwargs)

    def close(self) -> None:
        self._servers.close()

    def __enter__(self) -> TrainedProgram:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def with_save(program: P, adapter: dspy.Adapter | None = None) -> P:
    """Make ``program.save(directory)`` write all that `load` needs, including the adapter."""
    program.save = partial(_save, program, adapter=adapter)
    return program


def _save(
    program: dspy.Module,
    path: str | Path,
    *args: Any,
    adapter: dspy.Adapter | None = None,
    **kwargs: Any,
) -> None:
    if args or kwargs or Path(path).suffix in {".json", ".pkl"}:
        dspy.Module.save(program, path, *args, **kwargs)
    else:
        save(program, path, adapter=adapter)


def save(
    program: dspy.Module,
    directory: str | Path,
    *,
    adapter: dspy.Adapter | None = None,
    source: ProgramSource | None = None,
    policies: Mapping[str, PolicySettings] | None = None,
    retriever: RetrieverSettings | None = None,
    data: DataSettings | None = None,
) -> None:
    """Write a directory that `load` reads.

    Args:
        program: program with leret LMs or plain ``dspy.LM``s; predictors without an LM use
            ``dspy.settings.lm``.
        directory: target directory; other files in it are kept.
        adapter: adapter to save; by default ``dspy.settings.adapter``, or else DSPy's default
            adapter.
        source: the program's file, which is copied; by default the program is saved by its class's
            import path.
        policies: policies by predictor (``""`` for all others), saved with temperature 0 instead of
            the program's LMs and pick actors.
        retriever: retriever for every `leret.Search`, over the corpus of ``data``; by default the
            program's retrievers.
        data: data settings that name the corpus.

    Raises:
        ProgramError: the adapter, an LM or the state cannot be written as JSON.
        PolicyError: a policy has no weights.
    """
    rm = dspy.settings.rm
    if isinstance(program, TrainedProgram):
        adapter = adapter or program.adapter
        rm = program.rm or rm
        program = program.program
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    value = {
        "program": _record(program, source, directory),
        "adapter": adapter_record(adapter or current_adapter()),
        **_answered_by(program, policies, directory),
        "searches": {} if retriever else _searches(program, rm, directory),
        "retriever": retriever and portable(retriever, directory),
        "data": data and portable(data, directory),
    }
    _write(directory, value)


def load(
    directory: str | Path,
    *,
    serve: str | None = None,
    lm: dspy.BaseLM | None = None,
    retriever: Retriever | None = None,
    program: dspy.Module | None = None,
    api_key_env: str | Collection[str] | None = None,
) -> TrainedProgram:
    """Load a saved program, ready to call or to use inside another program.

    Args:
        directory: directory written by ``optimized.save(directory)``, or the ``program`` directory
            of a run.
        serve: where to run the predictors' leret policies. None: as saved. ``local``: in this
            process. ``vllm``: on servers that start now and stop when the program is closed. A URL
            such as ``http://127.0.0.1:8000/v1``: on an OpenAI-compatible server that lists the
            policies by name, as `leret serve policy` does; this needs no local torch. Other LMs and
            pick actors always run as saved.
        lm: LM for all predictors, instead of the saved LMs.
        retriever: retriever to use instead of the saved retriever.
        program: program that receives the saved state, if its class cannot be constructed from the
            saved arguments.
        api_key_env: environment variables with keys that the program may send to its servers. The
            first variable is used for the server at the URL, and for LMs that were saved with a
            key.

    Raises:
        ConfigError: the program would send a key that ``api_key_env`` does not allow.
        ProgramError: the directory is not a saved program, its source no longer runs, or its
            retriever was not saved.
        PolicyError: a policy is missing, its chat template has changed, or the server does not have
            it.
        RetrievalError: the index is missing or belongs to a different corpus.
    """
    directory = Path(directory)
    if serve not in {None, "local", "vllm"} and not str(serve).startswith(("http://", "https://")):
        raise ConfigError(
            f"serve={serve!r}: use None, 'local', 'vllm' or a URL such as http://127.0.0.1:8000/v1"
        )
    saved = _read(directory)
    try:
        return _load(saved, directory, serve, lm, retriever, program, api_key_env)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise ProgramError(
            f"{directory / _FILE} cannot be loaded ({raised(error)}); save the program again"
        ) from error


def _load(
    saved: Mapping[str, Any],
    directory: Path,
    serve: str | None,
    lm: dspy.BaseLM | None,
    retriever: Retriever | None,
    program: dspy.Module | None,
    api_key_env: str | Collection[str] | None,
) -> TrainedProgram:
    keys = [api_key_env] if isinstance(api_key_env, str) else list(api_key_env or ())
    records = saved["lms"] if lm is None else []
    picks = saved["picks"]
    searches = saved["searches"]
    searched = None
    if saved["retriever"]:
        searched = resolve_paths(RetrieverSettings.model_validate(saved["retriever"]), directory)
    _refuse_keys(_policies_in([*records, *picks.values()]), keys, directory / _FILE)
    if retriever is None:
        states = [record["settings"] for record in searches.values() if "settings" in record]
        retrievers = [searched, *map(RetrieverSettings.model_validate, states)]
        _refuse_keys(retrievers, keys, directory / _FILE)
    program = program or _construct(saved["program"], directory, searched)
    if retriever is None and searched is not None:
        data = resolve_paths(DataSettings.model_validate(saved["data"]), directory)
        retriever = _retriever(searched, data, directory)
    rm = _open_searches(program, searches, directory, retriever)
    if serve is not None and lm is None and not any("policy" in record for record in saved["lms"]):
        raise ConfigError(
            f"serve={serve!r}: no predictor of this program has a leret policy; remove serve"
        )
    servers = Servers()
    try:
        native = saved["adapter"]["settings"].get("use_native_function_calling")
        signatures = [predictor.signature for predictor in program.predictors()]
        tools = bool(native) and any(map(takes_tools, signatures))
        key = next(iter(keys), None)
        lms: dict[int | None, Any] = {None: None}
        for place, record in enumerate(records):
            lms[place] = open_lm(record, directory, serve, servers, key, tools)
        _restore(program, saved["predictors"], lambda place: lm or lms[place])
        for name, pick in named_picks(program).items():
            if picks.get(name) is not None:
                pick.actor = open_policy(picks[name], directory)
        return TrainedProgram(program, load_adapter(saved["adapter"]), servers, rm)
    except BaseException:
        servers.close()
        raise


def _answered_by(
    program: dspy.Module, policies: Mapping[str, PolicySettings] | None, directory: Path
) -> dict[str, Any]:
    """Return records of the predictors, their LMs and the picks; also write the weights."""
    parts = _parts(program)
    picks = named_picks(program)
    lms: dict[str, Any] = {}
    actors = {}
    if policies is None:
        for name, part in parts.items():
            lms[name] = getattr(part, "lm", None)
        for name, pick in picks.items():
            if pick.actor is not None:
                actors[name] = PolicySettings.model_validate(policy_state(pick.actor))
    else:
        for name in parts:
            lms[name] = policies.get(name.removeprefix("self."), policies[""])
        for name in picks:
            actors[name] = policies.get(name, policies[""])

    positions: dict[Any, int] = {}  # of each LM in the list of records
    for lm in lms.values():
        if lm is not None:
            positions.setdefault(lm, len(positions))
    predictors = {}
    for name, part in parts.items():
        state = {**part.dump_state(), "lm": None}
        predictors[name] = {"state": state, "lm": positions.get(lms[name])}
    if policies is None:
        lm_records = [lm_record(lm, directory) for lm in positions]
    else:
        lm_records = [policy_record(lm, directory, {"temperature": 0.0}) for lm in positions]
    pick_records = {}
    for name, actor in actors.items():
        pick_records[name] = policy_record(actor, directory, {}, keep=policies is None)
    return {"predictors": predictors, "lms": lm_records, "picks": pick_records}


def saved_policies(directory: Path) -> dict[str, PolicySettings]:
    """Return a saved program's policies by predictor and pick, and the first for ``""``.

    Empty for other paths.
    """
    if not (directory / _FILE).is_file():
        return {}
    saved = _read(directory)
    records = {}
    for name, predictor in saved["predictors"].items():
        if predictor["lm"] is not None:
            records[name] = saved["lms"][predictor["lm"]]
    records |= saved["picks"]
    policies: dict[str, PolicySettings] = {}
    for name, record in records.items():
        if "policy" in record:
            settings = PolicySettings.model_validate(record["policy"])
            policies[name.removeprefix("self.")] = resolve_paths(settings, directory)
    if not policies:
        return {}
    return {"": next(iter(policies.values())), **policies}


def _policies_in(records: Sequence[Mapping[str, Any]]) -> list[PolicySettings]:
    states = [record["policy"] for record in records if "policy" in record]
    return [PolicySettings.model_validate(state) for state in states]


def _refuse_keys(settings: Sequence[Settings | None], allowed: Collection[str], file: Path) -> None:
    """Raise ConfigError if settings send a key that is in the environment and not ``allowed``."""
    for variable, urls in secrets_in(settings):
        if variable in os.environ and variable not in allowed:
            raise ConfigError(
                f"{file} sends the key in ${variable} to {urls}; to allow this, use "
                f"leret.load(..., api_key_env={variable!r}), or pass another LM or retriever"
            )


def _searches(program: dspy.Module, rm: Any, directory: Path) -> dict[str, Any]:
    retrievers = {place: search.retriever for place, search in _parts(program, Search).items()}
    if None in retrievers.values() or _parts(program, dspy.Retrieve):
        retrievers[""] = rm
    records = {}
    for place, retriever in retrievers.items():
        if retriever is None:
            continue
        record = retriever_record(retriever, directory)
        records[place] = record or {"unsaved": type(retriever).__name__}
        if record is None:
            _LOG.warning(
                "the retriever of %s is a %s, which cannot be saved; pass a retriever when you load the program: "
                "leret.load(..., retriever=...)",
                place or "dspy.settings.rm",
                type(retriever).__name__,
            )
    return records


def _open_searches(
    program: dspy.Module, records: Mapping[str, Any], directory: Path, retriever: Retriever | None
) -> Retriever | None:
    """Set the retriever of each search, and return the retriever for ``dspy.settings.rm``."""
    retrievers: dict[str, Retriever] = {}

    def open_at(place: str) -> Retriever | None:
        record = records.get(place)
        if retriever is not None or record is None or "unsaved" in record:
            return retriever
        name = json.dumps(record)
        if name not in retrievers:
            try:
                retrievers[name] = reopen(record, directory)
            except LeretError as error:
                raise ProgramError(
                    f"{error}; or pass another retriever: leret.load(..., retriever=...)"
                ) from error
        return retrievers[name]

    for place, search in _parts(program, Search).items():
        search.retriever = open_at(place) or search.retriever
        if search.retriever is None and place in records:
            raise ProgramError(
                f"the retriever of {place} was a {records[place]['unsaved']} and was not saved; "
                "pass a retriever: leret.load(..., retriever=...)"
            )
    return open_at("")


def _parts(program: dspy.Module, kind: type = Parameter) -> dict[str, Any]:
    """Return a program's stateful parts (like predictors) by attribute path, compiled ones too."""
    parts = program.named_sub_modules(type_=kind)  # candidate programs from optimizers are left out
    return {place: part for place, part in parts if not place.startswith("self.candidate_programs")}


def _record(program: dspy.Module, source: ProgramSource | None, directory: Path) -> dict[str, Any]:
    kind = type(program)
    if source is None and kind.__module__.startswith(FILE_MODULE):
        source = ProgramSource(Path(inspect.getfile(kind)), kind.__name__, _arguments(program))
    if source is not None:
        _copy_source(source.path, directory)
        file = source.path.name
        return {
            "file": file,
            "digest": source_digest(directory / file),
            "class": source.name,
            "arguments": source.arguments,
            "values": {},
        }
    values = _values(program)
    try:
        return {"class": path_of(kind), "arguments": _arguments(program), "values": values}
    except ProgramError as error:
        advice = f"leret.load(..., program={kind.__name__}(...))"
        _LOG.warning("%s; to load the saved state, pass a program: %s", error, advice)
        return {"class": kind.__name__, "arguments": None, "reason": f"{error}", "values": values}


def _copy_source(path: Path, directory: Path) -> None:
    """Copy a program's file, and the modules it imports from its own folder or below."""
    folder = path.resolve().parent
    copies = {directory / path.name: path}
    for module in source_files(path)[1:]:
        if module.is_relative_to(folder):
            copies[directory / module.relative_to(folder)] = module
    for target, source in copies.items():
        with atomic_file(target, "wb") as file:
            file.write(source.read_bytes())


def _values(program: dspy.Module) -> dict[str, Any]:
    values = {}
    for place, part in _parts(program, dspy.Module).items():
        if isinstance(part, Parameter):
            continue
        for name, value in vars(part).items():
            if name.startswith("_") or name == "run_dir" or isinstance(value, list | dict):
                continue
            if plain_value(value):
                values[f"{place}.{name}"] = value
    return values


def _arguments(program: dspy.Module) -> dict[str, Any]:
    attributes = vars(program)
    parameters = inspect.signature(type(program).__init__).parameters
    arguments = {}
    for name, parameter in list(parameters.items())[1:]:
        is_variadic = parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
        if is_variadic or name == "callbacks":
            continue
        value = attributes.get(name, parameter.default)
        if value is parameter.empty or (name in attributes and not plain_value(value)):
            raise ProgramError(
                f"the argument {name} of {type(program).__name__} is not stored as a JSON value"
            )
        if name in attributes:
            arguments[name] = value
    return arguments


def _construct(
    record: Mapping[str, Any], directory: Path, searched: RetrieverSettings | None
) -> dspy.Module:
    name = record["class"]
    arguments = record["arguments"]
    kind = name.rpartition(":")[2]
    advice = f"pass a program for the saved state: leret.load(..., program={kind}(...))"
    if arguments is None:
        raise ProgramError(f"{record['reason']}; {advice}")
    if "file" in record:
        file = directory / record["file"]
        if file.resolve().parent != directory.resolve():
            raise ProgramError(
                f"{directory / _FILE}: the program's file {record['file']} is not in this directory"
            )
        if record["digest"] != source_digest(file):
            raise ProgramError(f"{file} or a module it imports has changed since saving; {advice}")
        keys: dict[str, Any] = {}
        if searched is not None:
            keys = {"k": searched.k, "exclude_seen": searched.exclude_seen}
        program = load_program(file, name, arguments, **keys)
    else:
        try:
            program = class_at(name, dspy.Module)(**arguments)
        except (ProgramError, TypeError, ValueError) as error:
            raise ProgramError(f"{name} cannot be constructed again ({error}); {advice}") from error
    for place, value in _values(program).items():
        saved = record["values"].get(place, value)
        if saved != value:
            raise ProgramError(f"{place} is {value!r} but was saved as {saved!r}; {advice}")
    return program


def _restore(
    program: dspy.Module, saved: Mapping[str, Any], lm_at: Callable[[int | None], Any]
) -> None:
    parts = _parts(program)
    if parts.keys() != saved.keys():
        differ = ", ".join(sorted(parts.keys() ^ saved.keys()))
        raise ProgramError(
            f"{type(program).__name__} was saved with other predictors ({differ}); use the saved class"
        )
    for name, part in parts.items():
        part.load_state(saved[name]["state"])
        if hasattr(part, "lm"):
            part.lm = lm_at(saved[name]["lm"])


def _retriever(settings: RetrieverSettings, data: DataSettings, directory: Path) -> Retriever:
    corpus = None
    if settings.needs_corpus or data.corpus_file is not None:
        corpus = load_corpus(data)
    retriever = load_retriever(settings, corpus, directory / "cache")
    return with_cache(retriever, settings)


def _write(directory: Path, value: Mapping[str, Any]) -> None:
    value = {"version": _VERSION, "dspy": dspy.__version__, **value}
    try:
        text = json.dumps(value, indent=1, ensure_ascii=False)
        write_atomically(directory / _FILE, text + "\n")
    except (TypeError, ValueError) as error:
        raise ProgramError(
            f"the state of the program is not JSON ({error}); check its demos"
        ) from error


def _read(directory: Path) -> dict[str, Any]:
    path = directory / _FILE
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        fault = f"it has no {_FILE}" if isinstance(error, FileNotFoundError) else str(error)
        raise ProgramError(
            f"{directory} is not a saved program ({fault}); `optimized.save(directory)` writes one, and `leret eval` "
            "writes R/program"
        ) from error
    if not isinstance(saved, dict) or saved.get("version") != _VERSION:
        raise ProgramError(f"{path} does not have version {_VERSION}; save the program again")
    for kind in _kinds_in(saved):
        if is_in_file(kind):
            raise ProgramError(
                f"{path} names the kind {kind}, and the code in a file runs only if a recipe names it; install it as "
                "a package, name it package.module:NAME, and save the program again"
            )
    if saved.get("dspy") != dspy.__version__:
        _LOG.warning(
            "%s was saved with DSPy %s, but this is DSPy %s",
            directory,
            saved.get("dspy"),
            dspy.__version__,
        )
    return saved


def _kinds_in(value: Any) -> Iterator[str]:
    """Yield the values of all keys ``kind`` in JSON values."""
    if isinstance(value, dict):
        if isinstance(value.get("kind"), str):
            yield value["kind"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _kinds_in(item)
