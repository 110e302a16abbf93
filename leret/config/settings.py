"""The recipes: one pydantic model a stage. Reading YAML into them is `leret.config.load`.

Every key that can change a result stands here with its default, its unit and its range; nothing is read from
anywhere else. Unknown keys are refused. The resolved recipe is written into the run directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from leret.config.base import Settings
from leret.config.clients import (
    AnswersSettings,
    BaseUrls,
    ClinicalTrialsSettings,
    PubMedSettings,
    RemoteSettings,
    RM3Settings,
)

DataKind = Literal["jsonl", "beir", "hotpotqa", "hover", "musique", "2wiki", "world"]
Split = Literal["train", "dev", "test", "all"]
Measure = str
Weight = Annotated[FiniteFloat, Field(ge=0)]


class DataSettings(Settings):
    """Questions and corpus."""

    kind: DataKind = "jsonl"
    corpus: str | None = Field(None, description="path, or hf:NAME; not for kind world")
    questions: str | None = Field(None, description="path, or hf:NAME; not for kind world")
    split: Split = Field("train", description="the questions that are sampled; evaluation has its own")
    limit: PositiveInt | None = Field(None, description="at most so many questions of the split")
    seed: int = Field(0, description="of the split, of the order under `limit`, of the generated world")
    skip_bad: bool = Field(False, description="count unreadable lines instead of refusing the file")
    options: dict[str, Any] = Field(default_factory=dict, description="of the generator, for kind world")

    @model_validator(mode="after")
    def _paths(self) -> DataSettings:
        if self.kind != "world" and not self.questions:
            raise ValueError(
                f"data.questions is missing: kind {self.kind} reads a file; name it with --set data.questions=FILE, or "
                "let `leret init` write a recipe for your files"
            )
        return self


class DenseSettings(Settings):
    """An embedding model, and where its vectors are searched."""

    model: str | None = Field(None, description="directory of a sentence-transformers model, or its name on the hub")
    query_prefix: str = Field("", description='put before a query: "query: " for E5')
    document_prefix: str = Field("", description='put before a document: "passage: " for E5')
    separator: str = Field(". ", description="between the title and the text of a document")
    normalize: bool = Field(True, description="compare by cosine; false compares by inner product, as Contriever does")
    store: Literal["flat", "hnsw", "chroma"] = Field("flat", description="faiss exact, faiss HNSW, or Chroma")
    hnsw_m: int = Field(32, ge=2, description="links a vector, hnsw and chroma")
    ef_construction: PositiveInt = Field(200, description="candidates while it is built, hnsw and chroma")
    ef_search: PositiveInt = Field(128, description="candidates of a search (k at least), hnsw and chroma")
    max_length: PositiveInt | None = Field(None, description="tokens; None takes the model's")
    batch_size: PositiveInt = 64
    device: str = "auto"


class ColbertSettings(Settings):
    """A ColBERT checkpoint, and its PLAID index."""

    checkpoint: str | None = Field(None, description="its directory; None takes one inside of the downloaded index")
    index_root: str | None = Field(None, description="of a downloaded index: the folder it is in")
    index_name: str | None = Field(None, description="of a downloaded index: its name in index_root")
    nbits: Literal[1, 2, 4, 8] = Field(2, description="bits a dimension of a residual")
    separator: str = Field(" | ", description="between the title and the text of a document")
    doc_maxlen: PositiveInt = Field(300, description="tokens of a document")
    query_maxlen: PositiveInt = Field(32, description="tokens of a query")
    kmeans_iterations: PositiveInt = Field(4, description="of the centroids")
    ncells: PositiveInt = Field(4, description="cells looked into for each token of a query")
    centroid_threshold: FiniteFloat = Field(0.4, description="centroids below this similarity are left out at first")
    ndocs: PositiveInt = Field(4096, description="candidates; at least 4 k are taken")
    batch_size: PositiveInt = Field(64, description="documents encoded at once")

    @model_validator(mode="after")
    def _downloaded(self) -> ColbertSettings:
        if (self.index_root is None) != (self.index_name is None):
            raise ValueError("index_root and index_name go together: the folder, and the index's name in it")
        return self


class EngineSettings(Settings):
    """A search engine."""

    kind: Literal["bm25", "tantivy", "dense", "colbert"] = "bm25"
    k1: FiniteFloat = Field(1.5, ge=0, description="of bm25")
    b: float = Field(0.75, ge=0, le=1, description="of bm25")
    stopwords: str | None = Field("english", description="of bm25 and tantivy")
    stemmer: str | None = Field(None, description="of bm25 and tantivy: a Snowball language")
    fold_accents: bool = Field(True, description="of bm25 and tantivy")
    dense: DenseSettings | None = None
    colbert: ColbertSettings | None = None

    @model_validator(mode="after")
    def _sections(self) -> EngineSettings:
        for name in ("dense", "colbert", "hybrid", "rm3", "remote", "pubmed", "clinicaltrials"):
            if getattr(self, name, None) is not None and self.kind != name:
                raise ValueError(f"{name}: given, but the kind is {self.kind}; say kind: {name}, or remove the section")
        if self.kind == "dense" and (self.dense is None or not self.dense.model):
            raise ValueError("dense.model is missing: kind dense needs a sentence-transformers model")
        if self.kind == "colbert" and (
            self.colbert is None or not (self.colbert.checkpoint or self.colbert.index_root)
        ):
            raise ValueError("colbert.checkpoint is missing: kind colbert needs one, or a downloaded index_root")
        return self

    def with_paths(self, move: Callable[[str], str]) -> Self:
        """A copy whose directories and files, where it names any, are what ``move`` makes of them."""
        changes: dict[str, Any] = {}
        for section, keys in (("dense", ("model",)), ("colbert", ("checkpoint", "index_root"))):
            values = getattr(self, section)
            if values is not None:
                moved = {key: move(getattr(values, key)) for key in keys if getattr(values, key)}
                changes[section] = values.model_copy(update=moved)
        hybrid: HybridSettings | None = getattr(self, "hybrid", None)
        if hybrid is not None:
            engines = tuple(engine.with_paths(move) for engine in hybrid.engines)
            changes["hybrid"] = hybrid.model_copy(update={"engines": engines})
        return self.model_copy(update=changes)


class HybridSettings(Settings):
    """Two engines, and how their rankings become one."""

    engines: tuple[EngineSettings, EngineSettings]
    fusion: Literal["rrf", "sum"] = Field("rrf", description="reciprocal ranks, or scores scaled to [0, 1]")
    weights: tuple[Weight, Weight] = Field((1.0, 1.0), description="of the two engines, not both 0")
    rank_constant: FiniteFloat = Field(60.0, ge=0, description="rrf: added to every rank")
    depth: PositiveInt = Field(100, description="documents asked of each engine (k at least)")

    @field_validator("weights")
    @classmethod
    def _weighs_something(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not any(value):
            raise ValueError("both are 0, and no document would have a score; give one engine a weight at least")
        return value


class RetrieverSettings(EngineSettings):
    """The search engine behind the program."""

    kind: Literal["bm25", "tantivy", "dense", "colbert", "hybrid", "rm3", "remote", "pubmed", "clinicaltrials"] = "bm25"  # type: ignore[assignment]
    k: PositiveInt = Field(3, description="passages a search")
    exclude_seen: bool = Field(False, description="a search skips what earlier searches found (off in the paper)")
    index: str | None = Field(None, description="index directory; None keeps it in the run directory's cache")
    hybrid: HybridSettings | None = None
    rm3: RM3Settings | None = None
    remote: RemoteSettings | None = None
    pubmed: PubMedSettings | None = None
    clinicaltrials: ClinicalTrialsSettings | None = None
    answers: AnswersSettings | None = Field(None, description="the cache of answers on disk")

    @property
    def index_kind(self) -> str | None:
        """Kind of the index that the engine opens; None where a server has it."""
        if self.kind in {"remote", "pubmed", "clinicaltrials"}:
            return None
        return "bm25" if self.kind == "rm3" else self.kind

    @property
    def needs_corpus(self) -> bool:
        """Does the engine search the documents of ``data.corpus``? One behind HTTP has its own."""
        return self.index_kind is not None or (self.remote is not None and self.remote.doc_id == "row")

    @model_validator(mode="after")
    def _hybrid(self) -> RetrieverSettings:
        if self.kind == "hybrid" and self.hybrid is None:
            raise ValueError("hybrid is missing: kind hybrid needs two engines")
        if self.kind == "remote" and self.remote is None:
            raise ValueError("remote.urls is missing: kind remote needs at least one, as in http://127.0.0.1:8893")
        return self


class PolicySettings(Settings):
    """The LM behind the program."""

    kind: Literal["local", "openai", "tgi", "together"] = "local"
    model: str = Field("demo", description="model directory, `demo` (shipped), or the served model's name")
    urls: BaseUrls = Field((), description="of servers: base URLs, of kind openai ending in /v1")
    api_key_env: str | None = Field(None, description="environment variable that holds the server's key")
    tokenizer: str | None = Field(None, description="kind tgi: directory with the chat template; None takes the model")
    enable_thinking: bool | None = Field(None, description="of chat templates that know it; None leaves it to them")
    temperature: float = Field(1.0, ge=0, description="of sampling; evaluation is greedy unless its recipe says so")
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: PositiveInt = Field(64, description="completion tokens at most")
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    timeout_s: float = Field(60.0, gt=0, description="of servers: deadline of an attempt")
    deadline_s: float = Field(600.0, gt=0, description="of servers: of a request, all attempts and waits together")
    max_retries: NonNegativeInt = Field(6, description="of servers: attempts after the first")
    concurrency: PositiveInt = Field(32, description="of servers: requests in flight at most")
    logprobs: bool = Field(False, description="openai, together: ask for log-probabilities and token ids")
    best_of: bool = Field(False, description="tgi: a prompt's samples in one request, which has no seed")
    price_prompt: float = Field(0.0, ge=0, description="of a million prompt tokens")
    price_completion: float = Field(0.0, ge=0, description="of a million completion tokens")

    @field_validator("api_key_env")
    @classmethod
    def _names_a_variable(cls, value: str | None) -> str | None:
        # The value is not repeated: it may well be the key.
        if value is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
            raise ValueError(
                "names an environment variable, in capitals (TOGETHER_API_KEY, say), and does not hold the key itself"
            )
        return value

    @model_validator(mode="after")
    def _fits_kind(self) -> PolicySettings:
        if self.kind == "openai" and not self.urls:
            raise ValueError("policy.urls is missing: kind openai needs at least one, as in http://127.0.0.1:8000/v1")
        if self.kind == "tgi" and not self.urls:
            raise ValueError("policy.urls is missing: kind tgi needs at least one, as in http://127.0.0.1:3000")
        if self.kind == "local" and self.urls:
            raise ValueError("policy.urls is given, but kind local runs in this process; use kind: openai")
        if self.kind == "together" and self.model == "demo":
            raise ValueError("policy.model is missing: kind together needs the name of a model of theirs")
        for name, kinds in _OF_KIND.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"policy.{name} is of kind {' and '.join(kinds)}, not of {self.kind}; remove it")
        return self

    def in_process(self, model: str) -> PolicySettings:
        """The same sampling by a model directory in this process; what is of servers alone gets its default."""
        kept = {name: getattr(self, name) for name in _OF_MODEL}
        return PolicySettings(kind="local", model=model, **kept)


_OF_MODEL = ("enable_thinking", "temperature", "top_p", "max_tokens", "device", "dtype")

_OF_KIND = {
    "tokenizer": ("tgi",),
    "enable_thinking": ("local", "openai", "tgi"),
    "best_of": ("tgi",),
    "logprobs": ("openai", "together"),
}
"""Policy settings that other kinds would ignore."""


class AdapterSettings(Settings):
    """How DSPy turns a call into messages and a completion into fields."""

    kind: Literal["chat", "json", "xml", "compact"] = "chat"
    words_per_item: PositiveInt = Field(40, description="compact: words kept of each passage")
    items: PositiveInt = Field(6, description="compact: passages kept")
    demo_items: NonNegativeInt = Field(0, description="compact: passages kept in a demo")
    instructions: bool = Field(False, description="compact: send the signature's instructions")


class ProgramSettings(Settings):
    """The DSPy program; other keys go to its constructor."""

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True)

    path: str = Field("pipelines/multihop.py:MultiHop", description="FILE.py:Class")
    adapter: AdapterSettings = AdapterSettings()

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the program's constructor (``hops: 2``, say)."""
        return dict(self.model_extra or {})


class BankSettings(Settings):
    """How the few-shot prompts are bootstrapped (LeReT, section 4.1)."""

    train_questions: PositiveInt = 50
    dev_questions: PositiveInt = 50
    max_demos: PositiveInt = 3
    candidates: PositiveInt = Field(8, description="candidate prompts that are scored; the best are kept")
    temperature: float = Field(0.7, ge=0, description="of the bootstrapping calls")
    path: str | None = Field(
        None, description="directory of your own prompts (*.json, as in R/prompts), not bootstrapped"
    )


class SamplingSettings(Settings):
    """What is tried at every state, and how it is scored."""

    prompts: PositiveInt = Field(4, description="prompts of the bank, the zero-shot one included")
    samples: PositiveInt = Field(1, description="completions a prompt and state")
    seed: int = 0
    reward: Literal["ap", "recall", "rr", "ndcg"] = Field(
        "ap", description="of the accumulated ranking; grades count as 1"
    )
    concurrency: PositiveInt = Field(128, description="questions in flight")
    max_error_rate: float = Field(0.1, ge=0, le=1, description="share of failed samples that stops the run")
    max_unparsed_rate: float = Field(0.5, ge=0, le=1, description="share of unparsed completions that stops the run")
    strategy: Literal["adjacent", "best-worst", "all", "margin"] = "adjacent"
    margin: float = Field(0.0, ge=0, description="of strategy margin: least difference of rewards")
    max_pairs: PositiveInt | None = Field(None, description="pairs kept a state, the widest margins first")
    bank: BankSettings = BankSettings()


class PretrainSettings(Settings):
    """How `leret pretrain` builds a small policy from gold-blind demonstrations."""

    kind: Literal["scratch", "minilm"]
    steps: PositiveInt | None = None
    minutes: float | None = Field(None, gt=0, description="CPU-minutes, one thread; the schedule is scaled to it")
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)


class SamplingRecipe(Settings):
    """`leret sample`: everything that later stages read from the run."""

    data: DataSettings
    retriever: RetrieverSettings = RetrieverSettings()
    policy: PolicySettings = PolicySettings()
    program: ProgramSettings = ProgramSettings()
    sampling: SamplingSettings = SamplingSettings()
    pretrain: PretrainSettings | None = None


class LoraSettings(Settings):
    """A low-rank adapter instead of full weights."""

    r: PositiveInt = 16
    alpha: PositiveInt = 32
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: str | tuple[str, ...] = "all-linear"


class TrainingRecipe(Settings):
    """`leret train`. Knows no data set: it reads the run's preferences."""

    algorithm: Literal["sft", "dpo", "ipo"]
    name: str | None = Field(None, description="of the policy in R/policies; the algorithm's name when absent")
    init: str = Field("base", description="base, the name of a policy of the run, a model directory, or demo")
    targets: Literal["best", "random"] = Field("best", description="sft: the best sample of a state, or any (control)")
    only_spread: bool = Field(True, description="sft: only states whose samples differ in reward")
    max_targets: PositiveInt = Field(1, description="sft: completions a state at most")
    match_steps_of: str | None = Field(None, description="sft: train as many steps as this policy took in all")
    epochs: float = Field(1.0, gt=0)
    learning_rate: float = Field(1e-5, gt=0)
    schedule: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="share of the steps")
    warmup_steps: NonNegativeInt = Field(0, description="their number, instead of warmup_ratio")
    optim: Literal["adamw_torch_fused", "adamw_torch", "rmsprop", "adafactor", "sgd"] = "adamw_torch_fused"
    weight_decay: float = Field(0.0, ge=0)
    batch_size: PositiveInt = Field(16, description="examples a step and device")
    accumulate: PositiveInt = Field(1, description="batches a step")
    max_grad_norm: float = Field(1.0, gt=0)
    max_length: PositiveInt = Field(
        2048, description="prompt and completion tokens; longer examples are dropped, counted"
    )
    beta: float = Field(0.05, gt=0, description="dpo, ipo")
    reduction: Literal["sequence", "token"] = Field("sequence", description="ipo: sum (the paper) or mean of log-probs")
    sft_weight: float = Field(0.0, ge=0, description="dpo, ipo: weight of an added likelihood of the chosen")
    lora: LoraSettings | None = None
    seed: int = 0
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: PositiveInt | None = Field(1, description="CPU threads; 1 makes a resumed run bit-equal")
    save_steps: PositiveInt = 50
    log_steps: PositiveInt = 5
    report_to: tuple[Literal["wandb", "tensorboard"], ...] = ()

    @property
    def policy_name(self) -> str:
        """The directory under R/policies."""
        return self.name or self.algorithm

    @model_validator(mode="after")
    def _fits(self) -> TrainingRecipe:
        name = self.policy_name
        if name in {"base", ""} or "/" in name or name.startswith("."):
            raise ValueError(f"name: {name!r} cannot name a policy; use letters, digits, - and _")
        if self.algorithm == "sft" and (self.sft_weight or self.reduction != "sequence"):
            raise ValueError("sft_weight and reduction belong to dpo and ipo, not to sft")
        if self.warmup_ratio and self.warmup_steps:
            raise ValueError("warmup_ratio and warmup_steps exclude each other; remove one")
        if self.algorithm != "sft" and (self.match_steps_of or self.targets != "best"):
            raise ValueError("match_steps_of and targets belong to sft")
        return self


class EvalRecipe(Settings):
    """`leret eval`: systems on held-out questions of the run's data."""

    evaluation: str | None = Field(
        None, pattern=r"^\w[\w.-]*$", description="directory in R/eval; None: of the split (test has none) and the file"
    )
    split: Literal["dev", "test", "all"] = "test"
    limit: PositiveInt | None = None
    questions: str | None = Field(None, description="another question file over the run's corpus")
    systems: tuple[str, ...] = Field(
        ("raw-question", "oracle-titles", "base", "bank", "policies"),
        description="`bank` = every few-shot prompt on the base, `policies` = every trained one, or single names",
    )
    demos: dict[str, str] = Field(default_factory=dict, description="extra systems: name to a prompt file, base policy")
    measures: tuple[Measure, ...] = ("recall", "ap")
    baseline: str = Field("base", description="the system that others are compared with, beside their predecessor")
    temperature: float = Field(0.0, ge=0)
    samples: PositiveInt = Field(1, description="runs a question, averaged, where temperature > 0")
    resamples: PositiveInt = Field(10_000, description="of the bootstrap")
    confidence: float = Field(0.95, gt=0, lt=1)
    examples: NonNegativeInt = Field(10, description="most improved and most worsened questions in the report")
    seed: int = 0

    @property
    def evaluation_name(self) -> str | None:
        """The directory in R/eval; None for the run's own test questions, whose results lie in R/eval itself."""
        split = "" if self.split == "test" else self.split
        stem = re.sub(r"(\.(jsonl|json|tsv|gz|bz2|zst))+$", "", PurePath(self.questions or "").name.lstrip("."))
        return self.evaluation or "-".join(part for part in (split, stem) if part) or None
