"""Models in this process: loading, encoding, generation and log-probabilities.

There is one class per architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from leret.config.policy import LocalPolicySettings
from leret.core.errors import PolicyError, reason
from leret.policies.base import Completion, Messages
from leret.policies.checkpoints import (
    adapter_base,
    check_finite,
    load_tokenizer,
    pick_device,
    positions,
    read_model_json,
)
from leret.policies.local.chat_template import EncodedPrompt, PromptEncoder, end_token

if TYPE_CHECKING:
    from torch import Tensor

    from leret.policies.local.decoder import Job

_PREFIX_BYTES = 256 * 2**20  # maximum size of the cache of shared prompt prefixes


class CausalModel:
    """A decoder-only model, for sampling and training: prompt and completion are one sequence.

    Attributes:
        auto_class: transformers class that loads the weights.
        network: a transformers model, in evaluation mode during generation.
        tokenizer: a tokenizer with a chat template.
    """

    auto_class: ClassVar[str] = "AutoModelForCausalLM"

    def __init__(
        self, network: Any, tokenizer: Any, name: str, enable_thinking: bool | None = None
    ) -> None:
        from leret.policies.local.decoder import Decoder
        from leret.policies.local.kv_cache import PrefixCache

        self.network = network
        self.tokenizer = tokenizer
        settings = network.generation_config
        config = network.config.get_text_config(decoder=True)
        kinds = set(getattr(config, "layer_types", None) or ())
        unknown = kinds - {"full_attention", "sliding_attention"}
        if unknown:
            layers = f"layers of kind {', '.join(sorted(unknown))}"
            raise _unsupported(name, network.config.model_type, layers)
        if kinds:
            sliding = "sliding_attention" in kinds
        else:  # Mistral's key, GPT-Neo's key
            sliding = any(getattr(config, key, None) for key in ("sliding_window", "window_size"))
        self.encoder = PromptEncoder(tokenizer, positions(network), name, enable_thinking)
        self.decoder = Decoder(
            network,
            end_ids=self.encoder.set_ends(stop_ids(settings)),
            suppressed=settings.suppress_tokens or (),
            to_text=self.encoder.to_text,
            # Padding follows a shared prefix, and a sliding window would count it as tokens: do not
            # share prefixes.
            prefixes=None if sliding else PrefixCache(_PREFIX_BYTES),
        )

    def encode(self, messages: Messages, n_completion: int = 1) -> EncodedPrompt:
        """Return the prompt's tokens; raise `PromptTooLongError` if ``n_completion`` more do not fit."""
        return self.encoder.encode(messages, n_completion)

    def generate(self, jobs: Sequence[Job]) -> list[list[Completion]]:
        """Complete all prompts in one batch.

        Return one completion per seed for each job, in order.
        """
        completions = []
        for job, samples in zip(jobs, self.decoder.run(jobs), strict=True):
            n_prompt = len(job.token_ids)
            completions.append(
                [
                    self.encoder.completion(n_prompt, sample, job.stop, job.tools)
                    for sample in samples
                ]
            )
        return completions

    def renew(self) -> None:
        """Clear the caches; call it after each change of the weights."""
        if self.decoder.prefixes is not None:
            self.decoder.prefixes.clear()

    def check_trainable(self) -> None:
        """Raise `PolicyError` if training would refuse the chat template."""
        end_token(self.tokenizer, stop_ids(self.network.generation_config))

    @staticmethod
    def logps(network: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
        """Return the (n_tokens,) float32 log-probabilities of a completion, with gradients."""
        import torch

        device = next(network.parameters()).device
        ids = torch.tensor([[*prompt, *completion]], device=device)
        output = network(input_ids=ids, use_cache=False)
        logits = output.logits[0, len(prompt) - 1 : -1].float()
        logprobs = torch.log_softmax(logits, dim=-1)
        targets = ids[0, len(prompt) :, None]
        return logprobs.gather(-1, targets)[:, 0]


ARCHITECTURES = {"decoder": CausalModel}
"""Model classes by architecture: ``decoder`` or ``encoder-decoder``."""


def architecture_of(network: Any) -> type[CausalModel]:
    """Return the model class for a loaded network.

    Raise PolicyError if leret does not support the architecture.
    """
    return _architecture(
        network.config.is_encoder_decoder, network.config.model_type, network.config.name_or_path
    )


def _architecture(is_encoder_decoder: bool, kind: object, place: object) -> type[CausalModel]:
    architecture = ARCHITECTURES.get("encoder-decoder" if is_encoder_decoder else "decoder")
    if architecture is None:
        raise _unsupported(place, kind, "an encoder")
    return architecture


def _unsupported(place: object, kind: object, part: str) -> PolicyError:
    return PolicyError(
        f"{place} ({kind}) has {part}, which policies of kind local do not support; serve the "
        "model with vLLM or SGLang, and set policy.kind: openai"
    )


def load_model(path: Path, settings: LocalPolicySettings, name: str = "") -> CausalModel:
    """Load a model directory in evaluation mode; an adapter is merged into its base model.

    ``device: auto`` selects CUDA if available. ``dtype: auto`` selects float32 on a CPU, and the
    saved dtype elsewhere. ``name`` is the model's name for errors.
    """
    place = pick_device(settings.device)
    base = adapter_base(path)
    dtype = "float32" if settings.dtype == "auto" and place == "cpu" else settings.dtype
    network = load_weights(base or path, dtype)
    if base is not None:
        network = merge_into(network, path)
    tokenizer = load_tokenizer(path, settings.template)
    tokenizer.model_max_length = 2**62  # PromptEncoder checks lengths against the model's limit
    network.eval().requires_grad_(False)
    return architecture_of(network)(
        network.to(place), tokenizer, name or str(path), settings.enable_thinking
    )


def base_network(model: Any) -> Any:
    """Return a model without the wrapper of an adapter."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def stop_ids(settings: Any) -> tuple[int, ...]:
    """Return the token ids that stop generation with a model's ``generation_config``."""
    value = settings.eos_token_id
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(value)
    return (int(value),)


@contextmanager
def evaluation_mode(network: Any) -> Iterator[None]:
    """Switch a network to evaluation mode; the end of the block restores its mode."""
    in_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(in_training)


def load_weights(path: Path, dtype: str, **settings: Any) -> Any:
    """Load a network on the CPU. Missing weights raise PolicyError.

    The library transformers would initialize them randomly.

    ``settings`` are passed to ``from_pretrained``.
    """
    import transformers
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = read_model_json(path / "config.json")
    architecture = _architecture(
        bool(config.get("is_encoder_decoder")), config.get("model_type"), path
    )
    try:
        loaded: Any = getattr(transformers, architecture.auto_class).from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **settings,
        )
    except (
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:
        raise PolicyError(
            f"{architecture.auto_class} cannot load {path} ({reason(error)}); check its "
            "config.json, or serve the model with an engine that supports it, and set "
            "policy.kind: openai"
        ) from error
    network, info = loaded
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise PolicyError(
            f"{path} lacks {len(missing)} weights ({', '.join(missing[:3])}); save the model again"
        )
    check_finite(network, path)
    return network


def merge_into(network: Any, path: Path) -> Any:
    """Merge the adapter in ``path`` into its base network.

    Raise `PolicyError` if the adapter does not fit.
    """
    from peft import PeftModel

    try:
        merged = PeftModel.from_pretrained(network, str(path)).merge_and_unload()
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise PolicyError(
            f"adapter {path} does not fit its base ({reason(error)}); train the adapter again"
        ) from error
    check_finite(merged, path)
    return merged
