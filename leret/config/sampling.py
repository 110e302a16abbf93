"""The recipe of `leret sample`: keys with their defaults, units and ranges."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializeAsAny,
    Tag,
    field_validator,
)

from leret.config.base import Free, RecipePath, Settings
from leret.config.data import DataSettings
from leret.config.policy import LocalPolicySettings, PolicySettings
from leret.config.retriever import BM25Settings, RetrieverSettings
from leret.core.bundled import MINILM


class AdapterSettings(Settings):
    """The adapter, which formats calls as messages and parses completions into fields."""

    kind: Literal["chat", "json", "xml", "compact"] = "chat"
    words_per_item: PositiveInt = Field(40, description="words per passage (compact)")
    items: PositiveInt = Field(6, description="passages per call (compact)")
    demo_items: NonNegativeInt = Field(0, description="passages per demo (compact)")
    instructions: bool = Field(False, description="send the signature's instructions (compact)")
    prefill: bool = Field(
        False, description="send the fixed beginning of the answer, which the LM continues"
    )
    use_native_function_calling: bool = Field(
        False,
        description="pass `dspy.Tool` inputs to the chat template, and read `dspy.ToolCalls` (not compact)",
    )
    outputs: bool = Field(
        False, description="name the outputs at the end of a call; policy agent needs it (compact)"
    )


def _with_class(path: str) -> str:
    if not all(path.rpartition(":")):
        raise ValueError(f"{path!r} does not name a class; write {path.rstrip(':')}:ClassName")
    return path


class ProgramSettings(Settings):
    """The DSPy program. Other keys are passed to the program's constructor."""

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True)

    path: Annotated[
        str,
        AfterValidator(_with_class),
        Free(),
        RecipePath("program file", "name it as FILE.py:Class", member=True),
    ] = Field("pipelines/multihop.py:MultiHop", description="FILE.py:Class")
    adapter: AdapterSettings = AdapterSettings()

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class BankSettings(Settings):
    """Bootstrapping of few-shot prompts (LeReT, section 4.1)."""

    train_questions: PositiveInt = 50
    dev_questions: PositiveInt = 50
    max_demos: PositiveInt = 3
    candidates: PositiveInt | None = Field(
        None,
        description="candidate prompts, of which the best form the bank; None: 8, fewer in a small run",
    )
    temperature: float = Field(0.7, ge=0, description="temperature of the bootstrapping calls")
    path: Annotated[str | None, RecipePath("directory of prompts")] = Field(
        None, description="files as in R/prompts"
    )


_FUNCTION = RecipePath("reward file", "name it as FILE.py:function", member=True, only=".py")

REWARD_SHELF = {"answer_likelihood": "leret.extras.answer_likelihood:answer_likelihood"}
"""Short names of the rewards in leret/extras/, with their paths."""

WEIGHTS = "weights"
"""Name of the default mixer, the weighted sum."""

MIXER_SHELF = {
    "uniform": "leret.extras.mixers:uniform",
    "std": "leret.extras.mixers:std",
    "pca": "leret.extras.mixers:pca",
    "l2": "leret.extras.mixers:l2",
    "normalize_then_sum": "leret.extras.mixers:normalize_then_sum",
    "factors": "leret.extras.mixers:factors",
}
"""Short names of the mixers in leret/extras/, with their paths."""


class PartSettings(Settings):
    """A reward part. Keys not listed here are arguments of its function (``s`` for length, ``field`` for f1)."""

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True)
    removed: ClassVar[Mapping[str, Any]] = {"gain": None, "factor": False}

    weight: float = 1.0
    function: Annotated[str | None, _FUNCTION] = Field(
        None, description="None: the reward with the part's name"
    )
    model: Annotated[str | None, RecipePath("model", hub=True, names=(MINILM,))] = Field(
        None,
        description="for similarity (an encoder, such as minilm) and answer_likelihood (an LM)",
    )

    @property
    def arguments(self) -> dict[str, Any]:
        return {**(self.model_extra or {}), **({} if self.model is None else {"model": self.model})}


class RewardSettings(Settings):
    """A reward with several parts. Samples also store the value of each part."""

    parts: dict[str, PartSettings] = Field(
        min_length=1, description="parts by name, each with a weight or settings"
    )
    mixer: Annotated[str, _FUNCTION] = Field(
        WEIGHTS,
        description="weights, uniform, std, pca, l2, normalize_then_sum, factors or FILE.py:function",
    )
    unparsed_reward: Annotated[float | None, Free()] = Field(
        None, description="reward of completions that do not parse; None: drop these completions"
    )

    @field_validator("parts", mode="before")
    @classmethod
    def _with_weights(cls, parts: Any) -> Any:
        # Short forms: [ap, format], {ap: 1.0, format: 0.5}, or a function (FILE.py:function) as key.
        named = dict.fromkeys(parts, 1.0) if isinstance(parts, list | tuple) else parts
        if not isinstance(named, dict):
            return named
        sections = {}
        for name, part in named.items():
            section = {"weight": part} if isinstance(part, int | float) else part
            if ":" in str(name) and isinstance(section, dict):
                section = {"function": name, **section}
            sections[name] = section
        return sections


RewardKey = Annotated[
    Annotated[str, _FUNCTION, Tag("name")] | Annotated[RewardSettings, Tag("section")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "section"),
]
"""A name (``recall@5``, ``FILE.py:function``) or a section with parts."""


class SamplingSettings(Settings):
    """How states are sampled and samples are scored."""

    removed: ClassVar[Mapping[str, Any]] = {"gamma": 1.0}

    prompts: PositiveInt = Field(
        4, description="size of the prompt bank, including the zero-shot prompt"
    )
    samples: PositiveInt = Field(1, description="completions per prompt and state")
    seed: int = 0
    reward: RewardKey = Field("ap", description="step reward: a measure, or a section with parts")
    final: RewardKey | None = Field(
        None, description="reward for the program's result; None: same as reward"
    )
    final_weight: float = Field(0.5, ge=0, le=1, description="weight of `final` with credit: both")
    credit: Literal["auto", "step", "final", "both"] = Field(
        "auto",
        description="score by the step, the program's result (final), or both; auto: depends on the predictor",
    )
    n_continuations: PositiveInt = Field(
        1, description="continuations per sample (credit: final or both)"
    )
    concurrency: Annotated[PositiveInt, Free()] = Field(128, description="questions in flight")
    max_error_rate: Annotated[float, Free()] = Field(
        0.1, ge=0, le=1, description="maximum share of failed samples"
    )
    token_ids: Annotated[bool, Free()] = Field(
        False,
        description="store token ids and log-probabilities of completions, for `leret store export --form rl`",
    )
    max_unparsed_rate: Annotated[float, Free()] = Field(
        0.5, ge=0, le=1, description="maximum share of parse failures"
    )
    strategy: Annotated[Literal["adjacent", "best-worst", "all", "margin"], Free()] = "adjacent"
    margin: Annotated[float, Free()] = Field(
        0.0, ge=0, description="minimum reward difference (strategy margin)"
    )
    max_pairs: Annotated[PositiveInt | None, Free()] = Field(
        None, description="per state, largest margins first"
    )
    hint: Literal["gold"] | None = Field(
        None,
        description="gold: prompts but the first name missing gold documents, or the answer; the last has no demos",
    )
    bank: BankSettings = BankSettings()

    @property
    def n_few_shot(self) -> int:
        """Number of the bank's few-shot prompts: without the zero-shot prompt, and that with a hint."""
        return self.prompts - (1 if self.hint is None else 2)

    @property
    def end_reward(self) -> str | RewardSettings | None:
        """Reward for the program's result; None if only single steps are rewarded."""
        return self.final or (self.reward if self.credit in {"final", "both"} else None)

    @property
    def whole_reward(self) -> str | RewardSettings:
        """Reward for whole runs, used for the bank: `end_reward` with ``sampling.credit: final``, else ``reward``."""
        return (self.end_reward if self.credit == "final" else None) or self.reward

    @property
    def rewards(self) -> tuple[str | RewardSettings, ...]:
        return (self.reward,) if self.final is None else (self.reward, self.final)


class SamplingRecipe(Settings):
    """The recipe of `leret sample`. Later stages read it from the run."""

    data: SerializeAsAny[DataSettings]
    retriever: SerializeAsAny[RetrieverSettings] = BM25Settings()
    policy: SerializeAsAny[PolicySettings] = LocalPolicySettings()
    policies: dict[str, SerializeAsAny[PolicySettings]] = Field(
        default_factory=dict,
        description="policies by predictor or pick; not sampled if temperature is 0",
    )
    program: ProgramSettings = ProgramSettings()
    sampling: SamplingSettings = SamplingSettings()
    pretrain: Annotated[dict[str, Any] | None, Free()] = Field(
        None, description="settings of `python -m models pretrain`, which checks them"
    )

    @property
    def by_predictor(self) -> dict[str, PolicySettings]:
        """Policy settings by predictor; ``""`` is the default."""
        return {"": self.policy, **self.policies}

    def with_models(self, models: Mapping[str, str]) -> SamplingRecipe:
        """Return the recipe with other models, by predictor (``""``: the default)."""
        policies = {}
        for name, policy in self.by_predictor.items():
            policies[name] = policy.model_copy(update={"model": models.get(name, policy.model)})
        return self.model_copy(update={"policy": policies.pop(""), "policies": policies})

    def policy_of(self, predictors: Collection[str] | None) -> PolicySettings:
        """Return the policy settings that ``predictors`` share; None means all predictors."""
        return self.policies.get(next(iter(predictors or ()), ""), self.policy)

    def decoding_of(self, predictor: str) -> dict[str, Any]:
        """Return a predictor's temperature, top_p and max_tokens; empty if the recipe has no ``policies``."""
        keys = {"temperature", "top_p", "max_tokens"}
        return self.policy_of([predictor]).model_dump(include=keys) if self.policies else {}
