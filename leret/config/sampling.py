"""The recipe of `leret sample`. Every key that can change a result stands here with its default, unit and range."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

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


class AdapterSettings(Settings):
    """How DSPy turns a call into messages and a completion into fields."""

    kind: Literal["chat", "json", "xml", "compact"] = "chat"
    words_per_item: PositiveInt = Field(40, description="compact: words kept of each passage")
    items: PositiveInt = Field(6, description="compact: passages kept")
    demo_items: NonNegativeInt = Field(0, description="compact: passages kept in a demo")
    instructions: bool = Field(False, description="compact: send the signature's instructions")
    outputs: bool = Field(False, description="compact: name the outputs at the end of a call, as policy agent reads it")


def _with_class(path: str) -> str:
    if not all(path.rpartition(":")):
        raise ValueError(f"{path!r} names no class; write {path.rstrip(':')}:ClassName")
    return path


class ProgramSettings(Settings):
    """The DSPy program; other keys go to its constructor."""

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True)

    path: Annotated[
        str, AfterValidator(_with_class), Free(), RecipePath("program file", "name it as FILE.py:Class", member=True)
    ] = Field("pipelines/multihop.py:MultiHop", description="FILE.py:Class")
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
    path: Annotated[str | None, RecipePath("directory of prompts")] = Field(None, description="as R/prompts")


_FUNCTION = RecipePath("file of a reward", "name it as FILE.py:function", member=True, only=".py")


class PartSettings(Settings):
    """A part of a reward; other keys are settings of its function (``s`` of length, ``field`` of f1)."""

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True)

    weight: float = 1.0
    function: Annotated[str | None, _FUNCTION] = Field(None, description="its name, where the part is called otherwise")
    model: Annotated[str | None, RecipePath("model", hub=True)] = Field(None, description="of similarity")

    @property
    def arguments(self) -> dict[str, Any]:
        return {**(self.model_extra or {}), **({} if self.model is None else {"model": self.model})}


class RewardSettings(Settings):
    """A reward of several parts, each kept apart in every sample."""

    parts: dict[str, PartSettings] = Field(min_length=1, description="by name: its weight, or its settings")
    mixer: str = Field("weights", description="weights, uniform, std, pca, l2 or normalize_then_sum")
    unparsed_reward: Annotated[float | None, Free()] = Field(
        None, description="price of a completion that does not parse; none: it is left out"
    )

    @field_validator("parts", mode="before")
    @classmethod
    def _with_weights(cls, parts: Any) -> Any:
        """``[ap, format]`` and ``{ap: 1.0, format: 0.5}`` are short forms; a function's name may stand as the key."""
        named = dict.fromkeys(parts, 1.0) if isinstance(parts, list | tuple) else parts
        if not isinstance(named, dict):
            return named
        whole = {name: {"weight": part} if isinstance(part, int | float) else part for name, part in named.items()}
        return {
            name: {"function": name, **part} if ":" in str(name) and isinstance(part, dict) else part
            for name, part in whole.items()
        }


RewardKey = Annotated[
    Annotated[str, _FUNCTION, Tag("name")] | Annotated[RewardSettings, Tag("section")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "section"),
]
"""A name (``recall@5``, ``FILE.py:function``), or parts with a mixer."""


class SamplingSettings(Settings):
    """What is tried at every state, and how it is scored."""

    prompts: PositiveInt = Field(4, description="prompts of the bank, the zero-shot one included")
    samples: PositiveInt = Field(1, description="completions a prompt and state")
    seed: int = 0
    reward: RewardKey = Field("ap", description="of a step: any measure that evaluation takes too, or several parts")
    final: RewardKey | None = Field(None, description="reward of the program's end; none: as reward")
    final_weight: float = Field(0.5, ge=0, le=1, description="of final under credit both")
    credit: Literal["auto", "step", "final", "both"] = Field(
        "auto", description="what scores a completion: its step, the program's end, both, or what fits its predictor"
    )
    n_continuations: PositiveInt = Field(1, description="of credit final and both: runs to the end from each sample")
    concurrency: Annotated[PositiveInt, Free()] = Field(128, description="questions in flight")
    max_error_rate: Annotated[float, Free()] = Field(0.1, ge=0, le=1, description="of failed samples: stops the run")
    max_unparsed_rate: Annotated[float, Free()] = Field(0.5, ge=0, le=1, description="of completions: stops the run")
    strategy: Annotated[Literal["adjacent", "best-worst", "all", "margin"], Free()] = "adjacent"
    margin: Annotated[float, Free()] = Field(0.0, ge=0, description="of strategy margin: least difference of rewards")
    max_pairs: Annotated[PositiveInt | None, Free()] = Field(None, description="of a state, the widest margins first")
    bank: BankSettings = BankSettings()

    @property
    def end_reward(self) -> str | RewardSettings | None:
        """What scores the program's end; None where nothing does."""
        return self.final or (self.reward if self.credit in {"final", "both"} else None)

    @property
    def whole_reward(self) -> str | RewardSettings:
        """What scores a run of the whole program, for the bank: the reward of steps, unless the end alone counts."""
        return (self.end_reward if self.credit == "final" else None) or self.reward

    @property
    def rewards(self) -> tuple[str | RewardSettings, ...]:
        """Those that the recipe names."""
        return (self.reward,) if self.final is None else (self.reward, self.final)


class PretrainSettings(Settings):
    """How `leret pretrain` builds a small policy from gold-blind demonstrations."""

    kind: Literal["minilm"] = Field(description="a decoder on MiniLM's weights, trained on your corpus")
    steps: PositiveInt | None = None
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)


class SamplingRecipe(Settings):
    """`leret sample`: everything that later stages read from the run."""

    data: SerializeAsAny[DataSettings]
    retriever: SerializeAsAny[RetrieverSettings] = BM25Settings()
    policy: SerializeAsAny[PolicySettings] = LocalPolicySettings()
    policies: dict[str, SerializeAsAny[PolicySettings]] = Field(
        default_factory=dict,
        description="by the names of predictors and picks that have another policy; not sampled at temperature 0",
    )
    program: ProgramSettings = ProgramSettings()
    sampling: SamplingSettings = SamplingSettings()
    pretrain: Annotated[PretrainSettings | None, Free()] = None

    @property
    def by_predictor(self) -> dict[str, PolicySettings]:
        """The policies' settings, under ``""`` of all predictors without one of their own."""
        return {"": self.policy, **self.policies}

    def policy_of(self, predictors: Collection[str] | None) -> PolicySettings:
        """The settings of the policy that some predictors, or all, share."""
        return self.policies.get(next(iter(predictors or ()), ""), self.policy)

    def decoding_of(self, predictor: str) -> dict[str, Any]:
        """Temperature, top-p and most tokens that are not ``policy``'s alone."""
        named = {"temperature", "top_p", "max_tokens"}
        return self.policy_of([predictor]).model_dump(include=named) if self.policies else {}
