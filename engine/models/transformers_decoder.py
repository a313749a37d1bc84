"""Any other causal language model of transformers, through its own modelling code over our paged KV cache."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.errors import ModelError, StepInterrupted
from pdserve.engine.kv_cache import KVCache
from pdserve.engine.model_input import ModelInput
from pdserve.engine.models.model_dir import ModelDir
from pdserve.engine.models.transformers_attention import PagedStep, StepSlot, register
from pdserve.engine.models.transformers_checks import (
    AdaptedShape,
    check_loading,
    probe,
    refuse_unfit_class,
    refuse_unfit_config,
)
from pdserve.kernels.operations import Operations

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class TransformersDecoder:
    """Token ids in, logits of the wanted rows out, as `Decoder`; the model's own code decides all but attention.

    The head of a model may scale or cap what it projects, so that hidden states cannot be projected later: `forward`
    returns, for each row, where its logits are, and `logits` looks them up.
    """

    def __init__(self, model: Any, slot: StepSlot, config: AdaptedShape, operations: Operations) -> None:
        self.config = config
        self.is_interrupted = False  # set from another thread: nobody wants the result any more
        self._model = model
        self._slot = slot
        self._operations = operations
        self._logits = torch.empty(0, config.vocab_size)

    @classmethod
    def load(
        cls,
        model_dir: ModelDir,
        dtype: torch.dtype,
        operations: Operations,
        on_progress: Callable[[int, int], None] | None = None,
        device: torch.device = _CPU,
    ) -> "TransformersDecoder":
        """Load the model, and hold its attention against transformers' own on a short prompt.

        Raises:
            ModelError: a sentence that names the model type: what it keeps is not keys and values, or it attends in
                a way that paged attention cannot reproduce.
        """
        refuse_unfit_config(model_dir.config)
        model_type = str(model_dir.config.get("model_type"))
        model = _load_model(model_dir, model_type, dtype)
        refuse_unfit_class(model_type, type(model), inspect.signature(model.forward).parameters)
        register()
        slot = StepSlot()
        slot.attach(model)
        seen = probe(model_type, model, slot)
        if on_progress is not None:
            num_tensors = sum(1 for _ in model.parameters())
            on_progress(num_tensors, num_tensors)
        logger.info("%s runs through transformers' own code (%s)", model_type, type(model).__name__)
        return cls(model.to(device), slot, seen, operations)

    def forward(
        self, model_input: ModelInput, kv_cache: KVCache, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:  # [num_tokens, 1] int64
        """Run every token and store its keys and values; return where each row's logits are, -1 where not computed.

        `on_layer` is told how many layers have stored theirs.

        Raises:
            StepInterrupted: `is_interrupted` was set; some layers' keys and values are missing.
        """
        device = model_input.token_ids.device
        rows = _wanted_rows(model_input).to(device)
        spans = self._operations.prepare(model_input.spans)
        step = PagedStep(self._operations, kv_cache, model_input.slot_mapping, spans, self._before_layer(on_layer))
        with self._slot.filled(step):
            output = self._model(
                input_ids=model_input.token_ids.unsqueeze(0),
                position_ids=model_input.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=rows,
            )
        if on_layer is not None:
            on_layer(self.config.num_layers)
        self._logits = output.logits[0].float()
        places = torch.full((len(model_input.token_ids), 1), -1, device=device)
        places[rows, 0] = torch.arange(len(rows), device=device)
        return places

    def logits(self, hidden: Tensor) -> Tensor:  # [num_rows, vocab_size] float32
        """Return the logits of rows of the last `forward`, by what it returned for them."""
        places = hidden.flatten()
        assert bool((places >= 0).all()), "logits of a row that neither samples nor is scored"
        return self._logits[places]

    def _before_layer(self, on_layer: Callable[[int], None] | None) -> Callable[[int], None]:
        def before_layer(index: int) -> None:
            if self.is_interrupted:
                raise StepInterrupted("the engine is told to end")
            if on_layer is not None:
                on_layer(index)

        return before_layer

    def cache_salt(self, num_prompt_tokens: int) -> str:
        """Return what prefix sharing must be keyed by: nothing, as rotations that depend on length are refused."""
        return ""


def _load_model(model_dir: ModelDir, model_type: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(model_dir.path, **options)
        model, report = AutoModelForCausalLM.from_pretrained(
            model_dir.path,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (ValueError, KeyError, OSError, ImportError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"transformers cannot load this {model_type} model: {reason}") from error
    check_loading(model_type, report)
    return model.eval()


def _wanted_rows(model_input: ModelInput) -> Tensor:
    """The rows that sample or are scored, each once, in order; the first one if there is none."""
    scored = [torch.arange(part.first_row, part.first_row + len(part.token_ids)) for part in model_input.scored_rows]
    rows = torch.unique(torch.cat([model_input.sample_rows.cpu(), *scored]))
    return rows if len(rows) else torch.zeros(1, dtype=torch.int64)
