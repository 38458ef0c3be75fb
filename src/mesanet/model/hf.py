"""The models in transformers: importing this module registers them with its Auto classes.

    import mesanet.model.hf
    model = AutoModelForCausalLM.from_pretrained("folder")

The weights, the arithmetic and the cache are the library's own; this file only translates.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import Cache as TransformersCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from mesanet.config.base import from_dict, to_dict
from mesanet.config.model import ModelConfig
from mesanet.model.backbone import DTYPES, LanguageModel
from mesanet.model.cache import Cache
from mesanet.model.files import MODEL_TYPE, check_outside
from mesanet.model.loss import checked_targets, chunked_loss


class MesaNetConfig(PreTrainedConfig):  # type: ignore[misc]
    """A `mesanet.ModelConfig` as a transformers config, in the field `mesanet`."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ("past_key_values",)

    mesanet: dict[str, Any] | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the model's settings, and fill in those that are not given."""
        check_outside(kwargs, "config")
        self.mesanet = to_dict(from_dict(ModelConfig, self.mesanet or {}))
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, config: ModelConfig, **kwargs: Any) -> MesaNetConfig:
        """The transformers config of a model config."""
        return cls(mesanet=to_dict(config), **kwargs)

    @property
    def model_config(self) -> ModelConfig:
        """The library's own config."""
        return from_dict(ModelConfig, self.mesanet or {})

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.model_config.vocabulary

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self.mesanet = to_dict(replace(self.model_config, vocabulary=size))

    @property
    def hidden_size(self) -> int:
        """Size of the residual stream."""
        return self.model_config.width

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""
        return self.model_config.layers

    @property
    def num_attention_heads(self) -> int:
        """Heads of every mixer."""
        return self.model_config.heads


class MesaNetCache(TransformersCache):  # type: ignore[misc]
    """Our cache behind the interface that transformers' generation expects."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.content: Cache | None = None
        self.slots = 0

    def advance(self, content: Cache, tokens: int) -> None:
        """Take over what the model remembers after so many more tokens, padding included."""
        self.content = content
        self.slots += tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far, padding included."""
        return self.slots

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """There is no limit."""
        return -1

    @property
    def batch_size(self) -> int:
        """Number of rows, or -1 before the first call."""
        return -1 if self.content is None else self.content.rows

    @property
    def is_croppable(self) -> bool:
        """A recurrent state can't forget its last tokens."""
        return False

    def reset(self) -> None:
        """Forget everything."""
        self.content = None
        self.slots = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose rows, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Choose rows."""
        if self.content is not None:
            self.content = self.content.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.content is not None:
            self.batch_select_indices(torch.arange(self.content.rows).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens: the states do not keep what came before."""
        if tokens_to_remove != 0:
            raise ValueError("crop: recurrent states can't be shortened; generate without an assistant model")


class MesaNetPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What both transformers models share."""

    config_class = MesaNetConfig
    base_model_prefix = "wrapped"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ("Block",)
    _supports_sdpa = True
    _is_stateful = True

    def __init__(self, config: MesaNetConfig) -> None:
        super().__init__(config)
        settings = config.model_config
        if config.dtype is not None:
            name = str(config.dtype).removeprefix("torch.")
            settings = from_dict(ModelConfig, {**to_dict(settings), "dtype": name})
        self.model = LanguageModel(settings)
        self.post_init()

    def init_weights(self) -> None:
        """Our model has drawn its weights already."""
        self.tie_weights(recompute_mapping=False)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw what a file did not hold, and the rows of a resized embedding."""
        if any(getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters()):
            return
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
        else:
            getattr(module, "reset_parameters", lambda: None)()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, which makes the logits too."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Put another embedding in its place."""
        self.model.embedding = value

    def get_output_embeddings(self) -> None:
        """There is none: the logits are made of the input embedding itself."""
        return

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **options: Any) -> None:
        """Keep only the input of each block for the backward pass."""
        self.model.set_activation_checkpointing(True)

    def gradient_checkpointing_disable(self) -> None:
        """Keep everything for the backward pass."""
        self.model.set_activation_checkpointing(False)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether only the input of each block is kept."""
        return self.model.checkpoint_activations

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *arguments: Any, **options: Any) -> Any:
        """Load, and refuse by name the weights that lack, do not belong, or have another shape.

        Of the first two transformers only warns, and its refusal of the last does not say which weight it is.
        """
        wants_details = options.pop("output_loading_info", False)
        ignores_shapes = options.pop("ignore_mismatched_sizes", False)
        try:
            model, details = super().from_pretrained(
                pretrained_model_name_or_path,
                *arguments,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
        except SafetensorError as error:
            name = _damaged_file(pretrained_model_name_or_path, options.get("subfolder", ""))
            raise ValueError(f"{name} is damaged or no safetensors file: {error}") from error
        problems = [
            f"{problem} {name}"
            for field, problem in (
                ("missing_keys", "does not have"),
                ("unexpected_keys", "has, but the model does not,"),
            )
            for name in sorted(details[field])
        ]
        if not ignores_shapes:
            problems += [
                f"has {name} of shape {tuple(came)}, expected {tuple(expected)}"
                for name, came, expected in sorted(details["mismatched_keys"])
            ]
        if problems:
            more = f" (and {len(problems) - 1} more such problems)" if len(problems) > 1 else ""
            raise ValueError(f"{pretrained_model_name_or_path} does not fit its config: it {problems[0]}{more}")
        return (model, details) if wants_details else model

    def save_pretrained(self, *arguments: Any, **options: Any) -> Any:
        """Save with the config of the model as it stands, whatever dtype, vocabulary and solver it was built with."""
        settings = self.model.config
        self.config.mesanet = to_dict(settings)
        self.config.dtype = DTYPES[settings.dtype]
        return super().save_pretrained(*arguments, **options)

    def _read(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        past: TransformersCache | None,
        use_cache: bool | None,
        output_hidden_states: bool | None,
    ) -> tuple[Tensor, MesaNetCache | None, tuple[Tensor, ...] | None]:
        """Run the blocks; the mask may cover the tokens of earlier calls too.

        Returns the normalised residual stream, the cache, and, where they are asked for, the streams before each block
        with the normalised one at the end.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids: expected either these or inputs_embeds, and not both")
        inputs = inputs_embeds if input_ids is None else input_ids
        assert inputs is not None
        keep = self.config.use_cache if use_cache is None else use_cache
        if past is None and keep and not self.training:
            past = MesaNetCache()
        if past is not None and not isinstance(past, MesaNetCache):
            raise ValueError(
                f"past_key_values: got {type(past).__name__}, expected the MesaNetCache of an earlier call"
            )
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise ValueError(f"attention_mask: got {attention_mask.dim()} dimensions, expected 2: [batch, tokens]")
            attention_mask = attention_mask[:, attention_mask.shape[1] - inputs.shape[1] :].bool()
        wants_streams = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        streams: list[Tensor] | None = [] if wants_streams else None
        content = None if past is None else past.content
        hidden, content = self.model.hidden(inputs, content, mask=attention_mask, streams=streams)
        if past is not None:
            past.advance(content, inputs.shape[1])
        return hidden, past, None if streams is None else (*streams, hidden)


class MesaNetModel(MesaNetPreTrainedModel):
    """The model without logits."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TransformersCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """The normalised residual stream."""
        _refuse(others)
        hidden, past, streams = self._read(
            input_ids, inputs_embeds, attention_mask, past_key_values, use_cache, output_hidden_states
        )
        output = BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past, hidden_states=streams)
        return output if return_dict is not False else output.to_tuple()


class MesaNetForCausalLM(MesaNetPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The language model."""

    accepts_loss_kwargs = False
    """To the Trainer: the loss is a mean, and takes no number of items."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TransformersCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Logits, and with `labels` (shifted here; negative ones are ignored) the mean loss.

        While training with labels the logits are None: the loss never holds all of them at once. `logits_to_keep` asks
        for the logits of the last so many tokens, or of the places in a tensor.
        """
        _refuse(others)
        hidden, past, streams = self._read(
            input_ids, inputs_embeds, attention_mask, past_key_values, use_cache, output_hidden_states
        )
        loss = logits = None
        if labels is not None:
            table = self.model.embedding.weight
            cap = self.model.config.logits_cap
            targets = checked_targets(labels, table.shape[0])[:, 1:].to(hidden.device)
            loss, _ = chunked_loss(hidden[:, :-1], table, targets, cap)
        if labels is None or not self.training:
            kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
            logits = self.model.logits(hidden[:, kept])
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past, hidden_states=streams)
        return output if return_dict is not False else output.to_tuple()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *arguments: Any, **options: Any
    ) -> None:
        """Generation starts with our empty cache."""
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = MesaNetCache()


def _refuse(others: dict[str, Any]) -> None:
    """Refuse what the models can't do by its name; None and False ask for nothing."""
    for name, value in others.items():
        # The cache counts its tokens itself, and transformers may pass on the same count.
        if value is not None and value is not False and name != "cache_position":
            raise ValueError(f"{name}: got {type(value).__name__}, which the models of mesanet do not take")


def _damaged_file(name: Any, subfolder: str) -> Any:
    """The first weight file in a folder that can't be opened; the name itself where it is no folder."""
    for path in sorted((Path(name) / subfolder).glob("*.safetensors")):
        try:
            safe_open(path, framework="pt")
        except SafetensorError:
            return path
    return name


def from_language_model(model: LanguageModel, **settings: Any) -> MesaNetForCausalLM:
    """Wrap a model, sharing its weights; `settings` such as eos_token_id go into the config."""
    config = MesaNetConfig.of(model.config, dtype=DTYPES[model.config.dtype], **settings)
    with torch.device("meta"):
        wrapper = MesaNetForCausalLM(config)
    wrapper.model = model
    wrapper.train(model.training)
    return wrapper


def register() -> None:
    """Make AutoConfig, AutoModel and AutoModelForCausalLM know the models."""
    AutoConfig.register(MODEL_TYPE, MesaNetConfig, exist_ok=True)
    AutoModel.register(MesaNetConfig, MesaNetModel, exist_ok=True)
    AutoModelForCausalLM.register(MesaNetConfig, MesaNetForCausalLM, exist_ok=True)


register()
